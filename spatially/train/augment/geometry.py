"""Rotation, shear and translation as Pillow's affine transform does them, another one for every image of a batch.

Pixel (x, y) of the result, seen at its centre, is read at (a x + b y + c, d x + e y + f) of the image: bilinearly, or by a
cubic with a = −1 (not the one that Pillow resizes with). The outermost pixels are repeated, and one colour is filled in where
that place lies outside the image. Pillow cuts the decimals off.
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


def transform(pixels: Tensor, matrix: Tensor, fill: Tensor, smooth: Tensor | bool = False) -> Tensor:
    """Move each image as its six numbers say; ``fill`` is ``(3, 1, 1)``. Levels, float32 ``(B, 3, H, W)``.

    ``smooth`` says whether they are read bicubically rather than bilinearly; a tensor ``(B,)`` says it of each.
    """
    height, width = pixels.shape[2:]
    a, b, c, d, e, f = matrix.float()[:, :, None, None].unbind(1)
    y = torch.arange(height, device=pixels.device, dtype=torch.float32)[:, None] + 0.5
    x = torch.arange(width, device=pixels.device, dtype=torch.float32) + 0.5
    across, down = a * x + b * y + c, d * x + e * y + f
    inside = (across >= 0) & (across < width) & (down >= 0) & (down < height)
    with torch.autocast(pixels.device.type, enabled=False):
        if isinstance(smooth, Tensor):
            each = smooth[:, None, None, None]
            read = torch.where(each, bicubic(pixels, across, down), bilinear(pixels, across, down))
        else:
            read = (bicubic if smooth else bilinear)(pixels, across, down)
    # A hundredth more, so that a whole level is not cut to the one below by the last bits of a float.
    return torch.where(inside[:, None], torch.floor((read + 0.01).clamp(0, 255)), fill)


def bilinear(pixels: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """Each image read at places ``(B, H, W)``."""
    height, width = pixels.shape[2:]
    grid = torch.stack([across * (2 / width) - 1, down * (2 / height) - 1], dim=3)
    return functional.grid_sample(pixels, grid, mode="bilinear", padding_mode="border", align_corners=False)


def bicubic(pixels: Tensor, across: Tensor, down: Tensor) -> Tensor:
    """The same from sixteen pixels, four of a row together; torch's own cubic has a = −3/4."""
    batch, channels, height, width = pixels.shape
    left, top = torch.floor(across - 0.5), torch.floor(down - 0.5)
    four = torch.arange(-1, 3, device=pixels.device)[:, None, None]
    columns = (left[:, None] + four).clamp(0, width - 1)
    parts = torch.stack(_cubic(across - 0.5 - left), dim=1)[:, None]
    flat, total = pixels.flatten(2), torch.zeros_like(pixels)
    for row, share in enumerate(_cubic(down - 0.5 - top), start=-1):
        place = ((top + row).clamp(0, height - 1)[:, None] * width + columns).long().flatten(1)
        found = flat.gather(2, place[:, None].expand(-1, channels, -1)).view(batch, channels, 4, height, width)
        total = total + share[:, None] * (found * parts).sum(2)
    return total


def _cubic(t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """What the four neighbours count at a share t of the way from the second to the third: Keys' cubic with a = −1."""
    rest = 1 - t
    return -t * rest * rest, (t - 2) * t * t + 1, (rest - 2) * rest * rest + 1, -rest * t * t
