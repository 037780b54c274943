"""The pairs: DeiT's counts and outputs without pooling, the same cost with it."""

from typing import Any

import pytest
import timm
import torch
from timm.models.deit import VisionTransformerDistilled
from timm.models.vision_transformer import VisionTransformer
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from spatially.errors import UserError
from spatially.models.pit import PoolingTransformer
from spatially.models.pooled_vit import checkpoint_filter


def unpooled(**options: Any) -> PoolingTransformer:
    same = {"stride": 16, "dims": (24,) * 3, "heads": (2,) * 3, "pool": False, "class_position": True}
    return PoolingTransformer(**same, num_classes=5, **options).eval()


def gmacs(model: nn.Module) -> float:
    with FlopCounterMode(display=False) as count, sdpa_kernel(SDPBackend.MATH):
        model.eval()(torch.zeros(1, 3, 224, 224, device="meta"))
    return count.get_total_flops() / 2e9


@pytest.mark.parametrize(
    ("size", "parameters", "cost"), [("tiny", 5_717_416, 1.25), ("small", 22_050_664, 4.60), ("base", 86_567_656, 17.6)]
)
def test_pairs(size: str, parameters: int, cost: float) -> None:
    plain = timm.create_model(f"vit_{size}_unpooled", device="meta")
    pooled = timm.create_model(f"vit_{size}_pooled", device="meta")
    assert sum(p.numel() for p in plain.parameters()) == parameters
    assert gmacs(plain) == pytest.approx(cost, rel=0.01)
    assert gmacs(pooled) == pytest.approx(gmacs(plain), rel=0.01)
    assert [info["reduction"] for info in plain.feature_info] == [16, 16, 16]
    assert [info["reduction"] for info in pooled.feature_info] == [8, 16, 32]
    for model in (plain, pooled):
        assert sum(len(stage.blocks) for stage in model.transformers) == 12


@pytest.mark.parametrize("kind", ["class token", "class token without position", "distilled"])
def test_equals_timm(kind: str) -> None:
    torch.manual_seed(0)
    options = {"img_size": 48, "embed_dim": 24, "num_heads": 2, "depth": 12, "num_classes": 5}
    if kind == "distilled":
        theirs: nn.Module = VisionTransformerDistilled(**options)
    else:
        theirs = VisionTransformer(**options, no_embed_class=kind != "class token")
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours = unpooled(img_size=48, distilled=kind == "distilled")
    ours.load_state_dict(checkpoint_filter({"model": theirs.state_dict()}, ours))
    images = torch.randn(2, 3, 48, 48)
    torch.testing.assert_close(ours(images), theirs.eval()(images), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(ours.forward_features(images), theirs.forward_features(images), atol=1e-5, rtol=1e-5)


def test_our_own_weights_at_another_size() -> None:
    built, larger = unpooled(img_size=48), unpooled(img_size=(64, 80))
    larger.load_state_dict(checkpoint_filter(built.state_dict(), larger))
    images = torch.randn(2, 3, 64, 80)
    torch.testing.assert_close(larger(images), built(images))


def test_deit_loads() -> None:
    theirs, ours = timm.create_model("deit_tiny_patch16_224").eval(), timm.create_model("vit_tiny_unpooled").eval()
    ours.load_state_dict(checkpoint_filter(theirs.state_dict(), ours))
    images = torch.randn(1, 3, 224, 224)
    torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=0)


def test_class_position_is_not_decayed() -> None:
    model = timm.create_model("vit_tiny_unpooled", device="meta")
    assert model.no_weight_decay() == {"pos_embed", "cls_token", "cls_pos_embed"}
    layers = timm.models.group_parameters(model, model.group_matcher(), reverse=True)
    assert layers["cls_pos_embed"] == 0
    assert layers["transformers.1.blocks.3.norm1.weight"] == 1 + 2 + 3


@pytest.mark.parametrize("no_embed_class", [False, True])
def test_a_grid_that_is_not_square(no_embed_class: bool) -> None:
    options = {"img_size": (64, 96), "num_classes": 5}  # 4×6 patches and a class token: 25, which is 5×5 too
    theirs = timm.create_model("vit_tiny_patch16_224", no_embed_class=no_embed_class, **options).eval()
    nn.init.normal_(theirs.pos_embed)
    ours = timm.create_model("vit_tiny_unpooled", **options).eval()
    ours.load_state_dict(checkpoint_filter(theirs.state_dict(), ours))
    images = torch.randn(2, 3, 64, 96)
    torch.testing.assert_close(ours(images), theirs(images), atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 13}, "12 blocks.*got 13"),
        ({"depth": 6}, "12 blocks.*got 6"),
        ({"class_token": False, "global_pool": "avg"}, "cls_token"),
        ({"reg_tokens": 4}, "register tokens"),
    ],
)
def test_weights_that_have_no_place(options: dict[str, Any], message: str) -> None:
    theirs = VisionTransformer(**{"img_size": 48, "embed_dim": 24, "num_heads": 2, "depth": 12, **options})
    with pytest.raises(UserError, match=message):
        checkpoint_filter(theirs.state_dict(), unpooled(img_size=48))


def test_positions_of_no_known_grid() -> None:
    weights = VisionTransformer(img_size=(32, 112), embed_dim=24, num_heads=2).state_dict()
    with pytest.raises(UserError, match="15 positions are neither"):
        checkpoint_filter(weights, unpooled(img_size=48))
