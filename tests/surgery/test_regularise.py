"""A trained Swin with regular fields, against a dense computation, our own Swin-T_r, and full attention."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.surgery import add_gaussian_bias, convolve_projection, regularise_receptive_field

SWINS = ["timm swin", "hf swin", "torchvision swin", "own swin"]


def dense(layer: Any, maps: Tensor, *, reach: int, table: Tensor | None = None, border: str = "mask") -> Tensor:
    """Attention of each position of a map over positions at most `reach` away along both axes, spelt out."""
    linears = [layer.qkv] if hasattr(layer, "qkv") else [layer.q_proj, layer.k_proj, layer.v_proj]
    heads = layer.num_attention_heads if hasattr(layer, "num_attention_heads") else layer.num_heads
    last = layer.o_proj if hasattr(layer, "o_proj") else layer.proj
    _, height, width, channels = maps.shape
    q, k, v = torch.cat([linear(maps) for linear in linears], -1).unflatten(-1, (3, heads, -1)).unbind(3)
    out = torch.zeros_like(q)
    for y in range(height):
        for x in range(width):
            logits, values = [], []
            for dy in range(-reach, reach + 1):
                for dx in range(-reach, reach + 1):
                    inside = 0 <= y + dy < height and 0 <= x + dx < width
                    if not inside and border == "mask":
                        continue
                    key = k[:, y + dy, x + dx] if inside else torch.zeros_like(k[:, 0, 0])
                    values.append(v[:, y + dy, x + dx] if inside else torch.zeros_like(v[:, 0, 0]))
                    logit = (q[:, y, x] * key).sum(-1) / (channels // heads) ** 0.5
                    side = 7  # rows of the table: offset of the query from the key
                    row = (-dy + side - 1) * (2 * side - 1) + (-dx + side - 1)
                    logits.append(logit if table is None else logit + table[row])
            weights = torch.stack(logits, -1).softmax(-1)
            out[:, y, x] = torch.einsum("bhn,nbhd->bhd", weights, torch.stack(values))
    return last(out.flatten(-2))


def attend(model: nn.Module, maps: Tensor) -> tuple[Any, Tensor]:
    """The second, once shifted, layer of the network, and what its attention makes of a normalised map."""
    blocks: list[Any] = [
        module
        for module in model.modules()
        if type(module).__name__ in ("ChangedSwinBlock", "ChangedSwinLayer", "SwinTransformerBlock", "Block")
    ]
    block = blocks[1]
    if hasattr(block, "attention"):
        return block.attention, block._squares(maps)
    return block.attn, block._attn(maps) if hasattr(block, "_attn") else block.attn(maps)


@pytest.mark.parametrize("border", ["mask", "zero"])
@pytest.mark.parametrize("name", SWINS)
def test_a_layer_computed_densely(name: str, border: str, make: Callable[..., nn.Module]) -> None:
    model = make(name, torch.float64)
    regularise_receptive_field(model, window=5, border=border)
    maps = torch.randn(2, 6, 9, 16, dtype=torch.float64)
    layer, out = attend(model, maps)
    assert torch.allclose(out, dense(layer, maps, reach=2, border=border), atol=1e-12)


@pytest.mark.parametrize("name", SWINS)
def test_the_middle_of_the_table_can_stay(name: str, make: Callable[..., nn.Module]) -> None:
    model = make(name, torch.float64)
    change = regularise_receptive_field(model, window=5, keep_table=True)
    maps = torch.randn(2, 6, 9, 16, dtype=torch.float64)
    layer, out = attend(model, maps)
    owner = layer.relative_position_bias if "hf" in name else layer
    assert torch.allclose(out, dense(layer, maps, reach=2, table=owner.relative_position_bias_table), atol=1e-12)
    with pytest.raises(UserError, match="is regular already"):
        regularise_receptive_field(model, window=5)
    change.undo()
    regularise_receptive_field(model, window=5)
    assert torch.allclose(attend(model, maps)[1], dense(layer, maps, reach=2), atol=1e-12)


@pytest.mark.parametrize("name", SWINS)
def test_a_square_over_the_whole_grid_is_full_attention(name: str, make: Callable[..., nn.Module]) -> None:
    model = make(name, torch.float64)
    regularise_receptive_field(model, window=13)
    maps = torch.randn(2, 7, 5, 16, dtype=torch.float64)
    layer, out = attend(model, maps)
    linears = [layer.qkv] if hasattr(layer, "qkv") else [layer.q_proj, layer.k_proj, layer.v_proj]
    packed = torch.cat([linear(maps) for linear in linears], -1).flatten(1, 2)
    q, k, v = packed.unflatten(-1, (3, 2, 8)).permute(2, 0, 3, 1, 4)
    full = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).unflatten(1, (7, 5))
    last = layer.o_proj if hasattr(layer, "o_proj") else layer.proj
    assert torch.allclose(out, last(full), atol=1e-12)


def test_the_same_weights_in_our_own_networks(make: Callable[..., nn.Module], images: Callable[..., Tensor]) -> None:
    """timm's Swin, regular (and convolved), is `swin_tiny_r` (and `_m`): its state dict loads as it is."""
    model, batch = make("timm swin", torch.float64), images("timm swin", torch.float64)
    shape = {"embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "num_classes": 5, "img_size": 72}
    for name, border in (("swin_tiny_r", "mask"), ("swin_tiny_r", "shift"), ("swin_tiny_m", "mask")):
        own = timm.create_model(name, border=border, **shape).double().eval()
        changes = [convolve_projection(model, "key")] if name == "swin_tiny_m" else []
        changes.append(regularise_receptive_field(model, border=border))
        if name == "swin_tiny_m":
            for layer in changes[0].changed:
                with torch.no_grad():
                    model.get_submodule(f"{layer}.qkv.key").weight.add_(0.1)
        own.load_state_dict(model.state_dict())
        assert torch.allclose(own(batch), model(batch), atol=1e-10)
        for change in reversed(changes):
            change.undo()


def test_parameters_of_the_papers_network() -> None:
    model = timm.create_model("swin_tiny_patch4_window7_224", device="meta")
    count = lambda: sum(parameter.numel() for parameter in model.parameters())  # noqa: E731
    assert count() == 28_288_354
    with regularise_receptive_field(model):
        assert count() == 28_265_032
    with convolve_projection(model, "key", keep_table=False), regularise_receptive_field(model):
        assert count() == 45_517_384
    assert count() == 28_288_354


@pytest.mark.parametrize("name", SWINS)
def test_operations_compose_and_come_apart(
    name: str,
    make: Callable[..., nn.Module],
    images: Callable[..., Tensor],
    answer: Callable[..., Tensor],
    anatomy: Callable[..., Any],
) -> None:
    model, batch = make(name, torch.float64), images(name, torch.float64)
    parts, before = anatomy(model), answer(model, batch)
    with regularise_receptive_field(model) as regular:
        assert len(regular.changed) == 4
        assert not regularise_receptive_field(model).changed
        plain = answer(model, batch)
        assert not torch.allclose(plain, before, atol=1e-3)
        with add_gaussian_bias(model), convolve_projection(model, "value"):
            biased = answer(model, batch)
    assert anatomy(model) == parts
    with convolve_projection(model, "value"), add_gaussian_bias(model), regularise_receptive_field(model):
        assert torch.allclose(answer(model, batch), biased, atol=1e-10)
    assert anatomy(model) == parts
    assert torch.equal(answer(model, batch), before)


@pytest.mark.parametrize("name", SWINS)
def test_it_lives_like_any_other_network(
    name: str, make: Callable[..., nn.Module], images: Callable[..., Tensor], answer: Callable[..., Tensor]
) -> None:
    model, batch = make(name), images(name)
    regularise_receptive_field(model)
    with torch.no_grad():
        out = answer(model, batch)
        assert torch.equal(answer(copy.deepcopy(model), batch), out)
        assert torch.equal(answer(pickle.loads(pickle.dumps(model)), batch), out)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.isfinite(answer(model, batch)).all()
        torch._dynamo.reset()
        compiled = torch.compile(lambda given: answer(model, given), fullgraph=True, backend="eager")
        assert torch.allclose(compiled(batch), out, atol=1e-5)
    answer(model, batch).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_timm_can_change_its_input_size(make: Callable[..., nn.Module], images: Callable[..., Tensor]) -> None:
    model: Any = make("timm swin")
    regularise_receptive_field(model)
    model.set_input_size((96, 64))
    assert model(torch.randn(1, 3, 96, 64)).shape == (1, 5)


def test_ours_may_be_regular_already() -> None:
    own = timm.create_model("swin_tiny_r", depths=(1, 1), num_heads=(1, 1), embed_dim=8)
    assert not regularise_receptive_field(own).changed
    with pytest.raises(UserError, match=r"regular already, with window=7, border='mask'"):
        regularise_receptive_field(own, border="zero")
    assert len(convolve_projection(own, "key").changed) == 2


def test_mistakes(make: Callable[..., nn.Module]) -> None:
    with pytest.raises(UserError, match=r"needs windows of attention: Swin .* ResNet not"):
        regularise_receptive_field(timm.create_model("resnet18"))
    with pytest.raises(UserError, match="VisionTransformer not"):
        regularise_receptive_field(make("timm vit"))
    model = make("timm swin")
    with pytest.raises(UserError, match="window must be an odd positive whole number"):
        regularise_receptive_field(model, window=4)
    with pytest.raises(UserError, match="unknown border 'reflect'"):
        regularise_receptive_field(model, border="reflect")
    with pytest.raises(UserError, match="offsets up to 10"):
        regularise_receptive_field(model, window=21, keep_table=True)
    with pytest.raises(UserError, match="has no place"):
        regularise_receptive_field(model, border="shift", keep_table=True)
    with pytest.raises(UserError, match="has no dropout"):
        regularise_receptive_field(
            timm.create_model(
                "swin_tiny_patch4_window7_224", depths=(1,), num_heads=(1,), embed_dim=8, attn_drop_rate=0.1
            )
        )
    with pytest.raises(UserError, match="window must be given, odd"):
        regularise_receptive_field(
            timm.create_model("swin_tiny_patch4_window7_224", depths=(1,), num_heads=(1,), embed_dim=8, window_size=4)
        )
    regularise_receptive_field(model, border="shift")
    with pytest.raises(UserError, match="no place for a Gaussian bias"):
        add_gaussian_bias(model)


@pytest.mark.parametrize(
    "options", [{"window": 7.5}, {"window": "7"}, {"window": True}, {"border": None}, {"keep_table": None}]
)
def test_arguments_are_checked_first(
    options: dict[str, Any], make: Callable[..., nn.Module], anatomy: Callable[..., Any]
) -> None:
    model = make("timm swin")
    parts = anatomy(model)
    with pytest.raises(UserError, match=next(iter(options))):
        regularise_receptive_field(model, **options)
    assert anatomy(model) == parts
