"""Undoing: in order, once, wherever the model is by then."""

from collections.abc import Callable
from gc import collect
from typing import Any
from weakref import ref

import pytest
import timm
import torch
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.surgery import add_gaussian_bias, convolve_projection, regularise_receptive_field, reset_positions
from spatially.surgery.change import Edits

HIERARCHY: dict[str, Any] = {"img_size": 72, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}


def test_last_first(make: Callable[..., nn.Module], anatomy: Callable[..., Any]) -> None:
    model = make("timm swin")
    parts = anatomy(model)
    first = reset_positions(model, seed=0)
    second = convolve_projection(model)
    with pytest.raises(UserError, match="reset_positions cannot be undone yet: undo convolve_projection"):
        first.undo()
    idle = convolve_projection(model)
    idle.undo()
    second.undo()
    first.undo()
    first.undo()
    assert anatomy(model) == parts
    assert "undone" in repr(first)


def test_an_error_inside_the_block_undoes_too(make: Callable[..., nn.Module], anatomy: Callable[..., Any]) -> None:
    model = make("timm swin")
    parts = anatomy(model)
    with pytest.raises(KeyError), regularise_receptive_field(model):
        raise KeyError
    assert anatomy(model) == parts


def test_a_failed_operation_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    own = list(model)
    edits = Edits()
    edits.set_module(model, "0", nn.Identity())
    edits.drop_parameter(model[1], "bias", beside=model[1])
    edits.set_values(model[1], "weight", torch.zeros(2, 2))
    with pytest.raises(TypeError), edits:
        edits.set_class(None, nn.Identity)  # type: ignore[arg-type]
    assert list(model) == own
    assert model[1].bias is not None
    assert model[1].weight.any()


@pytest.mark.parametrize("name", ["timm swin", "hf swin"])
def test_what_was_out_comes_back_where_the_model_is(
    name: str, make: Callable[..., nn.Module], images: Callable[..., Tensor]
) -> None:
    model = make(name)
    state = model.state_dict()
    change = convolve_projection(model, keep_table=False)
    model.double().train()
    change.undo()
    assert all(value.dtype == torch.float64 for value in model.state_dict().values() if value.is_floating_point())
    assert all(module.training for module in model.modules())
    assert list(model.state_dict()) == list(state)
    model.eval()(images(name, torch.float64))


def test_training_in_between_is_undone_for_what_was_replaced(make: Callable[..., nn.Module]) -> None:
    model: Any = make("timm vit")
    positions = model.pos_embed.detach().clone()
    change = reset_positions(model, seed=0)
    with torch.no_grad():
        model.pos_embed.add_(1.0)
        model.cls_token.fill_(7.0)
    change.undo()
    assert torch.equal(model.pos_embed, positions)
    assert (model.cls_token == 7.0).all()


def test_a_changed_network_can_be_collected(make: Callable[..., nn.Module]) -> None:
    model = make("timm vit")
    add_gaussian_bias(model)
    gone = ref(model)
    del model
    collect()
    assert gone() is None


def test_a_state_dict_of_a_changed_network_loads_into_its_twin(
    make: Callable[..., nn.Module], images: Callable[..., Tensor], answer: Callable[..., Tensor]
) -> None:
    for name in ("hf swin", "torchvision swin"):
        model, twin = make(name), make(name)
        for network in (model, twin):
            convolve_projection(network)
            add_gaussian_bias(network)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01)
        twin.load_state_dict(model.state_dict())
        assert torch.equal(answer(twin, images(name)), answer(model, images(name)))


def test_a_resized_network_is_set_back_before_undoing(
    make: Callable[..., nn.Module], images: Callable[..., Tensor]
) -> None:
    operations: list[Callable[[Any], Any]] = [
        lambda model: reset_positions(model, seed=0),
        regularise_receptive_field,
        lambda model: convolve_projection(model, keep_table=False),
    ]
    for operation in operations:
        model: Any = make("timm swin")
        state = {name: value.clone() for name, value in model.state_dict().items()}
        change = operation(model)
        model.set_input_size(img_size=(64, 64), window_size=(8, 8))
        changed = {name: value.clone() for name, value in model.state_dict().items()}
        with pytest.raises(UserError, match=r"was resized .*set_input_size"):
            change.undo()
        assert all(torch.equal(value, changed[name]) for name, value in model.state_dict().items())
        model.set_input_size(img_size=(72, 72), window_size=(7, 7))
        change.undo()
        assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
        model(images("timm swin"))


def test_resized_absolute_positions(make: Callable[..., nn.Module]) -> None:
    model: Any = make("timm vit")
    before = model.pos_embed.detach().clone()
    change = reset_positions(model)
    model.set_input_size((32, 32))
    with pytest.raises(UserError, match=r"pos_embed of VisionTransformer was resized"):
        change.undo()
    model.set_input_size((64, 64))
    change.undo()
    assert torch.equal(model.pos_embed, before)


def test_stages_that_features_only_keeps(anatomy: Callable[..., Any]) -> None:
    model: Any = timm.create_model("swin_tiny_patch4_window7_224", features_only=True, **HIERARCHY).eval()
    batch, parts = torch.randn(1, 3, 72, 72), anatomy(model)
    before = model(batch)
    changes = [convolve_projection(model), add_gaussian_bias(model, amplitude=0.0)]
    assert changes[0].changed[0] == "layers_0.blocks.0.attn"
    assert all(torch.allclose(one, two, atol=1e-5) for one, two in zip(model(batch), before, strict=True))
    changes += [reset_positions(model), regularise_receptive_field(model)]
    assert [len(change.changed) for change in changes] == [4, 4, 4, 4]
    assert not torch.allclose(model(batch)[0], before[0], atol=1e-5)
    for change in reversed(changes):
        change.undo()
    assert anatomy(model) == parts
