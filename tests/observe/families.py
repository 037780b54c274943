"""One small network of every family that must be seen through, with random weights and what its stream looks like."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import nn

import spatially
import spatially.models  # registers ours


@dataclass(frozen=True)
class Family:
    """How to build it, the size of its images, how many points of each kind its stream has, and the prefix at its end."""

    build: Callable[[], nn.Module]
    size: int
    kinds: dict[str, int]
    prefix: int = 0

    @property
    def points(self) -> int:
        return sum(self.kinds.values())


def kinds(stem: int = 1, **others: int) -> dict[str, int]:
    return {"stem": stem, **{name: count for name, count in others.items() if count}}


def column(depth: int) -> dict[str, int]:
    """A transformer of one stage."""
    return kinds(attention=depth, mlp=depth)


def timm_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: timm.create_model(name, num_classes=5, **options)


def hugging_face(family: str, **options: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers", minversion="5")
        config = getattr(transformers, f"{family}Config")(num_labels=5, **options)
        return getattr(transformers, f"{family}ForImageClassification")(config)

    return build


def torchvision_model(name: str, **options: Any) -> Callable[[], nn.Module]:
    return lambda: getattr(torchvision.models, name)(num_classes=5, **options)


SMALL = {"img_size": 64, "embed_dim": 24, "num_heads": 2, "depth": 2}
STAGES = {"img_size": 64, "embed_dim": 8, "depths": (2, 2), "num_heads": (1, 2)}
TOKENS = {"hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 64, "patch_size": 16}
OWN = {"num_classes": 5, "img_size": 64}

FAMILIES = {
    "timm vit": Family(timm_model("vit_tiny_patch16_224", **SMALL), 64, column(2), prefix=1),
    "timm vit registers": Family(timm_model("vit_tiny_patch16_224", reg_tokens=4, **SMALL), 64, column(2), prefix=5),
    "timm vit parallel": Family(
        timm_model("vit_small_patch16_18x2_224", **SMALL), 64, kinds(attention=2, mlp=2), prefix=1
    ),
    "timm deit distilled": Family(timm_model("deit_tiny_distilled_patch16_224", **SMALL), 64, column(2), prefix=2),
    "timm deit3": Family(timm_model("deit3_small_patch16_224", **SMALL), 64, column(2), prefix=1),
    "timm beit": Family(timm_model("beit_base_patch16_224", **SMALL), 64, column(2), prefix=1),
    # Class attention adds to the class token alone, which has no map.
    "timm cait": Family(timm_model("cait_xxs24_224", **SMALL), 64, column(2)),
    # Class attention adds to all tokens.
    "timm xcit": Family(
        timm_model("xcit_nano_12_p16_224", **SMALL), 64, kinds(attention=4, convolution=2, mlp=4), prefix=1
    ),
    "timm swin": Family(
        timm_model("swin_tiny_patch4_window7_224", window_size=4, **STAGES),
        64,
        kinds(attention=4, mlp=4, subsampling=1),
    ),
    "timm swinv2": Family(
        timm_model("swinv2_tiny_window8_256", window_size=4, **STAGES), 64, kinds(attention=4, mlp=4, subsampling=1)
    ),
    "timm pit": Family(
        timm_model("pit_ti_distilled_224", img_size=64, base_dims=(8, 8), heads=(1, 2), depth=(1, 2)),
        64,
        kinds(attention=3, mlp=3, subsampling=1),
        prefix=2,
    ),
    "timm vit_relpos": Family(timm_model("vit_relpos_small_patch16_224", **SMALL), 64, column(2)),
    "timm maxvit": Family(
        timm_model("maxvit_pico_rw_256", img_size=128, depths=(1, 1, 2, 1), embed_dim=(32, 32, 32, 32), stem_width=8),
        128,
        kinds(attention=10, mlp=10, convolution=1, subsampling=4),
    ),
    "timm coatnet": Family(
        timm_model("coatnet_pico_rw_224", depths=(1, 2, 2, 1), embed_dim=(32, 32, 32, 32), stem_width=8),
        224,
        kinds(attention=1, mlp=3, convolution=1, subsampling=4),
    ),
    "timm levit": Family(timm_model("levit_128s", img_size=64), 64, kinds(attention=9, mlp=11, subsampling=2)),
    "timm mvitv2": Family(timm_model("mvitv2_tiny", img_size=64), 64, kinds(attention=7, mlp=10, subsampling=3)),
    "timm efficientformer": Family(
        timm_model("efficientformer_l1", depths=(1, 1, 1, 2)),
        224,
        kinds(attention=1, mlp=5, convolution=4, subsampling=3),
    ),
    "timm convnext": Family(
        timm_model("convnext_tiny", depths=(1, 1, 2, 1), dims=(8, 16, 16, 32)), 64, kinds(convolution=5, subsampling=3)
    ),
    "timm resnet": Family(timm_model("resnet50"), 64, kinds(convolution=13, subsampling=3)),
    "timm resnext": Family(timm_model("resnext50_32x4d"), 64, kinds(convolution=13, subsampling=3)),
    "timm regnet": Family(timm_model("regnety_002"), 64, kinds(convolution=9, subsampling=4)),
    "timm efficientnet": Family(timm_model("efficientnet_b0"), 64, kinds(convolution=10, subsampling=3)),
    "timm mobilenetv3": Family(timm_model("mobilenetv3_small_100"), 64, kinds(convolution=7, subsampling=2)),
    "timm vit_small_r26": Family(
        timm_model("vit_small_r26_s32_224", **SMALL),
        64,
        kinds(convolution=5, subsampling=3, mlp=3, attention=2),
        prefix=1,
    ),
    "torchvision resnet50": Family(torchvision_model("resnet50"), 64, kinds(convolution=13, subsampling=3)),
    "torchvision vit_b_16": Family(
        lambda: torchvision.models.VisionTransformer(64, 16, 2, 2, 24, 48, num_classes=5), 64, column(2), prefix=1
    ),
    "torchvision swin_t": Family(
        lambda: torchvision.models.SwinTransformer([4, 4], 8, [2, 2], [1, 2], [4, 4], num_classes=5),
        72,
        kinds(attention=4, mlp=4, subsampling=1),
    ),
    "torchvision swin_v2_t": Family(
        lambda: torchvision.models.SwinTransformer(
            [4, 4],
            8,
            [2, 2],
            [1, 2],
            [4, 4],
            num_classes=5,
            block=torchvision.models.swin_transformer.SwinTransformerBlockV2,
            downsample_layer=torchvision.models.swin_transformer.PatchMergingV2,
        ),
        64,
        kinds(attention=4, mlp=4, subsampling=1),
    ),
    "torchvision maxvit_t": Family(
        lambda: torchvision.models.MaxVit((64, 64), 8, 4, [8, 16], [1, 2], 8, 0.0, num_classes=5),
        64,
        kinds(attention=6, mlp=6, convolution=1, subsampling=2),
    ),
    "torchvision convnext_tiny": Family(torchvision_model("convnext_tiny"), 64, kinds(convolution=18, subsampling=3)),
    "hf ViT": Family(hugging_face("ViT", intermediate_size=48, **TOKENS), 64, column(2), prefix=1),
    "hf DeiT": Family(hugging_face("DeiT", intermediate_size=48, **TOKENS), 64, column(2), prefix=2),
    "hf Dinov2": Family(hugging_face("Dinov2", **TOKENS), 64, column(2), prefix=1),
    "hf Swin": Family(
        hugging_face("Swin", image_size=64, embed_dim=8, depths=[2, 2], num_heads=[1, 2], window_size=4),
        64,
        kinds(attention=4, mlp=4, subsampling=1),
    ),
    "hf ConvNext": Family(
        hugging_face("ConvNext", depths=[1, 1, 2, 1], hidden_sizes=[8, 16, 16, 32]),
        64,
        kinds(convolution=5, subsampling=3),
    ),
    "own pit": Family(
        timm_model("pit_tiny", dims=(8, 16), heads=(1, 2), depths=(1, 2), img_size=64),
        64,
        kinds(attention=3, mlp=3, subsampling=1),
        prefix=1,
    ),
    "own vit_pooled": Family(
        timm_model("vit_tiny_pooled", dims=(8, 16), heads=(1, 2), depths=(1, 2), img_size=64),
        64,
        kinds(attention=3, mlp=3, subsampling=1),
        prefix=1,
    ),
    "own vit_relposmlp": Family(timm_model("vit_small_relposmlp_gab", **SMALL), 64, column(2)),
    "own vit_relposbias": Family(timm_model("vit_small_relposbias", **SMALL), 64, column(2)),
    "own vit_conv": Family(timm_model("vit_tiny_conv3", **SMALL), 64, column(2)),
    **{
        f"own {name}": Family(
            timm_model(name, img_size=64, embed_dim=8, num_heads=(1, 2), depths=(2, 2)),
            64,
            kinds(attention=4, mlp=4, subsampling=1),
        )
        for name in ("swin_tiny", "swin_tiny_key", "swin_tiny_r", "swin_tiny_m", "swin_tiny_gab")
    },
    "own alternet": Family(
        timm_model(
            "alternet_50",
            widths=(8, 8, 16, 16),
            heads=(1, 1, 1, 1),
            head_dim=8,
            depths=(1, 2, 3, 2),
            attention_depths=(0, 1, 1, 1),
        ),
        64,
        kinds(attention=3, convolution=2, subsampling=3),
    ),
    "own resnet_flat": Family(
        timm_model("resnet50_flat", base_width=8, depths=(1, 1, 1, 1), img_size=64), 64, kinds(convolution=4)
    ),
}


def subject_of(name: str, **options: Any) -> spatially.Subject:
    """The family's network, its weights moved so that nothing that is added is zero."""
    torch.manual_seed(0)
    family = FAMILIES[name]
    model = family.build()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return spatially.load(model, name=name, input_size=family.size, device="cpu", **options)


def count_kinds(places: list[Any]) -> dict[str, int]:
    return dict(Counter(place.kind for place in places))
