"""The residual stream of every family: how many points, of what kind, with the values that the libraries' own outputs have."""

import itertools
from copy import deepcopy
from pathlib import Path
from runpy import run_path

import pytest
import timm
import torch
from torch import Tensor, nn

import spatially
from spatially.errors import NotApplicable, UserError
from spatially.observe import Place, attention, feature_map, stream
from spatially.observe.attention_trace import LOST

_SHARED = run_path(str(Path(__file__).parent / "families.py"))
FAMILIES, subject_of, count_kinds = (_SHARED[name] for name in ("FAMILIES", "subject_of", "count_kinds"))


def pictures(name: str, count: int = 3) -> Tensor:
    return torch.rand(count, 3, FAMILIES[name].size, FAMILIES[name].size, generator=torch.Generator().manual_seed(1))


# The fused kernel of `nn.MultiheadAttention` is not used while anything intercepts: rounding differs.
STANDS_ASIDE = ("torchvision vit_b_16",)


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(name: str) -> None:
    subject, family, images = subject_of(name), FAMILIES[name], pictures(name)
    before = [(key, value.clone()) for key, value in subject.model.state_dict().items()]
    with torch.no_grad():
        expected = subject(images)
        with stream(subject) as seen:
            observed = subject(images)
        assert torch.equal(subject(images), expected)
    if name in STANDS_ASIDE:
        torch.testing.assert_close(observed, expected, atol=1e-6, rtol=0)
    else:
        assert torch.equal(observed, expected)
    places = stream(subject).places()
    assert count_kinds(places) == family.kinds
    assert places[-1].prefix == family.prefix
    assert [place for place, _ in seen] == places
    assert [place.index for place in places] == list(range(family.points))
    assert len({place.name for place in places}) == family.points
    for place, map in seen:
        assert map.shape == (3, place.channels, *place.grid)
        subject.model.get_submodule(place.name.split(":")[0])
    assert all(torch.equal(value, subject.model.state_dict()[key]) for key, value in before)
    assert not any(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in subject.model.modules())


# Outputs of stages that end before the first residual addition, or after the last one.
NOT_ON_THE_STREAM = {"timm resnet": 1, "timm resnext": 1, "timm efficientnet": 2, "timm mobilenetv3": 3}


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.split()[0] in ("timm", "own")])
def test_maps_are_what_timm_gives_as_features(name: str) -> None:
    subject, images = subject_of(name), pictures(name)
    with torch.no_grad():
        features = subject.model.forward_intermediates(subject.normalise(images), intermediates_only=True)
        with stream(subject) as seen:
            subject(images)
    maps = [map for _, map in seen]
    found = [any(map.shape == one.shape and torch.equal(map, one) for map in maps) for one in features]
    assert found.count(False) == NOT_ON_THE_STREAM.get(name, 0)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith("hf")])
def test_maps_are_the_hidden_states_of_transformers(name: str) -> None:
    subject, images = subject_of(name), pictures(name)
    with torch.no_grad():
        states = subject.model(subject.normalise(images), output_hidden_states=True).hidden_states
        with stream(subject) as seen:
            subject(images)
    seen = list(seen)
    # The last one may come after the final norm.
    for state in states[:-1]:
        assert any(torch.equal(map, as_map(state, place)) for place, map in seen if same_size(state, place))


def same_size(state: Tensor, place: Place) -> bool:
    return state[0].numel() == (place.grid[0] * place.grid[1] + place.prefix) * place.channels


def as_map(state: Tensor, place: Place) -> Tensor:
    return state if state.ndim == 4 else state[:, place.prefix :].transpose(1, 2).unflatten(2, place.grid)


