"""Random erasing (Zhong et al. 2020) as DeiT uses it: a rectangle of each drawn image becomes normal noise.

Its share of the area is drawn evenly from 2 % to a third, its proportions evenly in the logarithm from 0.3 to 1/0.3; the first
of ten tries whose sides are shorter than the image's is taken, and none where none fits. Applied after the normalisation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spatially import randomness

TRIES = 10
DRAWS = 2 * TRIES + 3
_AREA = (0.02, 1 / 3)
_PROPORTION = 0.3


def rectangles(uniform: Tensor, probability: float, height: int, width: int) -> Tensor:
    """Top, bottom, left and right of what is erased: float64 ``(B, 4)``, from uniform numbers ``(B, 23)``."""
    numbers = uniform.double()
    area = (_AREA[0] + (_AREA[1] - _AREA[0]) * numbers[:, :TRIES]) * height * width
    proportion = torch.exp((1 - 2 * numbers[:, TRIES : 2 * TRIES]) * math.log(_PROPORTION))
    tall, wide = torch.round(torch.sqrt(area * proportion)), torch.round(torch.sqrt(area / proportion))
    fits = (tall < height) & (wide < width)
    first = fits.int().argmax(1, keepdim=True)
    applied = fits.gather(1, first) & (numbers[:, -1:] < probability)
    tall, wide = tall.gather(1, first), wide.gather(1, first)
    top = torch.floor(numbers[:, 2 * TRIES, None] * (height - tall + 1))
    left = torch.floor(numbers[:, 2 * TRIES + 1, None] * (width - wide + 1))
    return torch.cat([top, top + tall, left, left + wide], dim=1) * applied


def inside(rectangle: Tensor, height: int, width: int) -> Tensor:
    """Which pixels lie in each rectangle: bool ``(B, height, width)``."""
    top, bottom, left, right = rectangle[:, :, None].unbind(1)
    rows = torch.arange(height, device=rectangle.device)
    columns = torch.arange(width, device=rectangle.device)
    return ((rows >= top) & (rows < bottom))[:, :, None] & ((columns >= left) & (columns < right))[:, None, :]


def erase(images: Tensor, rectangle: Tensor, state: Tensor, seed: int) -> Tensor:
    """Normalised images with their rectangles erased; the noise is drawn by (seed, state)."""
    channels, height, width = images.shape[1:]
    noise = randomness.normal(randomness.stream(seed, "erase noise"), state, (channels, height, width))
    return torch.where(inside(rectangle, height, width)[:, None], noise, images)
