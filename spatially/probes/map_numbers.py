"""The numbers of a map's frequencies and of its variance in one reading of the map, on a GPU.

Written out, the two take a dozen operations for each of a model's points, and read the map five times; here they take one
kernel. A program sums up some channels of one image: the mean over positions, then, of what is left without it, the squares
and the products with the waves. See `fourier` and `variance` for what is measured.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST = 1e-6
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class MapNumbers(NamedTuple):
    """Of each image: Δ at each frequency (batch, frequencies), and the variance over positions (batch,)."""

    log_amplitude: Tensor
    variance: Tensor


@cache
def available() -> bool:
    """Whether Triton is there."""
    try:
        import triton  # noqa: F401
    except ImportError:
        return False
    return True


def takes(map: Tensor) -> bool:
    """Whether the kernel can read a map (batch, channels, rows, columns)."""
    return map.is_cuda and map.dtype in DTYPES and map.shape[2] * map.shape[3] > 1 and available()


def map_numbers(map: Tensor, waves: Tensor) -> MapNumbers:
    """Both, from the map and the waves (cosines, then sines, of every frequency but 0; float32)."""
    from spatially.probes.map_kernel import NUMBERS, summed

    _, channels, rows, columns = map.shape
    bins, positions = len(waves) // 2, rows * columns
    sums = summed(map.flatten(2), waves, SMALLEST).sum(1)
    lowest, others = sums[:, 1:NUMBERS] / channels, sums[:, NUMBERS : NUMBERS + bins] / channels
    log_amplitude = torch.cat([lowest - lowest, others - lowest], dim=1)
    return MapNumbers(log_amplitude, sums[:, 0] / (channels * (positions - 1)))