BLOCKS = {  # the class whose outputs are points, and how they are held
    "torchvision resnet50": ("Bottleneck", lambda output: output),
    "torchvision vit_b_16": ("EncoderBlock", lambda output: output[:, 1:].transpose(1, 2).unflatten(2, (4, 4))),
    "torchvision swin_t": ("SwinTransformerBlock", lambda output: output.permute(0, 3, 1, 2)),
    "torchvision swin_v2_t": ("SwinTransformerBlockV2", lambda output: output.permute(0, 3, 1, 2)),
    "torchvision maxvit_t": ("MaxVitLayer", lambda output: output),
    "torchvision convnext_tiny": ("CNBlock", lambda output: output),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_maps_are_the_outputs_of_torchvisions_blocks(name: str) -> None:
    subject, (kind, read) = subject_of(name), BLOCKS[name]
    outputs: list[Tensor] = []
    for module in subject.model.modules():
        if type(module).__name__ == kind:
            module.register_forward_hook(lambda module, inputs, output: outputs.append(read(output).clone()))
    with torch.no_grad(), stream(subject) as seen:
        subject(pictures(name))
    outputs = outputs[-len(outputs) // 2 :]  # the pass that looked for the points gave as many before
    maps = [map for _, map in seen]
    assert outputs
    assert all(any(map.shape == one.shape and torch.equal(map, one) for map in maps) for one in outputs)


@pytest.mark.parametrize(
    ("name", "first", "last"),
    [
        ("own swin_tiny", (16, 24), (8, 12)),
        ("own swin_tiny_r", (16, 24), (8, 12)),
        ("own pit", (7, 11), (4, 6)),
        ("own vit_relposmlp", (4, 6), (4, 6)),
        ("timm convnext", (16, 24), (2, 3)),
        ("torchvision swin_t", (16, 24), (8, 12)),
        ("hf Swin", (16, 24), (8, 12)),
    ],
)
def test_rectangles(name: str, first: tuple[int, int], last: tuple[int, int]) -> None:
    subject = subject_of(name)
    with torch.no_grad(), stream(subject) as seen:
        subject(torch.rand(1, 3, 64, 96))
    seen = list(seen)
    assert (seen[0][0].grid, seen[-1][0].grid) == (first, last)
    assert seen[-1][1].shape[2:] == last


def test_positions_are_where_they_belong() -> None:
    """A network of patches alone: what changes in one corner of the image changes the map in that corner, in windows too."""

    class Windows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv2d(3, 8, 4, stride=4)
            self.body = nn.Linear(8, 8)
            self.head = nn.Linear(8, 5)

        def forward(self, images: Tensor) -> Tensor:
            tokens = self.embed(images).permute(0, 2, 3, 1).roll((-1, -1), (1, 2))
            batch, rows, columns, _ = tokens.shape
            windows = tokens.view(batch, rows // 2, 2, columns // 2, 2, 8).transpose(2, 3).reshape(-1, 4, 8)
            windows = windows + self.body(windows)
            return self.head(windows.reshape(batch, -1, 8).mean(1))

    subject = spatially.load(Windows(), name="windows", input_size=(32, 48), device="cpu")
    images = torch.rand(2, 3, 32, 48)
    with torch.no_grad():
        with stream(subject) as clean:
            subject(images)
        before = [(place, map) for place, map in clean]
        images[1, :, 4:8, 40:44] += 1
        with stream(subject) as changed:
            subject(images)
    assert [place.layout for place, _ in before] == ["windows", "windows"]
    for (_, old), (_, new) in zip(before, changed, strict=True):
        touched = (old != new).any(1)
        assert touched.nonzero().tolist() == [[1, 1, 10]]


class Block(nn.Module):
    """One way to write a residual addition."""

    def __init__(self, way: str, width: int = 8) -> None:
        super().__init__()
        self.way = way
        self.branch = nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.ReLU())
        self.other = nn.Conv2d(width, width, 1)
        self.gamma = nn.Parameter(torch.full((width, 1, 1), 0.5))
        self.activation = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        match self.way:
            case "in place":
                x = x.clone()
                x += self.branch(x)
                return self.activation(x)
            case "add_":
                return self.branch(x).add_(x)
            case "torch.add":
                return torch.add(x, self.branch(x), alpha=0.5)
            case "scaled":
                return x + nn.functional.dropout(self.gamma * self.branch(x), 0.1, self.training)
            case "addcmul":
                return torch.addcmul(x, self.gamma, self.branch(x))
            case "parallel":
                return x + self.branch(x) + self.other(x)
            case "together":
                return x + (self.branch(x) + self.other(x))
            case "inside":
                inner = self.other(x)
                return x + (inner + self.branch(inner))
            case "half":
                return (x.half() + self.branch(x).half()).float()
        raise AssertionError(self.way)


class Stack(nn.Module):
    def __init__(self, *ways: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, stride=4)
        self.blocks = nn.Sequential(*(Block(way) for way in ways))
        self.head = nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(images)).mean((2, 3)))


@pytest.mark.parametrize(
    ("way", "kinds"),
    [
        ("in place", ["convolution"]),
        ("add_", ["convolution"]),
        ("torch.add", ["convolution"]),
        ("scaled", ["convolution"]),
        ("addcmul", ["convolution"]),
        ("parallel", ["convolution", "mlp"]),
        ("together", ["convolution"]),
        ("inside", ["convolution"]),
        ("half", ["convolution"]),
    ],
)
@pytest.mark.parametrize("gradients", [False, True])
def test_every_way_to_write_an_addition(way: str, kinds: list[str], gradients: bool) -> None:
    torch.manual_seed(0)
    subject = spatially.load(Stack(way, way), name=way, input_size=16, device="cpu")
    outputs: list[Tensor] = []
    for block in subject.model.blocks:
        block.register_forward_hook(lambda module, inputs, output: outputs.append(output.clone()))
    with torch.set_grad_enabled(gradients), stream(subject) as seen:
        subject(torch.rand(3, 3, 16, 16))
    assert [place.kind for place, _ in seen] == ["stem", *kinds, *kinds]
    maps = [map for place, map in seen if place.index and not (place.index - 1) % len(kinds) < len(kinds) - 1]
    for map, output in zip(maps, outputs[-2:], strict=True):
        assert torch.equal(map.float(), output)


