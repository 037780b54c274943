"""How a family enters timm's registry: one call a name, with the paper it comes from and what it is.

A registered model is built by `timm.create_model(name)` like any other, so it takes timm's habits: `num_classes`,
`in_chans`, `img_size`, `drop_path_rate`, `features_only=True`. Weights of timm and of the papers' authors load through
`spatially.load(name, checkpoint=FILE)`, which calls the family's filter. `CARDS` holds what `spatially models` lists.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.models.weights import StateDict

PAPERS = {
    "xu": "Xu, Vision Transformer with High Spatial Structure Sensitivity",
    "kim": "Kim et al., Understanding Gaussian Attention Bias of Vision Transformers Using Effective Receptive Fields",
    "heo": "Heo et al., Rethinking Spatial Dimensions of Vision Transformers",
    "park": "Park & Kim, How Do Vision Transformers Work?",
}

Filter = Callable[[StateDict, nn.Module], StateDict]


@dataclass(frozen=True)
class Card:
    """What is known of a registered model: the key of its paper, what it is in a few words, and how it is built."""

    paper: str
    what: str
    kind: type[nn.Module]
    options: Mapping[str, Any]
    checkpoint_filter: Filter


CARDS: dict[str, Card] = {}


def register(
    name: str,
    kind: type[nn.Module],
    *,
    module: str,
    paper: str,
    what: str,
    options: Mapping[str, Any],
    checkpoint_filter: Filter,
    out_indices: int | Sequence[int] = (0, 1, 2, 3),
    **configuration: Any,
) -> None:
    """Enter `kind(**options)` as `name`; `module` is the family's `__name__`, further arguments change timm's configuration.

    Features come through `forward_intermediates`, so `kind` must have it, `prune_intermediate_layers`, and `feature_info`;
    `out_indices` says which by default, a number: so many of the last.
    """

    def build(pretrained: bool = False, **changes: Any) -> nn.Module:
        # timm empties the feature configuration while it builds, so it must be a new one each time.
        return build_model_with_cfg(
            kind,
            name,
            pretrained,
            pretrained_filter_fn=checkpoint_filter,
            feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
            **{**options, **changes},
        )

    build.__name__ = build.__qualname__ = name
    build.__module__ = module
    build.__doc__ = f"{what} ({PAPERS[paper]})."
    family = vars(sys.modules[module])
    configurations = family.setdefault("default_cfgs", {})  # where timm looks for them
    configurations.update(generate_default_cfgs({name: _configuration(**configuration)}))
    family[name] = build
    register_model(build)
    CARDS[name] = Card(paper, what, kind, dict(options), checkpoint_filter)


def _configuration(**changes: Any) -> dict[str, Any]:
    """ImageNet's usual preprocessing at 224, with `changes`."""
    return {
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "license": "apache-2.0",
        **changes,
    }


def dtype_of(module: nn.Module) -> torch.dtype | None:
    """Of a module's first weight; None without any."""
    first = next(module.parameters(), None)
    return None if first is None else first.dtype


def check_images(
    images: Tensor, *, channels: int, smallest: int = 1, multiple: int = 1, dtype: torch.dtype | None = None
) -> None:
    """A clear error for a batch that the architecture cannot take: sides below `smallest` or no `multiple`, another dtype.

    `dtype` is that of the weights which meet the images first; under autocast any floating point will do.
    """
    if images.ndim != 4 or images.shape[1] != channels:
        raise UserError(f"images must be (batch, {channels}, height, width): got {tuple(images.shape)}")
    if not images.is_floating_point():
        raise UserError(f"images must be of a floating-point dtype: got {images.dtype}")
    if dtype is not None and dtype.is_floating_point and images.dtype != dtype and not _autocast(images.device.type):
        raise UserError(f"images must be {dtype} like the model's weights: got {images.dtype}")
    height, width = images.shape[-2:]
    if min(height, width) < smallest:
        raise UserError(f"images must be at least {smallest} pixels high and wide: got {height}×{width}")
    if height % multiple or width % multiple:
        raise UserError(f"images must have sides that are multiples of {multiple}: got {height}×{width}")


def _autocast(device: str) -> bool:
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
