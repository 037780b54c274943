"""Small networks of every library, with weights large enough that attention is far from even."""

from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import spatially.models  # noqa: F401  registers ours

COLUMN = {"depth": 2, "img_size": 64, "embed_dim": 32, "num_heads": 4, "num_classes": 5}
# Stages of 18×18 and 9×9 under 7×7 windows: shifted and padded both times.
HIERARCHY = {"img_size": 72, "embed_dim": 16, "depths": (2, 2), "num_heads": (2, 4), "num_classes": 5}
TOKENS = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 64,
    "patch_size": 16,
    "num_labels": 5,
}


def hugging_face(family: str, **options: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers", minversion="5")
    config = getattr(transformers, f"{family}Config")(attn_implementation="eager", **options)
    return getattr(transformers, f"{family}ForImageClassification")(config)


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "timm vit": lambda: timm.create_model("vit_tiny_patch16_224", dynamic_img_size=True, reg_tokens=2, **COLUMN),
    "timm deit": lambda: timm.create_model("deit_tiny_distilled_patch16_224", **COLUMN),
    "timm beit": lambda: timm.create_model("beit_base_patch16_224", **COLUMN | {"init_values": 1.0}),
    "timm relpos": lambda: timm.create_model("vit_relpos_small_patch16_224", **COLUMN | {"init_values": 1.0}),
    "timm shared relpos": lambda: timm.create_model("vit_srelpos_small_patch16_224", **COLUMN | {"init_values": 1.0}),
    "timm relpos table": lambda: timm.create_model(
        "vit_relpos_small_patch16_224", rel_pos_type="bias", class_token=True, **COLUMN
    ),
    "timm pit": lambda: timm.create_model(
        "pit_ti_distilled_224", base_dims=(8, 8), heads=(2, 4), depth=(1, 1), img_size=64, num_classes=5
    ),
    "timm swin": lambda: timm.create_model("swin_tiny_patch4_window7_224", **HIERARCHY),
    "hf vit": lambda: hugging_face("ViT", **TOKENS),
    "hf deit": lambda: hugging_face("DeiT", **TOKENS),
    "hf beit": lambda: hugging_face("Beit", use_relative_position_bias=True, layer_scale_init_value=1.0, **TOKENS),
    "hf swin": lambda: hugging_face(
        "Swin", image_size=72, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=7, num_labels=5
    ),
    "torchvision vit": lambda: torchvision.models.VisionTransformer(64, 16, 2, 4, 32, 64, num_classes=5),
    "torchvision swin": lambda: torchvision.models.SwinTransformer([4, 4], 16, [2, 2], [2, 4], [7, 7], num_classes=5),
    "own relpos": lambda: timm.create_model("vit_small_relposmlp", **COLUMN | {"init_values": 1.0}),
    "own relpos table": lambda: timm.create_model("vit_small_relposbias", **COLUMN | {"init_values": 1.0}),
    "own conv": lambda: timm.create_model("vit_small_conv3", **COLUMN),
    "own global": lambda: timm.create_model("vit_small_global", **COLUMN),
    "own pit": lambda: timm.create_model(
        "pit_tiny", dims=(16, 32), heads=(2, 4), depths=(1, 1), img_size=64, num_classes=5
    ),
    "own swin": lambda: timm.create_model("swin_tiny", **HIERARCHY),
}
ANY_SIZE = (
    "timm vit",
    "torchvision swin",
    "hf swin",
    "own relpos",
    "own relpos table",
    "own conv",
    "own global",
    "own pit",
)


def build(name: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = NETWORKS[name]().to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(
                torch.randn_like(parameter) * (0.2 if parameter.ndim > 1 else 0.1) + (parameter.ndim == 1) * 0.5
            )
    return model


@pytest.fixture
def make() -> Callable[..., nn.Module]:
    return build


@pytest.fixture
def images() -> Callable[..., Tensor]:
    """Random images of the size that a network is built for, or a rectangle where it takes any."""

    def draw(name: str, dtype: torch.dtype = torch.float32) -> Tensor:
        torch.manual_seed(1)
        size = (72, 72) if "swin" in name else (64, 64)
        return torch.randn(2, 3, *((64, 96) if name in ANY_SIZE else size), dtype=dtype)

    return draw


@pytest.fixture
def answer() -> Callable[[nn.Module, Tensor], Tensor]:
    def logits(model: nn.Module, batch: Tensor) -> Tensor:
        output = model(batch)
        return output if isinstance(output, Tensor) else output.logits

    return logits


@pytest.fixture
def anatomy() -> Callable[[nn.Module], list[Any]]:
    """Everything that undoing has to restore: modules, classes, parameters by identity and order, values by bits."""

    def read(model: nn.Module) -> list[Any]:
        modules = [(name, id(module), type(module), tuple(module._modules)) for name, module in model.named_modules()]
        parameters = [(name, id(parameter)) for name, parameter in model.named_parameters()]
        state = [(name, value.clone()) for name, value in model.state_dict().items()]
        hooks = [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()]
        own = [sorted(vars(module)) for module in model.modules()]
        return [modules, parameters, [(name, value.numpy().tobytes()) for name, value in state], hooks, own]

    return read