def test_gradients_flow_through_the_maps() -> None:
    subject = subject_of("timm vit")
    images = torch.rand(2, 3, 64, 64, requires_grad=True)
    with stream(subject) as seen:
        subject(images)
    place, map = list(seen)[1]
    (gradient,) = torch.autograd.grad(map[0, :, 0, 0].sum(), images)
    assert place.kind == "attention"
    assert gradient[0].abs().sum() > 0
    assert gradient[1].abs().sum() == 0


def test_found_without_gradients_used_with_them() -> None:
    subject = subject_of("torchvision maxvit_t")
    with torch.inference_mode(), stream(subject):
        subject(torch.rand(1, 3, 64, 64))
    images = torch.rand(1, 3, 64, 64, requires_grad=True)
    with stream(subject) as seen:
        subject(images)
    list(seen)[-1][1].sum().backward()
    assert images.grad is not None


def test_a_consumer_sees_each_map_once_and_nothing_is_kept() -> None:
    subject = subject_of("timm swin")
    seen: list[tuple[str, tuple[int, ...]]] = []
    with torch.no_grad(), stream(subject, lambda place, map: seen.append((place.name, tuple(map.shape)))) as watched:
        subject(pictures("timm swin", 2))
        subject(pictures("timm swin", 5))
    count = FAMILIES["timm swin"].points
    assert len(seen) == 2 * count
    assert [shape[0] for _, shape in seen] == [2] * count + [5] * count
    assert len(watched) == 0


def test_a_changed_model_is_looked_at_again() -> None:
    subject = subject_of("timm vit")
    before = len(stream(subject).places())
    subject.model.blocks = subject.model.blocks[:1]
    assert len(stream(subject).places()) == before - 2


def test_a_part_is_exchanged_while_it_is_watched() -> None:
    subject = spatially.load("resnet18", pretrained=False, input_size=64, device="cpu")
    images = torch.rand(2, 3, 64, 64)
    with stream(subject) as points:
        subject(images)
        before = len(points)
        subject.model.layer4[1] = nn.Identity()
        subject(images)
        assert len(points) == before - 1


