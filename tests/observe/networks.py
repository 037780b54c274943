"""Small networks of every library and family that attends, and what their attention layers are."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import timm
import torch
import torchvision
from torch import nn
from torchvision.models.swin_transformer import PatchMergingV2, SwinTransformerBlockV2

import spatially

TOKENS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 64,
    "patch_size": 16,
    "num_labels": 5,
}
# Stages of 18×18 and 9×9 under 7×7 windows: shifted and padded both times.
HIERARCHY = {"img_size": 72, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4)}
COLUMN = {"img_size": 64, "embed_dim": 32, "depth": 2, "num_heads": 4}


def small(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=5, **options)


def hugging_face(family: str, **options: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        transformers = pytest.importorskip("transformers", minversion="5")
        config = getattr(transformers, f"{family}Config")(**options)
        return getattr(transformers, f"{family}ForImageClassification")(config)

    return make


class Network(NamedTuple):
    make: Callable[[], nn.Module]
    size: int
    layers: list[tuple[str, int, tuple[int, int], tuple[int, int], int, int]]  # kind, heads, grids, prefixes


def whole(heads: int, side: int, prefix: int = 0, keys: int | None = None) -> tuple:
    keys = side if keys is None else keys
    return "global", heads, (side, side), (keys, keys), prefix, prefix


def window(heads: int, side: int, padding: int = 0) -> tuple:
    return "window", heads, (side, side), (side, side), 0, padding


def square(heads: int, side: int) -> tuple:
    return "neighbourhood", heads, (side, side), (side, side), 0, 0


def token(heads: int, side: int) -> tuple:
    return "class", heads, (0, 0), (side, side), 1, 1


PIT = {"base_dims": (8, 8), "heads": (2, 4), "depth": (1, 1), "img_size": 64}
SWIN = [window(2, 18, 1), window(2, 18, 1), window(4, 9, 1), window(4, 9, 1)]
NETWORKS = {
    "timm vit": Network(small("vit_tiny_patch16_224", reg_tokens=2, **COLUMN), 64, [whole(4, 4, 3)] * 2),
    "timm deit": Network(small("deit_tiny_distilled_patch16_224", **COLUMN), 64, [whole(4, 4, 2)] * 2),
    "timm deit3": Network(small("deit3_small_patch16_224", **COLUMN), 64, [whole(4, 4, 1)] * 2),
    "timm beit": Network(small("beit_base_patch16_224", **COLUMN), 64, [whole(4, 4, 1)] * 2),
    "timm cait": Network(small("cait_xxs24_224", **COLUMN), 64, [whole(4, 4)] * 2 + [token(4, 4)] * 2),
    "timm xcit": Network(small("xcit_nano_12_p16_224", **COLUMN), 64, [token(4, 4)] * 2),
    "timm swin": Network(small("swin_tiny_patch4_window7_224", **HIERARCHY), 72, SWIN),
    "timm swinv2": Network(
        small("swinv2_tiny_window8_256", **HIERARCHY | {"img_size": 64, "window_size": 4}),
        64,
        [window(2, 16)] * 2 + [window(4, 8)] * 2,
    ),
    "timm pit": Network(small("pit_ti_distilled_224", **PIT), 64, [whole(2, 7, 2), whole(4, 4, 2)]),
    "timm relpos": Network(small("vit_relpos_small_patch16_224", **COLUMN), 64, [whole(4, 4)] * 2),
    "timm maxvit": Network(
        small("maxvit_pico_rw_256", img_size=64, depths=(1,) * 4, embed_dim=(32,) * 4, stem_width=8),
        64,
        [window(1, 16)] * 2 + [window(1, 8)] * 2 + [window(1, 4)] * 2 + [whole(1, 2)] * 2,
    ),
    "timm coatnet": Network(
        small("coatnet_pico_rw_224", img_size=64, depths=(1,) * 4, embed_dim=(32,) * 4, stem_width=8),
        64,
        [whole(1, 4), whole(1, 2)],
    ),
    "timm levit": Network(
        small("levit_128s"),
        224,
        [whole(4, 14)] * 2 + [whole(8, 7, 0, 14)] + [whole(6, 7)] * 3 + [whole(16, 4, 0, 7)] + [whole(8, 4)] * 4,
    ),
    "timm mvitv2": Network(
        small("mvitv2_tiny", img_size=64),
        64,
        [whole(1, 16, 0, 4), whole(2, 8, 0, 8), whole(2, 8, 0, 4), whole(4, 4, 0, 8)]
        + [whole(4, 4)] * 4
        + [whole(8, 2, 0, 4), whole(8, 2)],
    ),
    "timm efficientformer": Network(small("efficientformer_l1"), 224, [whole(8, 7)]),
    "timm hybrid": Network(small("vit_small_r26_s32_224", **COLUMN), 64, [whole(4, 2, 1)] * 2),
    "torchvision vit": Network(
        lambda: torchvision.models.VisionTransformer(64, 16, 2, 4, 32, 64, num_classes=5), 64, [whole(4, 4, 1)] * 2
    ),
    "torchvision swin": Network(
        lambda: torchvision.models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [7, 7], num_classes=5), 72, SWIN
    ),
    "torchvision swinv2": Network(
        lambda: torchvision.models.SwinTransformer(
            [4, 4],
            16,
            [2, 2],
            [2, 4],
            [7, 7],
            num_classes=5,
            block=SwinTransformerBlockV2,
            downsample_layer=PatchMergingV2,
        ),
        72,
        SWIN,
    ),
    "torchvision maxvit": Network(
        lambda: torchvision.models.MaxVit((64, 64), 8, 4, [8, 16], [1, 1], 8, 0.0, num_classes=5),
        64,
        [window(1, 16)] * 2 + [window(2, 8)] * 2,
    ),
    "hf vit": Network(hugging_face("ViT", **TOKENS), 64, [whole(4, 4, 1)] * 2),
    "hf deit": Network(hugging_face("DeiT", **TOKENS), 64, [whole(4, 4, 2)] * 2),
    "hf dinov2": Network(hugging_face("Dinov2", **TOKENS), 64, [whole(4, 4, 1)] * 2),
    "hf swin": Network(
        hugging_face("Swin", image_size=72, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=7, num_labels=5),
        72,
        SWIN,
    ),
    "own vit": Network(small("vit_small_relposmlp_gab", **COLUMN), 64, [whole(4, 4)] * 2),
    "own global vit": Network(small("vit_tiny_global", **COLUMN), 64, [whole(4, 4)] * 2),
    "own convolutional vit": Network(small("vit_tiny_conv3", **COLUMN), 64, [square(4, 4)] * 2),
    "own pit": Network(
        small("pit_tiny", dims=(16, 32), heads=(2, 4), depths=(1, 1), img_size=64), 64, [whole(2, 7, 1), whole(4, 4, 1)]
    ),
    "own pooled vit": Network(
        small("vit_tiny_pooled", dims=(12, 24, 48), heads=(1, 2, 4), depths=(1, 1, 1), img_size=64),
        64,
        [whole(1, 7, 1), whole(2, 4, 1), whole(4, 2, 1)],
    ),
    "own swin": Network(small("swin_tiny", **HIERARCHY), 72, SWIN),
    "own swin key": Network(small("swin_tiny_key", **HIERARCHY), 72, SWIN),
    "own regular swin": Network(small("swin_tiny_m", **HIERARCHY), 72, [square(2, 18)] * 2 + [square(4, 9)] * 2),
    "own alternet": Network(
        small("alternet_18", img_size=64, widths=(8, 16, 24, 32), heads=(1, 1, 2, 2), head_dim=8),
        64,
        [window(1, 8, 1), whole(2, 4), whole(2, 2)],
    ),
}


def subject_of(name: str, dtype: str = "float32") -> spatially.Subject:
    """With weights large enough that attention is far from even."""
    torch.manual_seed(0)
    network = NETWORKS[name]
    model = network.make().eval()
    with torch.no_grad():
        for path, parameter in model.named_parameters():
            if parameter.ndim > 1 and "logit_scale" not in path:
                parameter.mul_(2)
    return spatially.load(model, name=name, input_size=network.size, device="cpu", dtype=dtype)


def pictures(size: int, count: int = 3) -> torch.Tensor:
    return torch.rand(count, 3, size, size, generator=torch.Generator().manual_seed(1))
