"""Attention maps of every family: complete, in place, equal to what the libraries themselves compute, for nothing changed."""

from importlib import import_module
from pathlib import Path
from runpy import run_path

import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import spatially
from spatially.errors import NotApplicable, UserError
from spatially.observe import Layer, Weights, attention
from spatially.observe.parts import signature

attention_module = import_module("spatially.observe.attention")
Networks = run_path(str(Path(__file__).with_name("networks.py")))
NETWORKS, subject_of, pictures = Networks["NETWORKS"], Networks["subject_of"], Networks["pictures"]


def described(layer: Layer) -> tuple:
    return layer.kind, layer.heads, layer.grid, layer.key_grid, layer.prefix, layer.key_prefix


@pytest.mark.parametrize("name", list(NETWORKS))
def test_every_family(name):
    subject, images = subject_of(name), pictures(NETWORKS[name].size)
    with torch.no_grad():
        alone = subject(images)
        with attention(subject) as maps:
            watched = subject(images)
    assert torch.equal(alone, watched)
    assert [described(layer) for layer, _ in maps] == NETWORKS[name].layers
    assert [layer for layer, _ in maps] == attention(subject).layers()
    assert len({layer.name for layer, _ in maps}) == len(maps)
    for layer, weights in maps:
        assert weights.shape == (3, *layer.shape)
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5, rtol=0)
        assert (weights >= 0).all()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in subject.model.modules())


def test_channel_attention_is_none_over_positions():
    others = attention(subject_of("timm xcit")).others()
    assert list(others) == ["blocks.0.attn", "blocks.1.attn"]
    assert set(others.values()) == {"mixes channels, not positions"}


@pytest.mark.parametrize(
    "name", ["resnet18", "convnext_atto", "resnext26ts", "regnety_002", "efficientnet_b0", "mobilenetv3_small_100"]
)
def test_no_attention_is_said(name):
    subject = spatially.load(timm.create_model(name, num_classes=5), name=name, input_size=64, device="cpu")
    with pytest.raises(NotApplicable, match=f"{name} has no attention"), torch.no_grad(), attention(subject):
        subject(pictures(64))
    assert attention(subject).layers() == []


@pytest.mark.parametrize(
    ("name", "kind", "grid", "keys", "prefix"),
    [
        ("pvt_v2_b0", "global", (16, 16), (2, 2), 0),  # keys pooled
        ("mobilevit_xxs", "window", (8, 8), (8, 8), 0),  # every second pixel
        ("resnet50_clip", "global", (2, 2), (2, 2), 1),  # pools by a mean that asks
        ("halonet26t", "window", (16, 16), (16, 16), 0),  # windows that overlap
    ],
)
def test_families_beyond(name, kind, grid, keys, prefix):
    size = 256 if name == "halonet26t" else 64
    model = timm.create_model(name, num_classes=5, **({"img_size": 64} if "clip" in name else {}))
    layer, weights = next(iter(maps_of(spatially.load(model, input_size=size, device="cpu"), pictures(size)).items()))
    assert (layer.kind, layer.grid, layer.key_grid, layer.prefix) == (kind, grid, keys, prefix)
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-5, rtol=0)


# Where queries and keys belong: what changes when one token of the map that enters a block is changed.