def test_a_changed_setting_is_noticed() -> None:
    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.more = False
            self.convolutions = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
            self.head = nn.Linear(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            first, second, third = self.convolutions
            x = first(x)
            if self.more:
                x = x + third(x)
            return self.head((x + second(x)).mean((2, 3)))

    model = Switched()
    subject = spatially.load(model, input_size=8, device="cpu")
    assert [place.name for place in stream(subject).places()] == ["convolutions.0", "convolutions.1"]
    model.more = True
    assert [place.name for place in stream(subject).places()] == [f"convolutions.{at}" for at in (0, 2, 1)]


def test_half_precision_and_double() -> None:
    for dtype, expected in (("bfloat16", (torch.bfloat16, torch.float32)), ("float64", (torch.float64,))):
        subject = subject_of("timm vit", dtype=dtype)
        with torch.no_grad(), stream(subject) as seen:
            subject(pictures("timm vit"))
        assert len(seen) == FAMILIES["timm vit"].points
        assert all(map.dtype in expected for _, map in seen)


def test_compiled_models_are_seen_through() -> None:
    subject = subject_of("timm vit", compile=True)
    with torch.no_grad(), stream(subject) as seen:
        subject(pictures("timm vit"))
    assert len(seen) == FAMILIES["timm vit"].points


@pytest.mark.parametrize("way", ["wrapped", "in place", "a part"])
def test_models_that_come_compiled_are_seen_through(way: str) -> None:
    torch.manual_seed(0)
    model, images = Stack("in place", "parallel"), torch.rand(2, 3, 32, 32)
    plain = spatially.load(deepcopy(model), input_size=32, device="cpu")
    if way == "wrapped":
        model = torch.compile(model, backend="eager")
    else:
        (model if way == "in place" else model.blocks).compile(backend="eager")
    subject = spatially.load(model, input_size=32, device="cpu")
    for look in (stream, feature_map):
        with torch.no_grad(), look(plain) as expected:
            plain(images)
        with torch.no_grad(), look(subject) as seen:
            subject(images)
        assert [place for place, _ in seen] == [place for place, _ in expected]
        assert all(torch.equal(one, other) for (_, one), (_, other) in zip(seen, expected, strict=True))


def test_tokens_first() -> None:
    """`nn.TransformerEncoder` with the images on its second axis."""

    class TokensFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Conv2d(3, 16, 8, stride=8)
            self.encoder = nn.TransformerEncoder(
                nn.TransformerEncoderLayer(16, 2, 32, norm_first=True), 2, enable_nested_tensor=False
            )
            self.head = nn.Linear(16, 5)

        def forward(self, images: Tensor) -> Tensor:
            tokens = self.embed(images).flatten(2).permute(2, 0, 1)
            return self.head(self.encoder(tokens).mean(0))

    subject = spatially.load(TokensFirst(), name="tokens first", input_size=32, device="cpu")
    images = torch.rand(3, 3, 32, 32)
    with torch.no_grad(), stream(subject) as seen:
        subject(images)
        expected = subject.model.embed(subject.normalise(images))
    assert [place.kind for place, _ in seen] == ["stem", "attention", "mlp", "attention", "mlp"]
    torch.testing.assert_close(next(iter(seen))[1], expected, rtol=0, atol=0)


def test_no_residual_stream(subject: spatially.Subject) -> None:
    with pytest.raises(NotApplicable, match="small has no residual stream"):
        stream(subject).places()
    with pytest.raises(NotApplicable, match="small has no residual stream"), stream(subject):
        subject(torch.rand(1, 3, 32, 32))


def test_what_branches_alone_read_is_beside_the_stream() -> None:
    model = timm.create_model("gcvit_xxtiny", num_classes=5)
    places = stream(spatially.load(model, input_size=224, device="cpu")).places()
    assert not any("global_block" in place.name for place in places)
    assert [place.kind for place in places].count("mlp") == 12
    assert all(before.grid >= after.grid for before, after in itertools.pairwise(places))


class Pruned(nn.Module):
    """Keeps the half of the tokens that are longest, or all, each channel in order of size."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.way = way
        self.stem, self.head = nn.Conv2d(3, 8, 8, stride=8), nn.Linear(8, 5)
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks[0](self.stem(images).flatten(2).mT)
        if self.way == "sorted":
            return self.head(self.blocks[1](x.transpose(0, 1).msort().transpose(0, 1)).mean(1))
        longest = x.norm(dim=-1).topk(x.shape[1] // 2).indices
        return self.head(self.blocks[1](x.gather(1, longest[..., None].expand(-1, -1, 8))).mean(1))


@pytest.mark.parametrize("way", ["picked", "sorted"])
def test_tokens_that_are_picked_by_what_they_hold_have_no_known_places(way: str) -> None:
    subject = spatially.load(Pruned(way).eval(), name="pruned", input_size=64, device="cpu")
    with pytest.raises(NotApplicable, match="pruned has a residual stream that is lost on its way"):
        stream(subject).places()
    with pytest.raises(NotApplicable, match="pruned has a last feature map that is not found"):
        feature_map(subject).place()
    found = attention(subject).trace()
    assert [layer.name for layer in found.layers] == ["blocks.0.self_attn"]
    assert found.others == {"blocks.1.self_attn": LOST}


def test_residuals_without_a_map() -> None:
    class Vectors(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.body, self.head = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 5)

        def forward(self, images: Tensor) -> Tensor:
            vectors = self.embed(images.mean((2, 3)))
            return self.head(vectors + self.body(vectors))

    with pytest.raises(NotApplicable, match="no residual stream"):
        stream(spatially.load(Vectors(), name="vectors", input_size=8, device="cpu")).places()


def test_a_model_that_computes_otherwise_for_another_batch() -> None:
    class Fickle(Stack):
        def forward(self, images: Tensor) -> Tensor:
            if len(images) > 3:
                return self.head(self.stem(images).mean((2, 3)))
            return super().forward(images)

    subject = spatially.load(Fickle("scaled"), name="fickle", input_size=16, device="cpu")
    with torch.no_grad(), pytest.raises(UserError, match="does not compute the same for every batch"), stream(subject):
        subject(torch.rand(4, 3, 16, 16))


def test_an_error_leaves_nothing_behind() -> None:
    subject = subject_of("timm vit")

    def fail(place: Place, map: Tensor) -> None:
        raise KeyboardInterrupt

    with torch.no_grad(), pytest.raises(KeyboardInterrupt), stream(subject, fail):
        subject(pictures("timm vit"))
    assert not subject.model._forward_hooks
    assert not subject.model._forward_pre_hooks
    with torch.no_grad(), stream(subject) as seen:
        subject(pictures("timm vit"))
    assert len(seen) == FAMILIES["timm vit"].points
