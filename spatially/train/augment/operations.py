"""RandAugment's operations by timm's names, and what a magnitude of 0 … 10 means for each.

.. code-block:: text

    Rotate                ± 30° · m/10          Color, Contrast, Brightness, Sharpness   0.1 + 1.8 · m/10
    ShearX, ShearY        ± 0.3 · m/10             … increasing with the magnitude       1 ± 0.9 · m/10, at least 0.1
    TranslateXRel, YRel   ± 0.45 · m/10 of the side
    Posterize             ⌊4 · m/10⌋ bits kept     … increasing   4 − that
    Solarize              from ⌊256 · m/10⌋ on     … increasing   256 − that
    SolarizeAdd           ⌊110 · m/10⌋ to levels below 128
"""

from __future__ import annotations

import torch
from torch import Tensor

OPERATIONS = (
    "AutoContrast",
    "Equalize",
    "Invert",
    "Rotate",
    "Posterize",
    "Solarize",
    "SolarizeAdd",
    "Color",
    "Contrast",
    "Brightness",
    "Sharpness",
    "ShearX",
    "ShearY",
    "TranslateXRel",
    "TranslateYRel",
)
NUMBER = {name: number for number, name in enumerate(OPERATIONS)}
NOTHING = len(OPERATIONS)


def arguments(kind: Tensor, magnitude: Tensor, negative: Tensor, *, increasing: bool) -> Tensor:
    """What each image's operation is told, float32 ``(B,)``, from its kind, magnitude and drawn sign."""
    share = magnitude.double() / 10  # Pillow is told float64 numbers, some of which it rounds to float32
    signed = torch.where(negative, -share, share)
    enhance = (1 + 0.9 * signed).clamp(min=0.1) if increasing else 1.8 * share + 0.1
    bits = torch.floor(4 * share)
    threshold = torch.floor(256 * share).clamp(max=256)
    told = {
        "Rotate": 30 * signed,
        "Posterize": 4 - bits if increasing else bits,
        "Solarize": 256 - threshold if increasing else threshold,
        "SolarizeAdd": torch.floor(110 * share).clamp(max=128),
        **dict.fromkeys(("Color", "Contrast", "Brightness", "Sharpness"), enhance),
        **dict.fromkeys(("ShearX", "ShearY"), 0.3 * signed),
        **dict.fromkeys(("TranslateXRel", "TranslateYRel"), 0.45 * signed),
    }
    nothing = torch.zeros_like(share)
    every = torch.stack([told.get(name, nothing) for name in (*OPERATIONS, "nothing")], dim=1)
    return every.gather(1, kind[:, None])[:, 0].float()
