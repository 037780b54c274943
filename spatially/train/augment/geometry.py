"""Rotation, shear and translation as Pillow's affine transform does them, another one for every image of a batch.

Pixel (x, y) of the result, seen at its centre, is read at (a x + b y + c, d x + e y + f) of the image: bilinearly, with the
outermost pixels repeated, and filled with one colour where that place lies outside the image. Pillow cuts the decimals off.
timm would draw bicubic interpolation for some images or, if told so, for all; here it is always bilinear.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional

from spatially.train.augment.operations import NUMBER

GEOMETRIC = ("Rotate", "ShearX", "ShearY", "TranslateXRel", "TranslateYRel")


def matrices(kind: Tensor, argument: Tensor, height: int, width: int) -> Tensor:
    """The six numbers a … f of each image, float64 ``(B, 6)``; those of other kinds leave it as it is."""
    value = argument.double()

    def told(name: str) -> Tensor:
        return torch.where(kind == NUMBER[name], value, torch.zeros_like(value))

    angle = -told("Rotate") * (math.pi / 180)
    cosine, sine = torch.cos(angle), torch.sin(angle)
    middle, centre = width / 2, height / 2
    across = middle - cosine * middle - sine * centre + told("TranslateXRel") * width
    down = centre + sine * middle - cosine * centre + told("TranslateYRel") * height
    return torch.stack([cosine, sine + told("ShearX"), across, told("ShearY") - sine, cosine, down], dim=1)


def transform(pixels: Tensor, matrix: Tensor, fill: Tensor) -> Tensor:
    """Move each image as its six numbers say; ``fill`` is ``(3, 1, 1)``. Levels, float32 ``(B, 3, H, W)``."""
    height, width = pixels.shape[2:]
    a, b, c, d, e, f = matrix.float()[:, :, None, None].unbind(1)
    y = torch.arange(height, device=pixels.device, dtype=torch.float32)[:, None] + 0.5
    x = torch.arange(width, device=pixels.device, dtype=torch.float32) + 0.5
    across, down = a * x + b * y + c, d * x + e * y + f
    inside = (across >= 0) & (across < width) & (down >= 0) & (down < height)
    grid = torch.stack([across * (2 / width) - 1, down * (2 / height) - 1], dim=3)
    with torch.autocast(pixels.device.type, enabled=False):
        read = functional.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)
    # A hundredth more, so that a whole level is not cut to the one below by the last bits of a float.
    return torch.where(inside[:, None], torch.floor(read + 0.01), fill)