PLACES = [  # network, module whose input is a map in the image's order, its layout, steps from queries and keys to the map
    ("timm vit", "blocks.1", "tokens", 1, 1),
    ("timm deit", "blocks.1", "tokens", 1, 1),
    ("timm beit", "blocks.1", "tokens", 1, 1),
    ("timm cait", "blocks.1.attn", "tokens", 1, 1),
    ("timm swin", "layers.0.blocks.0", "nhwc", 1, 1),
    ("timm swin", "layers.0.blocks.1", "nhwc", 1, 1),
    ("timm swin", "layers.1.blocks.1", "nhwc", 1, 1),
    ("timm swinv2", "layers.0.blocks.1", "nhwc", 1, 1),
    ("timm maxvit", "stages.0.blocks.0.attn_block", "nhwc", 1, 1),
    ("timm maxvit", "stages.0.blocks.0.attn_grid", "nhwc", 1, 1),
    ("timm coatnet", "stages.2.blocks.0.attn", "nchw", 1, 1),
    ("timm levit", "stages.0.blocks.1.attn", "tokens", 1, 1),
    ("timm levit", "stages.1.downsample.attn_downsample", "tokens", 2, 1),
    ("timm efficientformer", "stages.3.blocks.4.token_mixer", "tokens", 1, 1),
    ("torchvision vit", "encoder.layers.encoder_layer_1", "tokens", 1, 1),
    ("torchvision swin", "features.1.1", "nhwc", 1, 1),
    ("torchvision swin", "features.3.1", "nhwc", 1, 1),
    ("torchvision swinv2", "features.1.1", "nhwc", 1, 1),
    ("torchvision maxvit", "blocks.0.layers.0.layers.window_attention", "nchw", 1, 1),
    ("torchvision maxvit", "blocks.0.layers.0.layers.grid_attention", "nchw", 1, 1),
    ("hf vit", "vit.layers.1", "tokens", 1, 1),
    ("hf swin", "swin.encoder.layers.0.blocks.1", "tokens", 1, 1),
    ("own swin", "layers.0.blocks.1", "nhwc", 1, 1),
    ("own swin", "layers.1.blocks.1", "nhwc", 1, 1),
    ("own regular swin", "layers.0.blocks.1.attn", "nhwc", 1, None),  # its keys are a convolution's
    ("own alternet", "stages.1.1.attn", "nchw", 1, 1),
]


@pytest.mark.parametrize(("name", "path", "layout", "query_step", "key_step"), PLACES)
@pytest.mark.parametrize("place", [(1, 2), (-1, 0)])
def test_weights_are_where_their_tokens_are(name, path, layout, query_step, key_step, place):
    subject, images = subject_of(name, "float64"), pictures(NETWORKS[name].size)
    layer = next(layer for layer in attention(subject).layers() if layer.name.startswith(path))
    row, column = (place[0] % layer.grid[0], place[1] % layer.grid[1])
    there = (row * query_step, column * query_step)
    side = layer.grid[0] * query_step if layer.key_grid == layer.grid else layer.key_grid[0]

    def change(module: nn.Module, arguments: tuple) -> tuple:
        changed = arguments[0].clone()
        direction = torch.linspace(-3, 3, changed.shape[1 if layout == "nchw" else -1], dtype=changed.dtype).cos()
        if layout == "tokens":
            changed[1, layer.prefix + there[0] * side + there[1]] += direction
        elif layout == "nhwc":
            changed[1, there[0], there[1]] += direction
        else:
            changed[1, :, there[0], there[1]] += direction
        return changed, *arguments[1:]

    before = maps_of(subject, images)[layer]
    hook = subject.model.get_submodule(path).register_forward_pre_hook(change)
    after = maps_of(subject, images)[layer]
    hook.remove()
    for image in (0, 2):
        torch.testing.assert_close(after[image], before[image], rtol=0, atol=1e-12)
    query = layer.prefix + row * layer.grid[1] + column
    if key_step is None:
        return
    key = layer.key_prefix + there[0] * layer.key_grid[1] + there[1]
    seen = before[1] > 1e-20  # masks of −100 leave e⁻¹⁰⁰
    moved = torch.where(seen, (after[1] / before[1]).log(), torch.nan)
    rest = moved.clone()
    rest[:, :, key] = torch.nan
    low, high = rest.nan_to_num(torch.inf).amin(-1), rest.nan_to_num(-torch.inf).amax(-1)
    others = torch.arange(before.shape[2]) != query
    # All other rows are divided by another sum, and nothing else: their ratios stay, but for the changed key.
    assert ((high - low)[:, others] < 1e-7).all()
    assert ((high - low)[:, query] > 1e-6).all()
    sees = seen[:, :, key] & others
    assert ((moved[:, :, key] - low).abs()[sees] > 1e-7).float().mean() > 0.95
    unmoved = ~seen[:, :, key] & others
    assert (moved[unmoved].nan_to_num(0).abs() < 1e-7).all()


