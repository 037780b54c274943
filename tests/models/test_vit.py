"""ViTs with relative positions against timm's, with the Gaussian bias against its definition."""

from pathlib import Path

import pytest
import timm
import torch
from timm.models.vision_transformer_relpos import VisionTransformerRelPos
from torch import nn

from spatially.errors import UserError
from spatially.models.registry import CARDS
from spatially.models.vit import RelativeTransformer, checkpoint_filter
from spatially.nn.relative_position import resize_table
from spatially.subject.checkpoint import load_checkpoint

SIZES = {"small": (384, 6), "medium": (512, 8), "base": (768, 12)}
LITTLE = {
    "embed_dim": 32,
    "num_heads": 2,
    "depth": 3,
    "num_classes": 5,
    "qkv_bias": False,
    "init_values": 0.5,
    "fc_norm": True,
}
EXACT = {"atol": 1e-5, "rtol": 0}


def vivid(model: nn.Module) -> nn.Module:
    """No weight at 0 or 1e-6, so that each leaves its trace in the output."""
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def little(kind: str = "mlp", **options: object) -> RelativeTransformer:
    return vivid(RelativeTransformer(rel_pos=kind, **{"img_size": 64, **LITTLE, **options}))


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@pytest.mark.parametrize("size", SIZES)
def test_parameters_are_timm_s_and_two_more_a_layer_with_the_gaussian(size: str):
    width, heads = SIZES[size]
    with torch.device("meta"):
        table = VisionTransformerRelPos(
            rel_pos_type="bias", embed_dim=width, num_heads=heads, qkv_bias=False, fc_norm=True
        )
        peers = {"mlp": timm.create_model(f"vit_relpos_{size}_patch16_224"), "bias": table}
        for kind, peer in peers.items():
            name = f"vit_{size}_relpos{kind}"
            assert CARDS[name].paper == CARDS[f"{name}_gab"].paper == "kim"
            plain, gaussian = timm.create_model(name), timm.create_model(f"{name}_gab")
            assert {key: value.shape for key, value in plain.state_dict().items()} == {
                key: value.shape for key, value in peer.state_dict().items()
            }
            assert count(gaussian) == count(peer) + 2 * 12
            assert count(timm.create_model(f"{name}_gab", per_head=True)) == count(peer) + 2 * 12 * heads


def test_the_registered_model_computes_what_timm_s_does():
    peer = vivid(timm.create_model("vit_relpos_small_patch16_224"))
    model = timm.create_model("vit_small_relposmlp").eval()
    model.load_state_dict(checkpoint_filter({"state_dict": peer.state_dict()}, model))
    images = torch.randn(1, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(model(images), peer(images), **EXACT)


@pytest.mark.parametrize("kind", ["mlp", "bias"])
@pytest.mark.parametrize("size", [(64, 64), (48, 80)])
def test_outputs_and_gradients_equal_timm_s(kind: str, size: tuple[int, int]):
    peer = vivid(VisionTransformerRelPos(img_size=size, rel_pos_type=kind, **LITTLE))
    model = little(kind, img_size=size)
    model.load_state_dict(checkpoint_filter({"model": peer.state_dict()}, model))
    images = torch.randn(2, 3, *size)
    torch.testing.assert_close(model(images), peer(images), **EXACT)
    for network in (model, peer):
        network(images).square().sum().backward()
    gradients = {name: parameter.grad for name, parameter in peer.named_parameters()}
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, gradients[name], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["mlp", "bias"])
def test_another_size_at_forward_is_a_model_of_that_size(kind: str):
    model = little(kind, gaussian_bias=True)
    images = torch.randn(2, 3, 48, 112)
    other = little(kind, gaussian_bias=True, img_size=(48, 112))
    weights = model.state_dict()
    for name in weights:
        if name.endswith("table"):
            table = resize_table(weights[name].mT.reshape(2, 7, 7), (3, 7))
            weights[name] = table.flatten(1).mT
    other.load_state_dict(weights)
    torch.testing.assert_close(model(images), other(images), **EXACT)


def test_tables_and_patches_are_resized_where_weights_are_loaded():
    source, target = little("bias"), little("bias", img_size=(48, 96))
    target.load_state_dict(checkpoint_filter(source.state_dict(), target))
    images = torch.randn(1, 3, 48, 96)
    torch.testing.assert_close(target(images), source(images), **EXACT)
    smaller = little("mlp", patch_size=8)
    smaller.load_state_dict(checkpoint_filter(little("mlp").state_dict(), smaller))
    with pytest.raises(UserError, match="img_size"):
        checkpoint_filter(target.state_dict(), source)


