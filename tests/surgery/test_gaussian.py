"""The bias that each layer's attention shows, read back and computed anew; and that all the rest stays as it was."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import spatially
from spatially.errors import UserError
from spatially.nn import GaussianBias
from spatially.surgery import add_gaussian_bias

# Tokens before the patches, and the grid that the first layer attends on (a window, for Swin).
FIRST_LAYER = {
    "timm vit": (3, (4, 6)),
    "timm deit": (2, (4, 4)),
    "timm beit": (1, (4, 4)),
    "timm relpos": (0, (4, 4)),
    "timm shared relpos": (0, (4, 4)),
    "timm relpos table": (1, (4, 4)),
    "timm pit": (2, (7, 7)),
    "timm swin": (0, (7, 7)),
    "hf vit": (1, (4, 4)),
    "hf deit": (2, (4, 4)),
    "hf beit": (1, (4, 4)),
    "hf swin": (0, (7, 7)),
    "own relpos": (0, (4, 6)),
    "own relpos table": (0, (4, 6)),
    "own global": (0, (4, 6)),
    "own pit": (1, (7, 11)),
}
ALL = [*FIRST_LAYER, "torchvision vit", "torchvision swin", "own conv", "own swin"]


def closed_form(prefix: int, grid: tuple[int, int], amplitude: float, sigma: float) -> Tensor:
    places = [(y, x) for y in range(grid[0]) for x in range(grid[1])]
    bias = torch.zeros(prefix + len(places), prefix + len(places), dtype=torch.float64)
    for n, (y, x) in enumerate(places):
        for m, (v, u) in enumerate(places):
            squared = torch.tensor(float((y - v) ** 2 + (x - u) ** 2), dtype=torch.float64)
            bias[prefix + n, prefix + m] = amplitude**2 * torch.exp(-squared / (2 * sigma**2))
    return bias


def first_attention(model: nn.Module, batch: Tensor) -> Tensor:
    """Attention after softmax of the first layer, (batch or windows, heads, tokens, tokens)."""
    seen: list[Tensor] = []
    if hasattr(model, "config"):
        layer = next(part for name, part in model.named_modules() if name.endswith("attention"))
        handle = layer.register_forward_hook(lambda module, inputs, output: seen.append(output[1]))
    else:
        for module in model.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = False
        layer = next(part for name, part in model.named_modules() if name.endswith("attn_drop"))
        handle = layer.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        model(batch)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("name", FIRST_LAYER)
def test_logits_gain_the_closed_form(name: str, make: Callable[..., nn.Module], images: Callable[..., Tensor]) -> None:
    model, batch = make(name, torch.float64), images(name, torch.float64)
    before = first_attention(model, batch)
    add_gaussian_bias(model, amplitude=1.5, sigma=2.0)
    # softmax(a + b) / softmax(a) is exp(b) up to a factor of the row
    gained = (first_attention(model, batch) / before).log()
    bias = closed_form(*FIRST_LAYER[name], 1.5, 2.0)
    assert torch.allclose(
        gained - gained[..., :1], (bias - bias[:, :1]).expand_as(gained), atol=1e-4 if "hf" in name else 1e-9
    )


def test_one_bias_a_head(make: Callable[..., nn.Module], images: Callable[..., Tensor]) -> None:
    for name in ("timm vit", "timm swin", "hf swin"):
        model, batch = make(name, torch.float64), images(name, torch.float64)
        before = first_attention(model, batch)
        change = add_gaussian_bias(model, per_head=True)
        bias = model.get_submodule(f"{change.changed[0]}.gaussian_bias")
        with torch.no_grad():
            bias.amplitude.copy_(torch.arange(1.0, len(bias.amplitude) + 1))
        gained = (first_attention(model, batch) / before).log()
        for head, amplitude in enumerate(bias.amplitude.tolist()):
            table = closed_form(*FIRST_LAYER[name], amplitude, 5.0)
            found = gained[:, head] - gained[:, head, :, :1]
            assert torch.allclose(found, (table - table[:, :1]).expand_as(found), atol=1e-4 if "hf" in name else 1e-9)


@pytest.mark.parametrize("name", ["timm vit", "torchvision vit"])
def test_a_layer_computed_densely(name: str, make: Callable[..., nn.Module], images: Callable[..., Tensor]) -> None:
    model, batch = make(name, torch.float64), images(name, torch.float64)
    change = add_gaussian_bias(model, sigma=2.0, per_head=True)
    layer: Any = model.get_submodule(change.changed[1])
    with torch.no_grad():
        layer.gaussian_bias.amplitude.copy_(torch.tensor([0.0, 1.0, 1.5, 2.0]))
    seen: list[Any] = []
    layer.register_forward_hook(lambda module, inputs, output: seen.extend((inputs[0], output)))
    model(batch)
    tokens, out = seen[0], seen[1][0] if isinstance(seen[1], tuple) else seen[1]
    weight, bias = (
        (layer.qkv.weight, layer.qkv.bias) if name == "timm vit" else (layer.in_proj_weight, layer.in_proj_bias)
    )
    last = layer.proj if name == "timm vit" else layer.out_proj
    q, k, v = (tokens @ weight.T + bias).unflatten(-1, (3, 4, 8)).permute(2, 0, 3, 1, 4)
    prefix, grid = (3, (4, 6)) if name == "timm vit" else (1, (4, 4))
    tables = torch.stack([closed_form(prefix, grid, amplitude, 2.0) for amplitude in (0.0, 1.0, 1.5, 2.0)])
    dense = ((q @ k.mT / 8**0.5 + tables).softmax(-1) @ v).transpose(1, 2).flatten(2) @ last.weight.T + last.bias
    assert torch.allclose(out, dense, atol=1e-12)


def test_own_swin_agrees_with_torchvision_and_timm(
    make: Callable[..., nn.Module], images: Callable[..., Tensor]
) -> None:
    """The same weights in three implementations of Swin, each with the bias, on a shifted and padded map."""
    own, batch = make("own swin", torch.float64), images("own swin", torch.float64)
    peers: dict[str, nn.Module] = {name: make(name, torch.float64) for name in ("timm swin", "torchvision swin")}
    peers["timm swin"].load_state_dict(own.state_dict())
    layers: list[Any] = [module for module in own.modules() if hasattr(module, "shift_size")]
    theirs: list[Any] = [module for module in peers["torchvision swin"].modules() if hasattr(module, "shift_size")]
    for model in (own, *peers.values()):
        add_gaussian_bias(model, amplitude=1.5, sigma=2.0)
    assert torch.allclose(own(batch), peers["timm swin"](batch), atol=1e-10)
    for layer, peer in zip(layers, theirs, strict=True):
        assert not peer.load_state_dict(layer.state_dict(), strict=False).unexpected_keys
        maps = torch.randn(1, 14, 21, layer.proj.in_features, dtype=torch.float64)
        assert torch.allclose(layer(maps), peer(maps), atol=1e-10)


def test_local_attention_computed_densely(make: Callable[..., nn.Module], images: Callable[..., Tensor]) -> None:
    for border in ("mask", "zero"):
        model, batch = make("own conv", torch.float64), images("own conv", torch.float64)
        for block in model.blocks:  # type: ignore[union-attr]
            block.attn.border = border
        add_gaussian_bias(model, amplitude=1.5, sigma=1.0)
        squares = model(batch)
        for block in model.blocks:  # type: ignore[union-attr]
            block.attn.fused_attn = False
        assert torch.allclose(model(batch), squares, atol=1e-12)


@pytest.mark.parametrize("name", ALL)
def test_without_amplitude_nothing_changes(
    name: str,
    make: Callable[..., nn.Module],
    images: Callable[..., Tensor],
    answer: Callable[..., Tensor],
    anatomy: Callable[..., Any],
) -> None:
    model, batch = make(name), images(name)
    before, parts = answer(model, batch), anatomy(model)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    change = add_gaussian_bias(model, amplitude=0.0)
    assert torch.allclose(answer(model, batch), before, atol=1e-5)
    added = {key: value for key, value in model.state_dict().items() if key not in state}
    assert len(added) == 2 * len(change.changed)
    assert all(torch.equal(model.state_dict()[key], value) for key, value in state.items())
    assert not add_gaussian_bias(model, amplitude=0.0).changed
    change.undo()
    assert anatomy(model) == parts
    assert torch.equal(answer(model, batch), before)


@pytest.mark.parametrize(
    "name", ["timm vit", "timm beit", "timm swin", "hf vit", "hf swin", "torchvision vit", "own pit"]
)
def test_it_lives_like_any_other_part(
    name: str, make: Callable[..., nn.Module], images: Callable[..., Tensor], answer: Callable[..., Tensor]
) -> None:
    model, batch = make(name), images(name)
    change = add_gaussian_bias(model)
    with torch.no_grad():
        out = answer(model, batch)
        assert torch.equal(answer(copy.deepcopy(model), batch), out)
        assert torch.equal(answer(pickle.loads(pickle.dumps(model)), batch), out)
        assert torch.allclose(answer(copy.deepcopy(model).double(), batch.double()).float(), out, atol=1e-3)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.isfinite(answer(model, batch)).all()
        torch._dynamo.reset()
        compiled = torch.compile(lambda given: answer(model, given), fullgraph=True, backend="eager")
        assert torch.allclose(compiled(batch), out, atol=1e-5)
    first = model.get_submodule(f"{change.changed[0]}.gaussian_bias")
    assert isinstance(first, GaussianBias)
    answer(model, batch).square().sum().backward()
    assert all(parameter.grad.abs() > 0 for parameter in first.parameters())  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["timm vit", "timm relpos", "timm swin", "own swin"])
def test_no_weight_decay(name: str, make: Callable[..., nn.Module]) -> None:
    model = make(name)
    own = model.no_weight_decay()  # type: ignore[operator]
    change = add_gaussian_bias(model)
    more = {f"{place}.gaussian_bias.{part}" for place in change.changed for part in ("amplitude", "sigma")}
    assert model.no_weight_decay() == own | more  # type: ignore[operator]
    twin = copy.deepcopy(model)
    change.undo()
    assert model.no_weight_decay() == own  # type: ignore[operator]
    assert twin.no_weight_decay() == own | more  # type: ignore[operator]


def test_the_grid_is_the_images(make: Callable[..., nn.Module]) -> None:
    """As many patches in another shape: a guess from their number could not tell."""
    model = make("timm vit", torch.float64)
    batch = torch.randn(1, 3, 32, 128, dtype=torch.float64)
    before = first_attention(model, batch)
    add_gaussian_bias(model, amplitude=1.5, sigma=2.0)
    model(torch.randn(1, 3, 64, 64, dtype=torch.float64))
    gained = (first_attention(model, batch) / before).log()
    bias = closed_form(3, (2, 8), 1.5, 2.0)
    assert torch.allclose(gained - gained[..., :1], bias.expand_as(gained), atol=1e-9)


def test_gradient_checkpointing_over_several_sizes(make: Callable[..., nn.Module]) -> None:
    model: Any = make("timm vit", torch.float64).train()
    add_gaussian_bias(model)
    batches = [torch.randn(2, 3, side, 64, dtype=torch.float64) for side in (64, 32, 96)]

    def gradients() -> list[Tensor | None]:
        loss = sum(model(batch).square().sum() for batch in batches)
        return list(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))

    plain = gradients()
    model.set_grad_checkpointing(True)
    for one, other in zip(plain, gradients(), strict=True):
        assert (one is None and other is None) or torch.allclose(one, other, atol=1e-10)


def test_masks_of_the_caller_stay(make: Callable[..., nn.Module], images: Callable[..., Tensor]) -> None:
    model: Any = make("timm vit", torch.float64)
    batch = images("timm vit", torch.float64)
    seen = torch.rand(27, 27) < 0.7
    seen |= torch.eye(27, dtype=torch.bool)
    added = torch.zeros(27, 27, dtype=torch.float64).masked_fill(~seen, -torch.inf)
    add_gaussian_bias(model)
    assert torch.allclose(model(batch, attn_mask=seen), model(batch, attn_mask=added), atol=1e-12)
    assert not torch.allclose(model(batch, attn_mask=seen), model(batch), atol=1e-3)


def test_inside_a_feature_extractor(images: Callable[..., Tensor]) -> None:
    features = timm.create_model(
        "vit_tiny_patch16_224", depth=2, img_size=64, features_only=True, out_indices=(1,)
    ).eval()
    before = features(images("timm deit"))[0]
    with add_gaussian_bias(features) as change:
        assert change.changed == ("model.blocks.0.attn", "model.blocks.1.attn")
        assert not torch.allclose(features(images("timm deit"))[0], before)
    assert torch.equal(features(images("timm deit"))[0], before)


def test_a_subject_and_its_fingerprint(make: Callable[..., nn.Module], images: Callable[..., Tensor]) -> None:
    subject = spatially.load(make("timm deit"), name="deit", input_size=64, device="cpu")
    aligned = subject.align(None, [0, 1, 2, 3, 4])
    before = subject.fingerprint
    with add_gaussian_bias(subject) as change:
        assert change.model is subject.model
        assert subject.fingerprint == aligned.fingerprint != before
    assert subject.fingerprint == before


def test_a_compiled_network_notices(make: Callable[..., nn.Module], images: Callable[..., Tensor]) -> None:
    model, batch = make("timm deit"), images("timm deit")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    before = compiled(batch)
    with add_gaussian_bias(compiled):
        assert torch.allclose(compiled(batch), model(batch), atol=1e-5)
        assert not torch.allclose(compiled(batch), before, atol=1e-3)
    assert torch.allclose(compiled(batch), before, atol=1e-5)


def test_mistakes(make: Callable[..., nn.Module]) -> None:
    with pytest.raises(UserError, match=r"ResNet has no attention layer.*ViT and Swin"):
        add_gaussian_bias(timm.create_model("resnet18"))
    with pytest.raises(UserError, match="must be a torch module or a Subject"):
        add_gaussian_bias("vit")  # type: ignore[arg-type]
    model = make("timm vit")
    with pytest.raises(UserError, match="sigma must not be 0"):
        add_gaussian_bias(model, sigma=0.0)
    assert not any("gaussian" in name for name in model.state_dict())
    change = add_gaussian_bias(model)
    with pytest.raises(UserError, match=r"blocks\.0\.attn has a Gaussian bias already"):
        add_gaussian_bias(model, sigma=3.0)
    with pytest.raises(UserError, match="full grid of patches"):
        model.blocks[0](torch.zeros(1, 20, 32))  # type: ignore[operator, index]
    change.undo()

    class Own(timm.layers.Attention):
        def forward(self, x: Tensor, **others: Any) -> Tensor:
            return F.relu(super().forward(x, **others))

    model.blocks[1].attn.__class__ = Own  # type: ignore[union-attr, index]
    with pytest.raises(UserError, match=r"blocks\.1\.attn is a Own"):
        add_gaussian_bias(model)
    flash = make("hf vit")
    flash.config._attn_implementation = "flash_attention_2"  # type: ignore[union-attr]
    with pytest.raises(UserError, match="'flash_attention_2' takes no bias"):
        add_gaussian_bias(flash)
    with pytest.raises(UserError, match="border='shift'"):
        add_gaussian_bias(timm.create_model("vit_small_conv3", depth=1, border="shift"))


def test_pools_of_timms_pit_halve_the_grid(make: Callable[..., nn.Module], images: Callable[..., Tensor]) -> None:
    model: Any = make("timm pit")
    add_gaussian_bias(model)
    model(images("timm pit"))
    assert [stage.blocks[0].attn.grid.size for stage in model.transformers] == [(7, 7), (4, 4)]


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ({"sigma": "a"}, "sigma"),
        ({"sigma": float("nan")}, "sigma"),
        ({"sigma": 0}, "sigma"),
        ({"amplitude": None}, "amplitude"),
        ({"amplitude": True}, "amplitude"),
        ({"per_head": 1}, "per_head"),
    ],
)
def test_arguments_are_checked_first(
    options: dict[str, Any], name: str, make: Callable[..., nn.Module], anatomy: Callable[..., Any]
) -> None:
    model = make("timm vit")
    parts = anatomy(model)
    with pytest.raises(UserError, match=f"{name} must"):
        add_gaussian_bias(model, **options)
    assert anatomy(model) == parts
