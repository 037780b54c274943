"""A projection becomes a convolution that computes the same at first, and what a convolution computes afterwards."""

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
from spatially.surgery import convolve_projection

SWINS = ["timm swin", "hf swin", "torchvision swin", "own swin"]


@pytest.mark.parametrize("which", ["query", "key", "value"])
@pytest.mark.parametrize("name", SWINS)
def test_nothing_changes_at_first(
    name: str,
    which: Any,
    make: Callable[..., nn.Module],
    images: Callable[..., Tensor],
    answer: Callable[..., Tensor],
    anatomy: Callable[..., Any],
) -> None:
    model, batch = make(name), images(name)
    parts, before = anatomy(model), answer(model, batch)
    change = convolve_projection(model, which)
    assert torch.allclose(answer(model, batch), before, atol=1e-5)
    assert not convolve_projection(model, which).changed
    answer(model, batch).square().sum().backward()
    for place in change.changed:
        gradient = model.get_submodule(f"{place}.qkv.{which}").weight.grad
        assert gradient.shape[2:] == (3, 3)
        assert (gradient.abs().sum((0, 1)) > 0).all()
    assert all(parameter.grad is not None for parameter in model.parameters())
    change.undo()
    assert anatomy(model) == parts


@pytest.mark.parametrize("which", ["query", "key", "value"])
def test_a_trained_kernel_in_our_own_networks(
    which: Any, make: Callable[..., nn.Module], images: Callable[..., Tensor]
) -> None:
    """Without its table timm's Swin is `swin_tiny_key`: its state dict loads as it is, any kernel in it."""
    model, batch = make("timm swin", torch.float64), images("timm swin", torch.float64)
    change = convolve_projection(model, which, keep_table=False)
    for place in change.changed:
        nn.init.normal_(model.get_submodule(f"{place}.qkv.{which}").weight, std=0.2)
    own = timm.create_model(
        f"swin_tiny_{which}", embed_dim=16, depths=(2, 2), num_heads=(2, 4), num_classes=5, img_size=72
    )
    own = own.double().eval()
    own.load_state_dict(model.state_dict())
    assert torch.allclose(own(batch), model(batch), atol=1e-10)


@pytest.mark.parametrize("name", SWINS)
def test_the_whole_map_is_convolved(name: str, make: Callable[..., nn.Module], images: Callable[..., Tensor]) -> None:
    """The keys of the second layer, which is shifted, are those of torch's convolution of its map."""
    model, batch = make(name, torch.float64), images(name, torch.float64)
    change = convolve_projection(model, "key", kernel_size=5)
    projection: Any = model.get_submodule(f"{change.changed[1]}.qkv")
    nn.init.normal_(projection.key.weight)
    seen: list[Any] = []
    projection.register_forward_hook(lambda module, inputs, output: seen.extend((inputs[0], output[1])))
    model(batch)
    maps, keys = seen
    assert maps.shape[1:] == ((16, 24, 16) if name in ("hf swin", "torchvision swin") else (18, 18, 16))
    expected = F.conv2d(maps.permute(0, 3, 1, 2), projection.key.weight, projection.key.bias, padding=2)
    assert torch.allclose(keys, expected.permute(0, 2, 3, 1), atol=1e-12)


@pytest.mark.parametrize("name", SWINS)
def test_layers_agree_between_libraries(
    name: str, make: Callable[..., nn.Module], answer: Callable[..., Tensor]
) -> None:
    """With trained kernels one layer of each library and one of ours make the same of a map, shifted, with the table."""
    own, model = make("own swin", torch.float64), make(name, torch.float64)
    ours, theirs = (convolve_projection(network, "key").changed for network in (own, model))
    for one, other in zip(ours, theirs, strict=True):
        layer: Any = own.get_submodule(one)
        peer: Any = model.get_submodule(other)
        nn.init.normal_(layer.qkv.key.weight, std=0.2)
        state = layer.state_dict()
        if name == "hf swin":
            state = {
                key.replace("proj.", "o_proj.").replace("relative_", "relative_position_bias.relative_", 1): value
                for key, value in state.items()
            }
        assert not peer.load_state_dict(state, strict=False).unexpected_keys
        # no padding, so that shifting first and padding first are the same
        maps = torch.randn(2, 14, 21, layer.proj.in_features, dtype=torch.float64)
        block = model.get_submodule(other.rpartition(".")[0])
        out = peer(maps) if name in ("own swin", "torchvision swin") else _whole(block, maps)
        assert torch.allclose(out, layer(maps), atol=1e-5 if name == "hf swin" else 1e-10)  # theirs: float32 softmax


def _whole(block: Any, maps: Tensor) -> Tensor:
    return block._attn(maps) if hasattr(block, "_attn") else block._windows(maps)[0]


@pytest.mark.parametrize("name", SWINS)
def test_it_lives_like_any_other_network(
    name: str, make: Callable[..., nn.Module], images: Callable[..., Tensor], answer: Callable[..., Tensor]
) -> None:
    model, batch = make(name), images(name)
    convolve_projection(model, "value", keep_table=False)
    with torch.no_grad():
        out = answer(model, batch)
        assert torch.equal(answer(copy.deepcopy(model), batch), out)
        assert torch.equal(answer(pickle.loads(pickle.dumps(model)), batch), out)
        assert torch.allclose(answer(copy.deepcopy(model).double(), batch.double()).float(), out, atol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.isfinite(answer(model, batch)).all()
        torch._dynamo.reset()
        compiled = torch.compile(lambda given: answer(model, given), fullgraph=True, backend="eager")
        assert torch.allclose(compiled(batch), out, atol=1e-5)


def test_without_bias(images: Callable[..., Tensor]) -> None:
    model = timm.create_model(
        "swin_tiny_patch4_window7_224", embed_dim=16, depths=(2,), num_heads=(2,), img_size=72, qkv_bias=False
    ).eval()
    before = model(images("timm swin"))
    convolve_projection(model, "key")
    assert torch.allclose(model(images("timm swin")), before, atol=1e-5)


def test_mistakes(make: Callable[..., nn.Module]) -> None:
    with pytest.raises(UserError, match="needs windows of attention"):
        convolve_projection(make("timm deit"))
    model = make("timm swin")
    with pytest.raises(UserError, match="unknown projection 'keys': did you mean 'key'"):
        convolve_projection(model, "keys")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="kernel_size must be an odd positive whole number"):
        convolve_projection(model, kernel_size=2)
    convolve_projection(model, "key")
    with pytest.raises(UserError, match=r"3×3 convolution for its key already"):
        convolve_projection(model, "value")
    with pytest.raises(UserError, match="undo that before keep_table=False"):
        convolve_projection(model, "key", keep_table=False)
    narrow = timm.create_model("swin_tiny_patch4_window7_224", depths=(1,), num_heads=(1,), embed_dim=8, head_dim=4)
    with pytest.raises(UserError, match="projects 8 channels to 4"):
        convolve_projection(narrow)


@pytest.mark.parametrize(
    "options", [{"kernel_size": "3"}, {"kernel_size": 3.5}, {"kernel_size": True}, {"keep_table": 1}]
)
def test_arguments_are_checked_first(
    options: dict[str, Any], make: Callable[..., nn.Module], anatomy: Callable[..., Any]
) -> None:
    model = make("timm swin")
    parts = anatomy(model)
    with pytest.raises(UserError, match=next(iter(options))):
        convolve_projection(model, **options)
    assert anatomy(model) == parts
