"""The convolutional ViT against timm's plain ViT, and its local attention against a mask written out."""

from pathlib import Path

import pytest
import timm
import torch
from timm.layers import resample_abs_pos_embed
from timm.models.vision_transformer import VisionTransformer
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.models.conv_vit import ConvolutionalTransformer, LocalAttention, checkpoint_filter, neighbourhood
from spatially.models.registry import CARDS
from spatially.subject.checkpoint import load_checkpoint

EXACT = {"atol": 1e-5, "rtol": 0}
LITTLE = {"embed_dim": 32, "num_heads": 2, "depth": 2, "num_classes": 5, "img_size": 64}


def vivid(model: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def little(**options: object) -> ConvolutionalTransformer:
    return vivid(ConvolutionalTransformer(**{**LITTLE, **options}))


@pytest.mark.parametrize(("size", "width"), [("tiny", 192), ("small", 384)])
def test_names_share_their_weights_and_timm_s(size: str, width: int):
    with torch.device("meta"):
        peer = timm.create_model(f"vit_{size}_patch16_224").state_dict()
        shapes = {name: value.shape for name, value in peer.items() if name != "cls_token"}
        shapes["pos_embed"] = torch.Size([1, 196, width])
        for suffix in ("conv3", "conv5", "conv7", "global"):
            name = f"vit_{size}_{suffix}"
            assert CARDS[name].paper == "park"
            model = timm.create_model(name)
            assert {key: value.shape for key, value in model.state_dict().items()} == shapes


@pytest.mark.parametrize("fc_norm", [False, True])
def test_global_attention_is_timm_s_vit_without_class_token(fc_norm: bool):
    peer = vivid(VisionTransformer(**LITTLE, class_token=False, global_pool="avg", fc_norm=fc_norm))
    model = little(fc_norm=fc_norm)
    model.load_state_dict(checkpoint_filter({"model": peer.state_dict()}, model))
    images = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(images), peer(images), **EXACT)
    if fc_norm:
        with pytest.raises(UserError, match="fc_norm=True"):
            checkpoint_filter(peer.state_dict(), little())


def test_a_class_token_falls_away_with_its_position():
    peer = vivid(VisionTransformer(**LITTLE))
    model = little()
    weights = checkpoint_filter(peer.state_dict(), model)
    assert torch.equal(weights["pos_embed"], peer.pos_embed[:, 1:])
    model.load_state_dict(weights)
    larger = little(img_size=(96, 64))
    larger.load_state_dict(checkpoint_filter(peer.state_dict(), larger))
    finer = little(patch_size=8)
    finer.load_state_dict(checkpoint_filter(peer.state_dict(), finer))


def test_a_window_that_covers_the_grid_is_global():
    model, images = little(window=7), torch.randn(2, 3, 64, 64)
    everywhere = little()
    everywhere.load_state_dict(model.state_dict())
    torch.testing.assert_close(model(images), everywhere(images), **EXACT)
    assert (little(window=3)(images) - everywhere(images)).abs().max() > 1e-3


def slots(place: int, side: int, window: int, border: str) -> range:
    """The keys along one axis, some of them outside."""
    first = place - window // 2
    if border == "shift":
        first = max(min(first, side - window), 0)
    return range(first, first + window)


def one_by_one(attention: LocalAttention, x: Tensor, grid: tuple[int, int]) -> Tensor:
    """One query at a time, one head at a time, from the definition."""
    (height, width), heads, window = grid, attention.num_heads, attention.window
    q, k, v = attention.qkv(x).reshape(height, width, 3, heads, -1).unbind(2)
    out = torch.zeros_like(q)
    nothing = torch.zeros_like(q[0, 0, 0])
    for y in range(height):
        for x_ in range(width):
            places = [
                (v_, u)
                for v_ in slots(y, height, window, attention.border)
                for u in slots(x_, width, window, attention.border)
            ]
            inside = [(v_, u) for v_, u in places if 0 <= v_ < height and 0 <= u < width]
            outside = len(places) - len(inside) if attention.border == "zero" else 0
            for head in range(heads):
                keys = torch.stack([*(k[v_, u, head] for v_, u in inside), *[nothing] * outside])
                values = torch.stack([*(v[v_, u, head] for v_, u in inside), *[nothing] * outside])
                weights = (keys @ q[y, x_, head] / q.shape[-1] ** 0.5).softmax(0)
                out[y, x_, head] = weights @ values
    return attention.proj(out.flatten(2).flatten(0, 1))[None]


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("border", ["mask", "zero", "shift"])
@pytest.mark.parametrize(("grid", "window"), [((5, 4), 3), ((2, 6), 5)])
def test_local_attention_is_its_definition(fused: bool, border: str, grid: tuple[int, int], window: int):
    torch.manual_seed(0)
    options = {"qkv_bias": True, "attn_drop": 0.0, "proj_drop": 0.0, "dtype": torch.float64}
    attention = LocalAttention(8, 2, window=window, border=border, **options)
    attention.fused_attn = fused
    x = torch.randn(1, grid[0] * grid[1], 8, dtype=torch.float64)
    torch.testing.assert_close(attention(x, grid), one_by_one(attention, x, grid))


