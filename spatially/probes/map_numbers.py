r"""The numbers of a map's frequencies and of its variance in one reading of the map, on a GPU.

Along the half diagonal of a map of h rows and w columns, the shorter side p a divisor of the longer one, a wave's phase at
row y and column x is :math:`2\pi k\,(y + x)/p`: it depends on the residue :math:`r = (y + x) \bmod p` alone, so that

.. math:: \hat x_k = \sum_{r < p} e^{-2\pi i k r/p} \sum_{(y + x) \bmod p = r} x_{yx}.

A program of the kernel reads some channels of one image once, adds up what has the same residue, and transforms these p
sums; the squares are added up beside them. What is left to do, a mean over channels, is done for all of a model's points
together, after its pass: a dozen small operations at each of them would take longer than the model. See `fourier` and
`variance` for what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import ceil, pi
from typing import NamedTuple

import torch
from torch import Tensor

SMALLEST = 1e-6
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
LONGEST = 256  # period whose sums a program keeps


class MapNumbers(NamedTuple):
    """Of each image: Δ at each frequency (batch, frequencies), and the variance over positions (batch,)."""

    log_amplitude: Tensor
    variance: Tensor


class Sums(NamedTuple):
    """What the kernel leaves of a map: sums over blocks of channels (batch, blocks, numbers)."""

    sums: Tensor
    channels: int
    positions: int
    bins: int


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
    shorter, longer = sorted(map.shape[2:])
    fits = longer > 1 and longer % shorter == 0 and shorter <= LONGEST
    return map.is_cuda and map.dtype in DTYPES and fits and available()


def sum_up(map: Tensor) -> Sums:
    """Start the reading of a map; `finish` has its numbers."""
    from spatially.probes.map_kernel import summed

    _, channels, rows, columns = map.shape
    period = min(rows, columns)
    waves = _waves(period, map.device)
    return Sums(summed(map, waves, SMALLEST), channels, rows * columns, len(waves) // 2)


def finish(parts: Sequence[Sums]) -> list[MapNumbers]:
    """The numbers of each map, from what was summed up; maps whose sums look alike are finished together."""
    alike: dict[tuple[object, ...], list[int]] = {}
    for number, part in enumerate(parts):
        alike.setdefault((part.sums.shape, part.sums.device, *part[1:]), []).append(number)
    found: dict[int, MapNumbers] = {}
    for members in alike.values():
        _, channels, positions, bins = parts[members[0]]
        sums = torch.stack([parts[member].sums for member in members]).sum(2) / channels
        log_amplitude = sums[..., 1 : 2 + bins] - sums[..., 1:2]
        variance = sums[..., 0] / (positions - 1)
        found |= {member: MapNumbers(log_amplitude[at], variance[at]) for at, member in enumerate(members)}
    return [found[number] for number in range(len(parts))]


def map_numbers(map: Tensor) -> MapNumbers:
    """Both, of one map."""
    return finish([sum_up(map)])[0]


@lru_cache(maxsize=64)
def _waves(period: int, device: torch.device) -> Tensor:
    """Cosines, then sines, of every frequency but 0 at every residue: float32 (2·frequencies, period)."""
    turns = torch.arange(1, ceil(period / 2), dtype=torch.float64)[:, None] * torch.arange(period) / period
    angles = 2 * pi * turns
    with torch.inference_mode(False):
        return torch.cat([angles.cos(), angles.sin()]).to(device=device, dtype=torch.float32)