def maps_of(subject: spatially.Subject, images: Tensor) -> dict[Layer, Tensor]:
    with torch.no_grad(), attention(subject) as maps:
        subject(images)
    return dict(maps)


def test_pooled_keys_are_in_place():
    """MViT's keys are a 3×3 convolution of stride 4: the token at (4, 8) is seen by the key (1, 2) alone."""
    subject, images = subject_of("timm mvitv2", "float64"), pictures(64)
    layer = attention(subject).layers()[0]
    assert (layer.grid, layer.key_grid) == ((16, 16), (4, 4))

    def change(module: nn.Module, arguments: tuple) -> tuple:
        changed = arguments[0].clone()
        changed[1, 4 * 16 + 8] += torch.linspace(-3, 3, changed.shape[-1], dtype=changed.dtype).cos()
        return changed, *arguments[1:]

    before = maps_of(subject, images)[layer]
    hook = subject.model.get_submodule("stages.0.blocks.0").register_forward_pre_hook(change)
    after = maps_of(subject, images)[layer]
    hook.remove()
    moved = (after[1] / before[1]).log()[0]
    spread = moved - moved[:, :1]
    touched = torch.zeros(16, 16, dtype=torch.bool)
    touched[3:6, 7:10] = True  # the queries are a 3×3 convolution of stride 1
    others = ~touched.flatten()
    assert spread[others][:, [key for key in range(16) if key != 6]].abs().max() < 1e-7
    assert (spread[others][:, 6].abs() > 1e-7).all()
    assert (spread[~others].abs().amax(1) > 1e-6).all()


