"""Undoing: in order, once, wherever the model is by then."""

from collections.abc import Callable
from gc import collect
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.surgery import add_gaussian_bias, convolve_projection, regularise_receptive_field, reset_positions
from spatially.surgery.change import Edits


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
    edits.set_values(model[1].weight, torch.zeros(2, 2))
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
