"""Positions start anew, everything else keeps its bits."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.surgery import add_gaussian_bias, convolve_projection, regularise_receptive_field, reset_positions

# What each network has, and the standard deviation of a fresh draw (0: its own initialiser is zero).
ABSOLUTE = {
    "timm vit": ("pos_embed", 0.02),
    "timm deit": ("pos_embed", 0.02),
    "timm pit": ("pos_embed", 0.02),
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
    assert again.changed == ()
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
    drawn = reset_positions(model, relative=False)
    assert drawn.changed == ("pos_embed",)
    assert model.pos_embed.any()
    with pytest.raises(UserError, match="pos_embed was reset already, with absolute=True, seed=None: undo that first"):
        reset_positions(model, absolute="zero", relative=False)
    drawn.undo()
    with reset_positions(model, absolute="zero", relative=False):
        assert not model.pos_embed.any()
    assert model.pos_embed.any()
    assert all("relative_position" in name for name in reset_positions(model, absolute=False).changed)


def test_a_reset_is_in_force_until_undone(make: Callable[..., nn.Module]) -> None:
    model: Any = make("timm vit")
    change = reset_positions(model)
    with torch.no_grad():
        model.pos_embed.add_(1.0)  # as training would
    generator, trained = torch.get_rng_state(), model.pos_embed.detach().clone()
    assert reset_positions(model).changed == ()
    assert torch.equal(model.pos_embed, trained)
    assert torch.equal(torch.get_rng_state(), generator)
    with pytest.raises(UserError, match="undo that first"):
        reset_positions(model, seed=1)
    change.undo()
    assert reset_positions(model, seed=1).changed == ("pos_embed",)


def test_a_part_and_the_whole_are_one_network(make: Callable[..., nn.Module]) -> None:
    model: Any = make("timm swin")
    stage = reset_positions(model.layers[0], seed=0)
    whole = reset_positions(model, seed=0)
    assert all(name.startswith("layers.1") for name in whole.changed)
    with pytest.raises(UserError, match="cannot be undone yet"):
        stage.undo()
    whole.undo()
    stage.undo()


def test_initialiser_range_of_the_configuration(make: Callable[..., nn.Module]) -> None:
    model: Any = make("hf vit", torch.bfloat16)
    model.vit.config.initializer_range = 0.5
    reset_positions(model, seed=0)
    assert model.vit.embeddings.position_embeddings.float().std().item() == pytest.approx(0.5, rel=0.15)


@pytest.mark.parametrize(
    "operation", [reset_positions, add_gaussian_bias, regularise_receptive_field, convolve_projection]
)
def test_near_relatives_are_refused(operation: Callable[[nn.Module], Any]) -> None:
    small = {"depths": (1, 1), "num_heads": (1, 2), "embed_dim": 8}
    second = torchvision.models.SwinTransformer(
        [4, 4], 8, [1, 1], [1, 2], [8, 8], block=torchvision.models.swin_transformer.SwinTransformerBlockV2
    )
    with pytest.raises(UserError, match="ShiftedWindowAttentionV2, which cannot be changed: known are Shifted"):
        operation(second)
    for model in (
        timm.create_model("swinv2_tiny_window8_256", **small),
        timm.create_model("eva02_tiny_patch14_224", depth=1),
        timm.create_model("levit_128s"),
        timm.create_model("maxvit_rmlp_pico_rw_256"),
    ):
        with pytest.raises(UserError, match=r"Swin \(its first version\) of timm, Hugging Face, torchvision"):
            operation(model)


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
    with pytest.raises(UserError, match="relative must be True or False"):
        reset_positions(make("timm vit"), relative="zero")  # type: ignore[arg-type]
    with pytest.raises(UserError, match="seed must be a whole number"):
        reset_positions(make("timm vit"), seed=0.5)  # type: ignore[arg-type]