def test_windows_see_what_they_should():
    """Swin's second block is shifted by 3: the windows of 7 begin at −4, 3, 10 of a map of 14, and end at its edge."""
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", img_size=56, embed_dim=16, depths=(2, 1), num_heads=(2, 4), num_classes=5
    )
    maps = list(maps_of(spatially.load(model, name="swin", input_size=56, device="cpu"), pictures(56)).values())
    places = torch.arange(14)
    for weights, windows in ((maps[0], places // 7), (maps[1], (places + 4) // 7)):
        same = windows[:, None] == windows
        visible = (same[:, None, :, None] & same[None, :, None, :]).reshape(196, 196)
        assert torch.equal((weights > 1e-9).any(0).any(0), visible)


def test_grid_attention_is_strided():
    subject = subject_of("timm maxvit")
    block, grid = (weights for _, weights in list(maps_of(subject, pictures(64)).items())[:2])
    places = torch.arange(16)
    for weights, group in ((block, places // 2), (grid, places % 8)):
        same = group[:, None] == group
        visible = (same[:, None, :, None] & same[None, :, None, :]).reshape(256, 256)
        assert torch.equal((weights > 0).any(0).any(0), visible)


# Against what the libraries compute themselves


@pytest.mark.parametrize("name", ["timm vit", "timm beit", "timm swin", "timm relpos", "timm maxvit", "timm coatnet"])
def test_fused_equals_eager(name):
    subject, images = subject_of(name), pictures(NETWORKS[name].size)
    fused = maps_of(subject, images)
    for module in subject.model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False
    eager = maps_of(subject, images)
    assert list(fused) == list(eager)
    for layer, weights in fused.items():
        torch.testing.assert_close(weights, eager[layer], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["hf vit", "hf deit", "hf dinov2"])
def test_equals_hugging_face(name):
    subject, images = subject_of(name), pictures(64)
    ours = list(maps_of(subject, images).values())
    inner = next(module for module in subject.model.modules() if hasattr(module, "set_attn_implementation"))
    inner.set_attn_implementation("eager")
    with torch.no_grad():
        theirs = inner(subject.normalise(images), output_attentions=True).attentions
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_equals_multihead_attention():
    subject, images = subject_of("torchvision vit"), pictures(64)
    module, seen = subject.model.encoder.layers.encoder_layer_0.self_attention, []
    hook = module.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    first = next(iter(maps_of(subject, images).values()))
    hook.remove()
    with torch.no_grad():
        _, weights = module(seen[-1], seen[-1], seen[-1], average_attn_weights=False)
    torch.testing.assert_close(first, weights, atol=1e-6, rtol=0)


class Layer1(nn.Module):
    """Attention in the middle of a network whose every part can be exchanged."""

    def __init__(self, attend) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 8, 8)
        self.attend = attend
        self.head = nn.Linear(16, 4)
        self.num_classes = 4

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.stem(images).flatten(2).transpose(1, 2).unflatten(2, (3, -1)).unbind(2)
        return self.head(self.attend(*tokens).mean(1)).softmax(-1)


def seen_in(attend, images: Tensor | None = None) -> tuple[spatially.Subject, list]:
    torch.manual_seed(0)
    subject = spatially.load(Layer1(attend), name="home-made", input_size=32, device="cpu", dtype="float32")
    images = pictures(32) if images is None else images
    with torch.no_grad(), attention(subject) as maps:
        subject(images)
    return subject, list(maps)


def heads(tensor: Tensor, count: int = 2) -> Tensor:
    return tensor.unflatten(-1, (count, -1)).transpose(1, 2)


def test_masks_scale_and_causality():
    mask = torch.randn(16, 16)

    def fused(**options):
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            kept.append((heads(q), heads(k)))
            out = torch.nn.functional.scaled_dot_product_attention(heads(q), heads(k), heads(v), **options)
            return out.transpose(1, 2).flatten(2)

        return attend

    cases = [
        ({"attn_mask": mask, "scale": 2.0}, 2.0, mask),
        ({"attn_mask": mask > -0.5}, 8**-0.5, torch.zeros_like(mask).masked_fill(mask <= -0.5, -torch.inf)),
        ({"is_causal": True}, 8**-0.5, torch.full((16, 16), -torch.inf).triu(1)),
    ]
    for options, scale, bias in cases:
        kept: list = []
        _, [(layer, weights)] = seen_in(fused(**options))
        query, key = kept[-1]
        torch.testing.assert_close(weights, (query @ key.mT * scale + bias).softmax(-1))
        assert (layer.grid, layer.prefix, layer.heads) == ((4, 4), 0, 2)


def test_grouped_keys():
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = k[..., :8], v[..., :8]
        kept.append((heads(q, 4), heads(k)))
        out = torch.nn.functional.scaled_dot_product_attention(heads(q, 4), heads(k), heads(v), enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    kept: list = []
    _, [(layer, weights)] = seen_in(attend)
    query, key = kept[-1]
    assert layer.heads == 4
    torch.testing.assert_close(weights, (query @ key[:, [0, 0, 1, 1]].mT / 2).softmax(-1))


@pytest.mark.parametrize("form", ["matmul", "bmm", "einsum", "keys first", "heads last"])
def test_softmax_in_every_form(form):
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = heads(q), heads(k), heads(v)
        kept.append((q, k))
        if form == "matmul":
            out = torch.softmax(q @ k.transpose(-2, -1), -1) @ v
        elif form == "bmm":
            weights = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).softmax(dim=-1)
            out = torch.bmm(weights, v.flatten(0, 1)).unflatten(0, q.shape[:2])
        elif form == "einsum":
            weights = torch.nn.functional.softmax(torch.einsum("bhid,bhjd->bhij", q, k), dim=-1)
            out = torch.einsum("bhij,bhjd->bhid", weights, v)
        elif form == "keys first":
            out = (k @ q.mT).softmax(dim=-2).mT @ v
        else:
            weights = nn.Softmax(dim=2)((q @ k.mT).permute(0, 2, 3, 1))
            out = weights.permute(0, 3, 1, 2) @ v
        return out.transpose(1, 2).flatten(2)

    kept: list = []
    _, [(_, weights)] = seen_in(attend)  # the classifier's own softmax is none
    query, key = kept[-1]
    torch.testing.assert_close(weights, (query @ key.mT).softmax(-1))


def test_gates_are_no_attention():
    def pool(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return v * (q * k).softmax(1) + (k.transpose(1, 2) @ v).softmax(-1).sum(1, keepdim=True)

    with pytest.raises(NotApplicable, match="mixes channels"):
        seen_in(pool)


def test_our_own_operation_by_its_definition():
    def attend(q: Tensor, k: Tensor, v: Tensor, **options) -> Tensor:
        q, k, v = (one.unflatten(1, (4, 4)).unflatten(-1, (2, 8)) for one in (q, k, v))
        kept.append((q, k))
        return spatially.nn.regular_attention(q, k, v, window=3, **options).flatten(3).flatten(1, 2)

    places = torch.arange(4)
    for border in ("mask", "zero", "shift"):
        for backend in ("tiled", "reference"):
            kept: list = []
            bias = torch.randn(2, 3, 3)
            _, [(layer, weights)] = seen_in(
                lambda q, k, v, border=border, backend=backend, bias=bias: attend(
                    q, k, v, border=border, backend=backend, bias=bias
                )
            )
            query, key = (one.permute(0, 3, 1, 2, 4).flatten(2, 3) for one in kept[-1])
            start = (places - 1).clamp(0, 1) if border == "shift" else places - 1
            slot = places - start[:, None]  # (query, key) along one axis
            inside = (slot >= 0) & (slot < 3)
            down, across = slot[:, None, :, None].expand(4, 4, 4, 4), slot[None, :, None, :].expand(4, 4, 4, 4)
            seen = (inside[:, None, :, None] & inside[None, :, None, :]).reshape(16, 16)
            logits = query @ key.mT * 8**-0.5 + bias[:, down.clamp(0, 2), across.clamp(0, 2)].reshape(2, 16, 16)
            logits = logits.masked_fill(~seen, -torch.inf)
            if border == "zero":  # what lies outside has key 0
                assert layer.key_prefix == 1
                rest = torch.stack([_outside(bias, row, column) for row in range(4) for column in range(4)], 1)
                logits = torch.cat([rest.expand(3, -1, -1).unsqueeze(-1), logits], -1)
            torch.testing.assert_close(weights, logits.softmax(-1))
            assert layer.kind == "neighbourhood"
            assert layer.reach == 9


def _outside(bias: Tensor, row: int, column: int) -> Tensor:
    """Log of the summed weights of the slots of a query's square that lie outside a map of 4×4."""
    slots = [(i, j) for i in range(3) for j in range(3) if not (0 <= row + i - 1 < 4 and 0 <= column + j - 1 < 4)]
    found = [bias[:, i, j] for i, j in slots]
    return torch.stack(found).logsumexp(0) if found else torch.full((2,), -torch.inf, dtype=bias.dtype)


def test_the_kernels_operation_is_seen():
    operations = pytest.importorskip("spatially.nn.regular_attention.operations")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (one.unflatten(1, (4, 4)).unflatten(-1, (1, 16)).contiguous() for one in (q, k, v))
        out, _ = operations.attention([q, k, v], None, 3, "mask", 0.25)
        return out.flatten(3).flatten(1, 2)

    _, [(layer, weights)] = seen_in(attend)
    assert (layer.kind, layer.heads, layer.grid) == ("neighbourhood", 1, (4, 4))
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 1, 16))


# Streaming


def test_consumers_see_layers_in_turn_and_let_go():
    subject, images = subject_of("timm swin"), pictures(72, 5)
    kept = maps_of(subject, images)
    seen: list[Weights] = []

    def look(layer: Layer, weights: Weights) -> None:
        whole = kept[layer]
        assert weights.shape == whole.shape
        one = 4 * layer.heads * layer.shape[1] * layer.shape[2]
        parts = list(weights.parts(2 * one))
        assert [part.start for part, _ in parts] == [0, 2, 4]
        assert torch.equal(torch.cat([part for _, part in parts]), whole)
        assert torch.equal(weights[-1], whole[-1])
        assert torch.equal(torch.stack(list(weights)), whole)
        seen.append(weights)

    with torch.no_grad(), attention(subject, look):
        subject(images)
    assert [weights.layer for weights in seen] == list(kept)
    with pytest.raises(UserError, match="while their consumer runs"):
        seen[0].whole()


def test_batches_sizes_and_changes_of_the_model():
    subject = subject_of("torchvision swin")
    whole = maps_of(subject, pictures(72, 4))
    for image in range(4):
        for layer, weights in maps_of(subject, pictures(72, 4)[image : image + 1]).items():
            torch.testing.assert_close(weights[0], whole[layer][image], atol=1e-6, rtol=0)
    wide = torch.rand(2, 3, 64, 96)
    assert [layer.grid for layer in maps_of(subject, wide)] == [(16, 24), (16, 24), (8, 12), (8, 12)]
    subject.model.features[1][1].attn.shift_size = [0, 0]
    first, second, *_ = maps_of(subject, wide).values()
    assert torch.equal((first > 1e-9).any(0).any(0), (second > 1e-9).any(0).any(0))


@pytest.mark.parametrize(
    ("before", "after"), [(-1, -2), (1, True), ((1, 2), (2, 1)), (torch.Size([1]), torch.Size([2]))]
)
def test_settings_that_hash_alike_are_told_apart(before, after):
    """-1 and -2 have one hash, 1 and True are equal."""
    model = nn.Sequential(nn.Softmax(dim=-1), nn.Identity())
    model[0].dim = before
    first = signature(model)
    model[0].dim = after
    assert signature(model) != first
    model[0].dim = before
    assert signature(model) == first


def test_gradients_flow_through_maps_and_outputs_stay():
    subject, images = subject_of("timm vit"), pictures(64).requires_grad_()
    with attention(subject) as maps:
        logits = subject(images)
    (gradient,) = torch.autograd.grad(maps[1][1][:, :, 3, 5].sum(), images, retain_graph=True)
    assert gradient.abs().sum() > 0
    (watched,) = torch.autograd.grad(logits.sum(), images)
    (alone,) = torch.autograd.grad(subject(images).sum(), images)
    assert torch.equal(watched, alone)


@pytest.mark.parametrize("name", ["timm vit", "timm swin", "torchvision vit", "own swin", "own regular swin"])
def test_half_precision(name):
    subject, images = subject_of(name, "bfloat16"), pictures(NETWORKS[name].size)
    exact = maps_of(subject_of(name), images)
    with torch.no_grad():
        alone = subject(images)
        with attention(subject) as maps:
            assert torch.equal(subject(images), alone)
    for layer, weights in maps:
        assert weights.dtype == torch.float32
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), atol=1e-2, rtol=0)
        assert (weights - exact[layer]).abs().max() < 0.1


