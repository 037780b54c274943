"""Positions start anew, everything else keeps its bits."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.surgery import reset_positions

# What each network has, and the standard deviation of a fresh draw (0: its own initialiser is zero).
ABSOLUTE = {
    "timm vit": ("pos_embed", 0.02),
    "timm deit": ("pos_embed", 0.02),
    "hf vit": ("vit.embeddings.position_embeddings", 0.02),
    "hf deit": ("deit.embeddings.position_embeddings", 0.0),
    "torchvision vit": ("encoder.pos_embedding", 0.02),
    "own conv": ("pos_embed", 0.02),
    "own pit": ("pos_embed", 0.02),
}
RELATIVE = {
    "timm beit": ("blocks.0.attn.relative_position_bias_table", 0.0),
    "timm relpos": ("blocks.0.attn.rel_pos.mlp.fc2.weight", 128**-0.5 / 3**0.5),
    "timm shared relpos": ("shared_rel_pos.mlp.fc2.weight", None),
    "timm relpos table": ("blocks.0.attn.rel_pos.relative_position_bias_table", 0.02),
    "timm swin": ("layers.0.blocks.0.attn.relative_position_bias_table", 0.02),
    "hf beit": ("beit.layers.0.relative_position_bias.relative_position_bias_table", 0.0),
    "hf swin": (
        "swin.encoder.layers.0.blocks.0.attention.relative_position_bias.relative_position_bias_table",
        0.0,
    ),
    "torchvision swin": ("features.1.0.attn.relative_position_bias_table", 0.02),
    "own relpos": ("blocks.0.attn.rel_pos.mlp.fc2.weight", 128**-0.5 / 3**0.5),
    "own relpos table": ("blocks.0.attn.rel_pos.relative_position_bias_table", 0.02),
    "own swin": ("layers.0.blocks.0.attn.relative_position_bias_table", 0.02),
}


def bits(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", [*ABSOLUTE, *RELATIVE])
def test_positions_alone_are_redrawn(name: str, make: Callable[..., nn.Module], anatomy: Callable[..., Any]) -> None:
    model = make(name)
    parts, before = anatomy(model), bits(model)
    change = reset_positions(model, seed=3)
    after = bits(model)
    different = {key for key in before if not torch.equal(before[key], after[key])}
    assert different == set(change.changed)
    assert not any("cls_token" in key or "class_token" in key for key in different)
    where, deviation = (ABSOLUTE | RELATIVE)[name]
    assert where in different
    if deviation == 0:
        assert not after[where].any()
    elif deviation is not None:
        assert after[where].std().item() == pytest.approx(deviation, rel=0.15)
    again = reset_positions(model, seed=3)
    assert all(torch.equal(value, after[key]) for key, value in bits(model).items())
    again.undo()
    change.undo()
    assert anatomy(model) == parts


def test_every_layer_has_its_own_draw(make: Callable[..., nn.Module]) -> None:
    model = make("timm relpos")
    reset_positions(model, seed=0)
    state = model.state_dict()
    tables = [state[f"blocks.{number}.attn.rel_pos.mlp.fc1.weight"] for number in (0, 1)]
    assert not torch.equal(*tables)
    # PyTorch's own draw for a linear layer of two inputs: even between ±1/√2
    assert all(table.abs().max() <= 2**-0.5 and table.abs().max() > 0.6 for table in tables)


def test_a_seed_leaves_the_generator_alone(make: Callable[..., nn.Module]) -> None:
    first, second = make("timm vit"), make("timm vit")
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    reset_positions(first, seed=1)
    assert torch.equal(torch.rand(3), expected)
    reset_positions(second)
    assert not torch.equal(first.pos_embed, second.pos_embed)  # type: ignore[arg-type]


def test_choices(make: Callable[..., nn.Module]) -> None:
    model = make("timm beit")
    model.pos_embed = nn.Parameter(torch.randn(1, 17, 32))
    assert reset_positions(model, relative=False).changed == ("pos_embed",)
    assert model.pos_embed.any()
    change = reset_positions(model, absolute="zero", relative=False)
    assert not model.pos_embed.any()
    change.undo()
    assert model.pos_embed.any()
    assert all("relative_position" in name for name in reset_positions(model, absolute=False).changed)


def test_initialiser_range_of_the_configuration(make: Callable[..., nn.Module]) -> None:
    model: Any = make("hf vit", torch.bfloat16)
    model.vit.config.initializer_range = 0.5
    reset_positions(model, seed=0)
    assert model.vit.embeddings.position_embeddings.float().std().item() == pytest.approx(0.5, rel=0.15)


def test_mistakes(make: Callable[..., nn.Module]) -> None:
    with pytest.raises(UserError, match=r"ResNet has no positions to reset"):
        reset_positions(timm.create_model("resnet18"))
    rotary = timm.create_model("vit_tiny_patch16_224", pos_embed="none", depth=1)
    with pytest.raises(UserError, match=r"no positions to reset.*rotary"):
        reset_positions(rotary)
    with pytest.raises(UserError, match="nothing to reset"):
        reset_positions(make("timm swin"), relative=False)
    with pytest.raises(UserError, match="absolute must be True, False or 'zero'"):
        reset_positions(make("timm vit"), absolute="none")  # type: ignore[arg-type]
