r"""Mixup and CutMix for whole batches, as timm's ``Mixup`` in its mode "batch", and the targets that go with them.

One draw a batch: whether to mix, which of the two, and λ ~ Beta(α, α) by the inverse of its distribution function. Each image x
is joined with its partner x′ at the opposite place of the batch. Mixup gives λ x + (1 − λ) x′. CutMix puts x′ into a rectangle
of :math:`\lfloor H\sqrt{1-\lambda}\rfloor × \lfloor W\sqrt{1-\lambda}\rfloor` pixels around a pixel drawn evenly, cut at
the image's edge, and λ becomes the share of pixels left. Targets are mixed alike, after smoothing: 1 − s + s/K for the class,
s/K for others.

The draws of all batches of an epoch are made at once on the host, so that making a batch never waits for the device.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from scipy.special import betaincinv
from torch import Tensor

from spatially import randomness

NOTHING = (1.0, 1.0, 0.0, 0.0, 0.0, 0.0)


def mixing(seed: int, epoch: int, steps: int, size: tuple[int, int], augmentation: Any) -> Tensor:
    """What is mixed in each batch, float32 ``(steps, 6)``: the target's λ, the pixels' λ, top, bottom, left, right."""
    table = np.tile(np.array(NOTHING), (steps, 1))
    if not (augmentation.mixup or augmentation.cutmix) or not steps:
        return torch.from_numpy(table).float()
    state = randomness.image_bits(randomness.stream(seed, "mix", epoch), torch.arange(steps))
    numbers = randomness.fraction(randomness.combine(state, randomness.keys_of(seed, "mix", count=5)))
    whether, which, ratio, down, across = numbers.double().numpy().T
    cut = which < augmentation.mix_switch
    if not (augmentation.mixup and augmentation.cutmix):
        cut = np.full(steps, not augmentation.mixup)
    alpha = np.where(cut, augmentation.cutmix, augmentation.mixup)
    own = betaincinv(alpha, alpha, ratio)
    top, bottom = _side(size[0], own, down)
    left, right = _side(size[1], own, across)
    left_over = 1 - (bottom - top) * (right - left) / (size[0] * size[1])
    box = np.stack([top, bottom, left, right], 1) * cut[:, None]
    rows = np.column_stack([np.where(cut, left_over, own), np.where(cut, 1.0, own), box])
    return torch.from_numpy(np.where((whether < augmentation.mix_probability)[:, None], rows, table)).float()


def _side(length: int, own: Any, place: Any) -> tuple[Any, Any]:
    """First and last of the pixels cut along one side."""
    cut = np.floor(length * np.sqrt(1 - own))
    centre = np.floor(place * length)
    return np.clip(centre - cut // 2, 0, length), np.clip(centre + (cut + 1) // 2, 0, length)


def mix(images: Tensor, row: Tensor) -> Tensor:
    """Each image joined with the one at the opposite place, as a row of :func:`mixing` says."""
    _, own, top, bottom, left, right = row.unbind()
    rows = torch.arange(images.shape[2], device=images.device)[:, None]
    columns = torch.arange(images.shape[3], device=images.device)
    inside = (rows >= top) & (rows < bottom) & (columns >= left) & (columns < right)
    weight = torch.where(inside, torch.zeros_like(own), own).to(images.dtype)
    return images * weight + images.flip(0) * (1 - weight)


def targets(labels: Tensor, classes: int, smoothing: float, row: Tensor | None = None) -> Tensor:
    """Soft targets, float32 ``(B, classes)``."""
    off = smoothing / classes
    own = torch.full((len(labels), classes), off, device=labels.device)
    own = own.scatter(1, labels[:, None], 1 - smoothing + off)
    return own if row is None else own * row[0] + own.flip(0) * (1 - row[0])