def test_what_was_raised_leaves_nothing_behind():
    subject, images = subject_of("timm vit"), pictures(64)

    def fail(layer: Layer, weights: Weights) -> None:
        raise RuntimeError("consumer")

    with pytest.raises(RuntimeError, match="consumer"), torch.no_grad(), attention(subject, fail):
        subject(images)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in subject.model.modules())
    assert len(maps_of(subject, images)) == 2


def test_two_observations_at_once():
    subject, images = subject_of("timm vit"), pictures(64)
    with torch.no_grad(), attention(subject) as outer, attention(subject) as inner:
        subject(images)
    assert len(outer) == len(inner) == 2
    assert torch.equal(outer[0][1], inner[0][1])


def test_kept_maps_are_not_written_over():
    class Halved(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 24, 16, 16), nn.Linear(8, 5)

        def forward(self, images):
            queries, keys, values = self.stem(images).flatten(2).mT.chunk(3, -1)
            weights = (queries @ keys.mT).softmax(-1)
            weights.mul_(0.5)
            return self.head((weights @ values).mean(1))

    subject = spatially.load(Halved(), name="halved", input_size=64, device="cpu")
    with torch.no_grad(), attention(subject) as seen:
        subject(pictures(64))
    torch.testing.assert_close(seen[0][1].sum(-1), torch.ones(3, 1, 16))


