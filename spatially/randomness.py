r"""Randomness as a pure function of (seed, purpose, image index, element), the same bits on every device.

A stream is named by a seed and a purpose; every image has its own 64-bit state in it, and element ``e`` of image ``i`` is

.. math:: \operatorname{mix}(\operatorname{mix}(\mathrm{stream} + \gamma\,(i + 1)) + \gamma\,(e + 1)) \bmod 2^{64},

with ``mix`` the finaliser of SplitMix64 (Steele, Lea and Flood 2014) and γ its odd constant. Only integer operations take
part, so CPU and CUDA agree bit for bit, and no draw depends on the batch, the worker or the process that made it.
"""

from functools import cache
from hashlib import blake2b
from statistics import NormalDist

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIERS = (0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_SHIFTS = (30, 27, 31)
_LEVELS = 1 << 16


def _signed(value: int) -> int:
    """The 64 bits of ``value`` as the signed integer that torch stores."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _shift_right(bits: Tensor, places: int) -> Tensor:
    """Logical right shift: torch's own keeps the sign."""
    return (bits >> places) & ((1 << (64 - places)) - 1)


def _mix(bits: Tensor) -> Tensor:
    bits = (bits ^ _shift_right(bits, _SHIFTS[0])) * _signed(_MULTIPLIERS[0])
    bits = (bits ^ _shift_right(bits, _SHIFTS[1])) * _signed(_MULTIPLIERS[1])
    return bits ^ _shift_right(bits, _SHIFTS[2])


def stream(seed: int, *purpose: str | int) -> int:
    """The 64-bit name of a stream, for example ``stream(0, "shuffle", 16)``."""
    text = repr((int(seed), *purpose)).encode()
    return int.from_bytes(blake2b(text, digest_size=8).digest(), "little")


def image_bits(key: int, index: Tensor) -> Tensor:
    """One 64-bit number an image: int64 ``(B,)``, from the images' numbers ``(B,)``."""
    return _mix((index.to(torch.int64) + 1) * _signed(_GAMMA) + _signed(key))


def element_bits(key: int, index: Tensor, count: int) -> Tensor:
    """``count`` 64-bit numbers an image: int64 ``(B, count)``."""
    steps = torch.arange(1, count + 1, device=index.device) * _signed(_GAMMA)
    return _mix(image_bits(key, index)[:, None] + steps)


def combine(bits: Tensor, keys: Tensor) -> Tensor:
    """One 64-bit number for each pair of ``bits`` ``(B,)`` and ``keys`` ``(K,)``: int64 ``(B, K)``."""
    return _mix(bits[:, None] + keys)


def keys_of(seed: int, *purposes: str | int, count: int, device: torch.device | str = "cpu") -> Tensor:
    """``count`` streams of one purpose as the keys that :func:`combine` takes."""
    return torch.tensor([_signed(stream(seed, *purposes, number)) for number in range(count)], device=device)


def fraction(bits: Tensor) -> Tensor:
    """Float32 numbers from 0 up to but not including 1, on 2²⁴ levels, from the upper bits: the same on every device."""
    return _shift_right(bits, 40).to(torch.float32) * (1 / (1 << 24))


def below(bits: Tensor, bound: int) -> Tensor:
    """Integers 0 … bound − 1 from the upper 32 of 64 bits (bias below bound / 2³²)."""
    return (_shift_right(bits, 32) * bound) >> 32


def uniform(bits: Tensor) -> Tensor:
    """Values in 0..1, 1 left out, from the upper 53 of 64 bits: float64, exact on every device."""
    return _shift_right(bits, 11).to(torch.float64) * 2.0**-53


@cache
def _normal_table(device: torch.device) -> Tensor:
    """65,536 equally likely values of a standard normal variable, scaled to variance 1 exactly."""
    normal = NormalDist()
    upper = [normal.inv_cdf((level + 0.5) / _LEVELS) for level in range(_LEVELS // 2, _LEVELS)]
    deviation = (sum(value * value for value in upper) / len(upper)) ** 0.5
    half = torch.tensor(upper, dtype=torch.float64) / deviation
    return torch.cat([-half.flip(0), half]).to(torch.float32).to(device)


def normal(key: int, index: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """Standard normal noise, float32 ``(B, C, H, W)``, by inverse distribution function on 65,536 levels.

    A table look-up instead of a logarithm and a cosine, whose last bits differ between devices.
    """
    return normal_values(normal_levels(key, index, shape))


def normal_levels(key: int, index: Tensor, shape: tuple[int, int, int]) -> Tensor:
    """The levels of :func:`normal`, int16 ``(B, C, H, W)``: half the memory of the noise itself.

    Four channels share one 64-bit number, 16 bits each.
    """
    channels, height, width = shape
    levels = torch.empty(len(index), channels, height * width, dtype=torch.int16, device=index.device)
    for first in range(0, channels, 4):
        bits = element_bits(key + first, index, height * width)
        for part in range(min(4, channels - first)):
            levels[:, first + part] = (bits >> 16 * part).to(torch.int16)
    return levels.view(-1, channels, height, width)


def normal_values(levels: Tensor) -> Tensor:
    """The noise that :func:`normal_levels` stands for."""
    return _normal_table(levels.device)[levels.to(torch.int32) + _LEVELS // 2]
