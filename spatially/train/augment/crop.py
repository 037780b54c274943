r"""Random crops with a mirror, as Pillow makes them, for a whole batch by two products of matrices.

Pillow's resize is separable: each row of the result is a weighted mean of rows of the crop, with the weights of a triangle
(bilinear) or of Keys' cubic with a = −1/2 (bicubic), stretched by the scale where the crop is larger than the result. With
the weights of image b as matrices :math:`V_b` and :math:`H_b`, the result is :math:`V_b\,X_b\,H_b^\top`, rounded to whole
grey levels after each product as Pillow does; a mirror reverses the rows of H. The window is the crop itself, so that
nothing from outside it comes in; only a crop between the centres of two pixels, as of a thin picture that was stored
narrower, is interpolated from them.

A crop of random size and proportions is drawn as timm and torchvision do: up to ten tries of a share of the area (evenly
within ``scale``) and of proportions (evenly in the logarithm within ``ratio``); where none fits, the largest central one.
It is drawn in the pixels of the original; a stored image that was stretched is cropped at the same place.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

TRIES = 10
RESIZED_DRAWS = 2 * TRIES + 2


@dataclass
class Boxes:
    """One rectangle an image, in pixels: float64 ``(B,)`` each."""

    top: Tensor
    left: Tensor
    height: Tensor
    width: Tensor

    def stretched(self, down: Tensor, across: Tensor) -> Boxes:
        """The same rectangles of an image that was stretched by these factors."""
        return Boxes(self.top * down, self.left * across, self.height * down, self.width * across)


def whole(height: Tensor, width: Tensor) -> Boxes:
    """All of each image."""
    return Boxes(torch.zeros_like(height), torch.zeros_like(width), height, width)


def resized_boxes(
    uniform: Tensor, height: Tensor, width: Tensor, scale: tuple[float, float], ratio: tuple[float, float]
) -> Boxes:
    """Random rectangles from uniform numbers ``(B, 22)`` and the sizes of the images, float64 ``(B,)``."""
    numbers = uniform.double()
    share = scale[0] + (scale[1] - scale[0]) * numbers[:, :TRIES]
    low, high = math.log(ratio[0]), math.log(ratio[1])
    proportion = torch.exp(low + (high - low) * numbers[:, TRIES : 2 * TRIES])
    area = share * (height * width)[:, None]
    wide = torch.round(torch.sqrt(area * proportion))
    tall = torch.round(torch.sqrt(area / proportion))
    fits = (wide <= width[:, None]) & (tall <= height[:, None]) & (wide >= 1) & (tall >= 1)
    first = fits.int().argmax(1, keepdim=True)
    found = fits.gather(1, first)[:, 0]
    tall, wide = tall.gather(1, first)[:, 0], wide.gather(1, first)[:, 0]
    # The fallback: as much as the proportions allow, in the middle.
    own = width / height
    most_tall = torch.where(own < ratio[0], torch.round(width / ratio[0]), height)
    most_wide = torch.where(own > ratio[1], torch.round(height * ratio[1]), width)
    tall, wide = torch.where(found, tall, most_tall), torch.where(found, wide, most_wide)
    down, across = numbers[:, 2 * TRIES], numbers[:, 2 * TRIES + 1]
    top = torch.where(found, torch.floor(down * (height - tall + 1)), torch.floor((height - tall) / 2))
    left = torch.where(found, torch.floor(across * (width - wide + 1)), torch.floor((width - wide) / 2))
    return Boxes(top, left, tall, wide)


def triangle(distance: Tensor) -> Tensor:
    """The bilinear filter, 1 − |x| up to 1."""
    return (1 - distance.abs()).clamp(min=0)


def cubic(distance: Tensor) -> Tensor:
    """Keys' cubic with a = −1/2, which reaches to 2."""
    x = distance.abs()
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return torch.where(x < 1, near, torch.where(x < 2, far, torch.zeros_like(x)))


def weights(start: Tensor, length: Tensor, source: int, target: int, smooth: Tensor | bool) -> Tensor:
    """What each of ``target`` results takes from each of ``source`` pixels: float32 ``(B, target, source)``.

    ``smooth`` says whether images are resized bicubically rather than bilinearly; a tensor ``(B,)`` says it of each.
    """
    first, last, ratio = (value[:, None, None] for value in (start, start + length, length / target))
    steps = torch.arange(target, device=start.device, dtype=start.dtype) + 0.5
    pixels = torch.arange(source, device=start.device, dtype=start.dtype) + 0.5
    distance = (pixels - (first + steps[:, None] * ratio)) / ratio.clamp(min=1)
    if isinstance(smooth, Tensor):
        value = torch.where(smooth[:, None, None], cubic(distance), triangle(distance))
    else:
        value = cubic(distance) if smooth else triangle(distance)
    inside = (pixels > first) & (pixels < last)
    value *= inside | ~inside.any(2, keepdim=True)
    # In float64 up to here: Pillow's halves between two levels come out as halves more often.
    return (value / value.sum(2, keepdim=True)).float()


def levels(values: Tensor) -> Tensor:
    """Whole grey levels 0 … 255, still floats; a half goes up, as in Pillow."""
    return values.add_(0.5).floor_().clamp_(0, 255)


def cut(pixels: Tensor, boxes: Boxes, size: tuple[int, int], mirror: Tensor, smooth: Tensor | bool) -> Tensor:
    """Each image's rectangle, brought to ``size`` and mirrored where asked: float32 levels ``(B, 3, *size)``."""
    across = weights(boxes.left, boxes.width, pixels.shape[3], size[1], smooth)
    across = torch.where(mirror[:, None, None], across.flip(1), across)
    down = weights(boxes.top, boxes.height, pixels.shape[2], size[0], smooth)
    with torch.autocast(pixels.device.type, enabled=False):
        narrow = levels(torch.bmm(pixels.flatten(1, 2).float(), across.mT)).unflatten(1, pixels.shape[1:3])
        return levels(torch.matmul(down[:, None], narrow))


def shift(pixels: Tensor, top: Tensor, left: Tensor, mirror: Tensor, fill: Tensor) -> Tensor:
    """Each image moved by whole pixels, ``fill`` beyond its edges, then mirrored where asked: float32 ``(B, 3, H, W)``."""
    batch, _, height, width = pixels.shape
    rows = torch.arange(height, device=pixels.device) + top[:, None]
    columns = torch.arange(width, device=pixels.device)
    columns = torch.where(mirror[:, None], width - 1 - columns, columns) + left[:, None]
    inside = ((rows >= 0) & (rows < height))[:, :, None] & ((columns >= 0) & (columns < width))[:, None, :]
    place = rows.clamp(0, height - 1)[:, :, None] * width + columns.clamp(0, width - 1)[:, None, :]
    moved = pixels.flatten(2).gather(2, place.view(batch, 1, -1).expand(-1, 3, -1)).view(pixels.shape)
    return torch.where(inside[:, None], moved.float(), fill)