def test_attention_of_one_image_after_another_is_said():
    class OneByOne(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem, self.head = nn.Conv2d(3, 24, 16, 16), nn.Linear(8, 5)

        def forward(self, images):
            found = []
            for one in self.stem(images).flatten(2).mT:
                queries, keys, values = one.chunk(3, -1)
                found.append(
                    nn.functional.scaled_dot_product_attention(*(part[None] for part in (queries, keys, values)))
                )
            return self.head(torch.cat(found).mean(1))

    subject = spatially.load(OneByOne(), name="single", input_size=64, device="cpu")
    with pytest.raises(NotApplicable, match="computed for one image at a time"):
        maps_of(subject, pictures(64))


@pytest.mark.parametrize("in_place", [False, True])
def test_models_that_come_compiled(in_place):
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=4).eval()
    with torch.no_grad(), attention(spatially.load(model, input_size=32, device="cpu")) as expected:
        expected.subject(pictures(32))
    if in_place:
        model.compile(backend="eager")
    subject = spatially.load(model if in_place else torch.compile(model, backend="eager"), input_size=32, device="cpu")
    with torch.no_grad(), attention(subject) as maps:
        subject(pictures(32))
    for (layer, weights), (known, others) in zip(maps, expected, strict=True):
        assert layer == known
        assert torch.equal(weights, others)