@pytest.mark.parametrize("per_head", [False, True])
def test_the_gaussian_is_added_to_the_logits(per_head: bool):
    plain, gaussian = little(), little(gaussian_bias=True, per_head=per_head)
    gaussian.load_state_dict(checkpoint_filter(plain.state_dict(), gaussian))  # keeps its own A and σ
    images = torch.randn(2, 3, 48, 64)
    attention = gaussian.blocks[1].attn
    x = torch.randn(2, 12, 32)
    q, k, v = attention.qkv(x).reshape(2, 12, 3, 2, 16).permute(2, 0, 3, 1, 4)
    logits = q @ k.mT / 4 + attention.rel_pos((3, 4)) + attention.gaussian_bias((3, 4))
    expected = attention.proj((logits.softmax(-1) @ v).transpose(1, 2).flatten(2))
    torch.testing.assert_close(attention(x, (3, 4)), expected, **EXACT)
    assert (gaussian(images) - plain(images)).abs().max() > 1e-3
    for block in gaussian.blocks:
        nn.init.zeros_(block.attn.gaussian_bias.amplitude)
    torch.testing.assert_close(gaussian(images), plain(images), **EXACT)


def test_the_attention_can_be_seen():
    model, images = little(gaussian_bias=True), torch.randn(1, 3, 48, 64)
    expected, seen = model(images), []
    for block in model.blocks:
        block.attn.fused_attn = False
        block.attn.attn_drop.register_forward_hook(lambda _module, _inputs, output: seen.append(output))
    torch.testing.assert_close(model(images), expected, **EXACT)
    assert [attention.shape for attention in seen] == [(1, 2, 12, 12)] * 3


def test_positions_do_not_decay():
    names = little("bias", gaussian_bias=True).no_weight_decay()
    ends = ("rel_pos.relative_position_bias_table", "gaussian_bias.amplitude", "gaussian_bias.sigma")
    assert names == {f"blocks.{layer}.attn.{end}" for layer in range(3) for end in ends}


def test_checkpointing_changes_nothing():
    model, images = little("bias", gaussian_bias=True), torch.randn(2, 3, 64, 64)
    results = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        output = model(images)
        output.sum().backward()
        results.append([output, *(parameter.grad.clone() for parameter in model.parameters())])
    for plain, checkpointed in zip(*results, strict=True):
        assert torch.equal(plain, checkpointed)


def test_intermediates_are_the_maps_after_the_blocks():
    model, images = little(), torch.randn(2, 3, 48, 64)
    last, maps = model.forward_intermediates(images, [0, 2])
    assert [found.shape for found in maps] == [(2, 32, 3, 4)] * 2
    torch.testing.assert_close(maps[1].flatten(2).mT, last)
    torch.testing.assert_close(model.forward_head(last), model(images))
    early = model.forward_intermediates(images, [0], stop_early=True, intermediates_only=True, output_fmt="NLC")
    torch.testing.assert_close(early[0], maps[0].flatten(2).mT)
    assert model.prune_intermediate_layers([0]) == [0]
    assert len(model.blocks) == 1
    torch.testing.assert_close(model.forward_intermediates(images, intermediates_only=True)[0], maps[0])


def test_mistakes_are_named():
    model = little()
    for shape in ((1, 3, 60, 64), (1, 1, 64, 64), (1, 3, 8, 64), (3, 64, 64)):
        with pytest.raises(UserError, match="images must"):
            model(torch.randn(shape))
    for options, argument in (
        ({"img_size": 60}, "img_size"),
        ({"kind": "table"}, "rel_pos"),
        ({"num_heads": 3}, "num_heads"),
        ({"depth": 0}, "depth"),
        ({"global_pool": "token"}, "global_pool"),
    ):
        with pytest.raises(UserError, match=argument):
            little(**options)


def test_as_many_rows_from_a_square_are_resized_but_the_model_s_own_are_not(tmp_path: Path):
    square, wide = little("bias", img_size=128), little("bias", img_size=(80, 208))  # 8×8 and 5×13: 225 rows each
    fitted = checkpoint_filter(square.state_dict(), wide)
    name = "blocks.0.attn.rel_pos.relative_position_bias_table"
    table = square.state_dict()[name].mT.reshape(-1, 15, 15)
    torch.testing.assert_close(fitted[name], resize_table(table, (5, 13)).flatten(1).mT)
    same = checkpoint_filter(square.state_dict(), square)
    assert torch.equal(same[name], square.state_dict()[name])
    torch.save(wide.state_dict(), tmp_path / "wide.pth")
    again = RelativeTransformer(rel_pos="bias", **{**LITTLE, "img_size": (80, 208)})
    load_checkpoint(again, tmp_path / "wide.pth")
    assert all(torch.equal(value, wide.state_dict()[key]) for key, value in again.state_dict().items())
