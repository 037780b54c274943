"""Uniform numbers for every augmentation of an image, named by purpose, made by one hash.

An image's state in an epoch is one 64-bit number of (seed, epoch, image, repeat); number k of a purpose is a hash of that
state and of (seed, purpose, k). So what one augmentation draws does not change when another one is added, and an image is
augmented alike in every batch, by every process and on every device.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spatially import randomness


def states(seed: int, epoch: int, index: Tensor, repeat: Tensor | None = None) -> Tensor:
    """The state of each image in an epoch, int64 ``(B,)``; with repeated augmentation one for each repeat."""
    state = randomness.image_bits(randomness.stream(seed, "training", epoch), index)
    return state if repeat is None else state + randomness.image_bits(randomness.stream(seed, "repeat"), repeat)


class Draws:
    """So many numbers for each purpose; called with the images' states it gives them as float32 ``(B, count)``."""

    def __init__(self, seed: int, counts: dict[str, int], device: torch.device | str = "cpu") -> None:
        self._counts = {name: count for name, count in counts.items() if count}
        keys = [randomness.keys_of(seed, name, count=count, device=device) for name, count in self._counts.items()]
        self._keys = torch.cat(keys) if keys else torch.empty(0, dtype=torch.int64, device=device)

    def __call__(self, state: Tensor) -> dict[str, Tensor]:
        numbers = randomness.fraction(randomness.combine(state, self._keys))
        return dict(zip(self._counts, numbers.split(list(self._counts.values()), dim=1), strict=True))