def test_compiled_models_are_watched_uncompiled():
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=4)
    subject = spatially.load(model, input_size=32, device="cpu", compile=True)
    plain = spatially.load(model, input_size=32, device="cpu")
    with torch.no_grad(), attention(subject) as maps:
        watched = subject(pictures(32))
    assert len(maps) == 2
    with torch.no_grad():
        assert torch.equal(watched, plain(pictures(32)))


def test_scripts_hide():
    module = torch.jit.trace(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4)), torch.rand(1, 3, 32, 32))
    subject = spatially.load(module, name="script", input_size=32, device="cpu", num_classes=None)
    with pytest.raises(NotApplicable, match="TorchScript"):
        attention(subject).layers()


class Largest(TorchDispatchMode):
    """The size of the largest tensor that is made."""

    bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and not function.is_view:
            self.bytes = max(self.bytes, result.numel() * result.element_size())
        return result


def test_memory_is_bounded():
    """All weights of a layer are 8·4·1025² numbers, 134 MB; they come in parts of 20 MB."""
    torch.manual_seed(0)
    model = timm.create_model(
        "vit_tiny_patch16_224", img_size=128, patch_size=4, embed_dim=16, num_heads=4, depth=1, num_classes=4
    )
    subject = spatially.load(model, input_size=128, device="cpu")
    images, seen = torch.rand(8, 3, 128, 128), []

    def look(layer: Layer, weights: Weights) -> None:
        for form in (weights.parts, weights.local_parts):
            with Largest() as largest:
                for part, weight in form(20_000_000):
                    seen.append(part)
                    assert weight.sum() == pytest.approx(4 * 1025, rel=1e-4)
            assert largest.bytes <= 20_000_000

    with torch.no_grad():
        subject(images[:1])
        with attention(subject, look):
            subject(images)
    assert len(seen) == 16


@pytest.mark.parametrize("name", ["own swin", "own swin key"])
def test_our_windows_on_fused_kernels(name, monkeypatch):
    """Where there is a GPU they lie among the heads."""
    subject, images = subject_of(name), pictures(72)
    formula = maps_of(subject, images)
    monkeypatch.setattr("spatially.nn.window_attention.FORMULA_DEVICES", ())
    attention_module._traces.clear()
    fused = maps_of(subject, images)
    assert list(fused) == list(formula)
    for layer, weights in fused.items():
        torch.testing.assert_close(weights, formula[layer], atol=1e-5, rtol=0)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(
    "name", ["timm vit", "timm swin", "timm mvitv2", "torchvision vit", "own swin", "own regular swin"]
)
def test_the_same_on_a_gpu(name):
    here, images = subject_of(name), pictures(NETWORKS[name].size)
    expected = maps_of(here, images)
    there = spatially.load(here.model, name=name, input_size=NETWORKS[name].size, device="cuda", dtype="float32")
    for layer, weights in maps_of(there, images).items():
        torch.testing.assert_close(weights.cpu(), expected[layer], atol=1e-4, rtol=0)
