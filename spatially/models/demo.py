"""The demo's models: small members of the families for 64×64 images, trained on the generated set, part of the package.

Each is a registered architecture with few channels and blocks, at most half a million weights, kept as float16 (1 MB) in
`demo/NAME.safetensors` beside `demo/NAME.json`, which says how it was trained. `spatially.load("demo/swin_m")` opens one;
`spatially train-demo` makes them anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PREFIX = "demo/"
FOLDER = Path(__file__).parent / "demo"
SIDE = 64


@dataclass(frozen=True)
class DemoModel:
    """A registered architecture, its arguments for a small member, and what that is."""

    architecture: str
    arguments: Mapping[str, Any]
    what: str


_CONVOLUTIONS = {"depths": (2, 2, 2), "widths": (24, 48, 96), "heads": (1, 2, 4), "head_dim": 24, "window": 4}
_SWIN = {"embed_dim": 40, "depths": (2, 2), "num_heads": (2, 4)}
_VIT = {"img_size": SIDE, "patch_size": 8}

DEMO: dict[str, DemoModel] = {
    "cnn": DemoModel(
        "alternet_18",
        {**_CONVOLUTIONS, "attention_depths": (0, 0, 0)},
        "pre-activation ResNet: an AlterNet without its attention",
    ),
    "vit": DemoModel(
        "vit_tiny_unpooled",
        {**_VIT, "stride": 8, "dims": (96, 96, 96), "heads": (3, 3, 3), "depths": (1, 2, 1)},
        "ViT with patches of 8×8 and a class token",
    ),
    "vit_gab": DemoModel(
        "vit_small_relposmlp_gab",
        {**_VIT, "embed_dim": 96, "num_heads": 3, "depth": 4, "init_values": 0.0},
        "ViT with relative positions and a Gaussian attention bias",
    ),
    "swin": DemoModel(
        "swin_tiny", {**_SWIN, "img_size": SIDE, "window_size": 4}, "Swin in shifted 4×4 windows with a position table"
    ),
    "swin_key": DemoModel(
        "swin_tiny_key",
        {**_SWIN, "img_size": SIDE, "window_size": 4, "qk_norm": True},
        "Swin in shifted 4×4 windows with a 3×3 convolution for the key",
    ),
    "swin_r": DemoModel(
        "swin_tiny_r",
        {**_SWIN, "img_size": SIDE, "window_size": 5},
        "Swin with every query in the middle of its 5×5 field",
    ),
    "swin_m": DemoModel(
        "swin_tiny_m",
        {**_SWIN, "img_size": SIDE, "window_size": 5, "qk_norm": True},
        "Swin with centred 5×5 fields and a 3×3 convolution for the key",
    ),
    "pit": DemoModel(
        "pit_tiny",
        {**_VIT, "stride": 4, "dims": (32, 64, 128), "heads": (1, 2, 4), "depths": (1, 2, 1)},
        "PiT: a ViT whose patches are pooled twice",
    ),
    "alternet": DemoModel(
        "alternet_18",
        {**_CONVOLUTIONS, "attention_depths": (0, 1, 1)},
        "AlterNet: convolutions, with attention at the end of stages",
    ),
}


def trained() -> list[str]:
    """The demo's models whose weights are here."""
    return [name for name in DEMO if weights_file(name).is_file() and facts_file(name).is_file()]


def weights_file(name: str, folder: Path | None = None) -> Path:
    """Where a model's weights lie."""
    return (folder or FOLDER) / f"{name}.safetensors"


def facts_file(name: str, folder: Path | None = None) -> Path:
    """Where it says how a model was made."""
    return (folder or FOLDER) / f"{name}.json"