def test_the_neighbourhood_is_a_square():
    seen = neighbourhood((4, 5), 3).reshape(4, 5, 4, 5)
    rows, columns = torch.arange(4), torch.arange(5)
    for y in range(4):
        for x in range(5):
            square = ((rows - y).abs() <= 1)[:, None] & ((columns - x).abs() <= 1)
            assert torch.equal(seen[y, x], square)


def test_attention_dropout_is_of_the_attention():
    torch.manual_seed(0)
    attention = LocalAttention(8, 2, window=3, qkv_bias=True, attn_drop=0.5, proj_drop=0.0)
    x = torch.randn(1, 20, 8)
    expected = attention.eval()(x, (4, 5))
    attention.train()
    with torch.no_grad():
        mean = torch.stack([attention(x, (4, 5)) for _ in range(2000)]).mean(0)
    assert (attention(x, (4, 5)) - expected).abs().max() > 0.05
    torch.testing.assert_close(mean, expected, atol=0.03, rtol=0)


def test_positions_are_resized_at_another_size():
    model, images = little(window=3), torch.randn(1, 3, 48, 96)
    other = little(window=3, img_size=(48, 96))
    other.load_state_dict(checkpoint_filter(model.state_dict(), other))
    torch.testing.assert_close(model(images), other(images), **EXACT)
    assert model.no_weight_decay() == {"pos_embed"}


def test_the_authors_names_are_known():
    model = little(window=3, border="zero", qkv_bias=False, fc_norm=True)
    theirs = {}
    for name, value in model.state_dict().items():
        number, _, rest = name.removeprefix("blocks.").partition(".")
        if name.startswith("patch_embed.proj"):
            theirs["embedding.0." + name.split(".")[-1]] = value
        elif name == "pos_embed":
            theirs["embedding.2.pos_embedding"] = value
        elif rest == "attn.qkv.weight":
            theirs[f"transformers.{number}.mhsa.to_q.weight"] = value[:32, :, None, None]
            theirs[f"transformers.{number}.mhsa.to_kv.weight"] = value[32:, :, None, None]
        elif name.startswith("blocks."):
            for ours, other in (("attn.proj", "mhsa.to_out.0"), ("mlp.fc1", "ff.net.0"), ("mlp.fc2", "ff.net.3")):
                rest = rest.replace(ours, other)
            if rest.startswith("norm"):
                rest = rest.replace(".", ".1.")
            theirs[f"transformers.{number}.{rest}"] = value[..., None, None] if value.ndim == 2 else value
        else:
            theirs[name.replace("fc_norm", "classifier.2").replace("head", "classifier.3")] = value
    for target in (model, little(window=3, border="zero", fc_norm=True)):
        loaded = checkpoint_filter({"state_dict": {f"module.{name}": value for name, value in theirs.items()}}, target)
        target.load_state_dict(loaded)
        images = torch.randn(1, 3, 64, 64)
        torch.testing.assert_close(target(images), model(images), **EXACT)


def test_small_patches_of_small_images():
    model = timm.create_model("vit_tiny_conv5", img_size=32, patch_size=2, num_classes=10, depth=1).eval()
    with torch.no_grad():
        assert model(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    assert model.feature_info[0]["reduction"] == 2


def test_mistakes_are_named():
    for options, argument in (
        *[({"window": window}, "window must be an odd positive whole number") for window in (4, 3.0, "3", True)],
        ({"window": 3, "border": "wrap"}, "border"),
    ):
        with pytest.raises(UserError, match=argument):
            little(**options)
    with pytest.raises(UserError, match="img_size"):
        checkpoint_filter({"pos_embed": torch.zeros(1, 15, 32)}, little())


def test_as_many_positions_of_a_square_are_resized_but_the_model_s_own_are_not(tmp_path: Path):
    square, wide = little(img_size=96), little(img_size=(64, 144))  # 6×6 and 4×9
    expected = resample_abs_pos_embed(square.pos_embed, [4, 9], [6, 6], num_prefix_tokens=0)
    torch.testing.assert_close(checkpoint_filter(square.state_dict(), wide)["pos_embed"], expected)
    assert torch.equal(checkpoint_filter(square.state_dict(), square)["pos_embed"], square.pos_embed)
    torch.save(wide.state_dict(), tmp_path / "wide.pth")
    again = ConvolutionalTransformer(**{**LITTLE, "img_size": (64, 144)})
    load_checkpoint(again, tmp_path / "wide.pth")
    assert torch.equal(again.pos_embed, wide.pos_embed)
    peer = vivid(VisionTransformer(**{**LITTLE, "img_size": (64, 96)}))  # 24 and a class token: 25, which is 5×5 too
    model = little(img_size=(64, 96))
    assert torch.equal(checkpoint_filter(peer.state_dict(), model)["pos_embed"], peer.pos_embed[:, 1:])
