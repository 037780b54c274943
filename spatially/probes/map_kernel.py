"""The Triton kernel of `map_numbers`: sums over some channels of one image, read once.

A map is read in segments of one period; segment i lies in row i // across, which turns it by so many places. The mean of
the first segment is taken off every value, so that squares of what hardly varies keep their digits.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 2048  # of a segment, in all channels of a program
UNROLLED = 4  # segments that are on their way at the same time
NUMBERS = 2  # sums before those of the waves: of squares, and of the logarithms at frequency 0

_COMPILED: dict[tuple[Any, ...], tuple[Any, tuple[Any, ...]]] = {}


def summed(map: Tensor, waves: Tensor, smallest: float) -> Tensor:
    """Of a map (batch, channels, rows, columns): (batch, blocks of channels, sums)."""
    batch, channels, rows, columns = map.shape
    period, bins = min(rows, columns), len(waves) // 2
    residues, size = (max(16, triton.next_power_of_2(length)) for length in (period, bins))
    block = min(128, ELEMENTS // residues)
    blocks = triton.cdiv(channels, block)
    steps = map.stride()
    if steps[2] != steps[3] * columns:
        map = map.contiguous()
        steps = map.stride()
    sums = torch.empty(batch, blocks, NUMBERS + size, device=map.device, dtype=torch.float32)
    # The launcher looks at every argument anew, which takes longer than the kernel: what it found is kept.
    key = (map.shape, steps, map.dtype, map.device, map.data_ptr() % 16)
    if key in _COMPILED and map.device.index == torch.cuda.current_device():
        launch, rest = _COMPILED[key]
        launch(map, waves, sums, *rest)
        return sums
    rest = (
        steps[0], steps[1], steps[3], blocks, channels, rows * columns, period, columns // period, bins, smallest,
        size, residues, block, UNROLLED, NUMBERS,
    )  # fmt: skip
    grid = (batch * blocks,)
    with torch.cuda.device_of(map):
        compiled = sum_channels[grid](map, waves, sums, *rest, num_warps=4)
    if compiled is not None:  # the interpreter compiles nothing
        if len(_COMPILED) > 256:
            _COMPILED.clear()
        _COMPILED[key] = compiled[(*grid, 1, 1)], rest
    return sums


@triton.jit
def sum_channels(
    maps, waves, sums, image_step, channel_step, position_step, blocks, channels, positions, period, across, bins, smallest,
    SIZE: tl.constexpr, RESIDUES: tl.constexpr, CHANNELS: tl.constexpr, UNROLLED: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    channel = program % blocks * CHANNELS + tl.arange(0, CHANNELS)
    taken = channel < channels
    maps += (program // blocks).to(tl.int64) * image_step + channel[:, None] * channel_step
    residue, bin = tl.arange(0, RESIDUES), tl.arange(0, SIZE)
    here = taken[:, None] & (residue < period)[None, :]
    one = tl.load(maps, mask=taken[:, None], other=0.0).to(tl.float32)
    rest = tl.load(maps + residue[None, :] * position_step, mask=here, other=0.0).to(tl.float32) - one
    shift = one + (tl.sum(tl.where(here, rest, 0.0), 1) / period)[:, None]
    added = tl.zeros((CHANNELS, RESIDUES), tl.float32)
    squares = tl.zeros((CHANNELS, RESIDUES), tl.float32)
    segments = positions // period
    for first in range(0, segments, UNROLLED):
        for number in tl.static_range(UNROLLED):
            segment = first + number
            turned = residue - segment // across % period
            place = segment * period + tl.where(turned < 0, turned + period, turned)
            there = here & (place < positions)[None, :]
            value = tl.load(maps + place[None, :] * position_step, mask=there, other=0.0).to(tl.float32)
            rest = tl.where(there, value - shift, 0.0)
            added += rest
            squares += rest * rest
    total = tl.sum(added, 1)
    # What all residues have in common no wave sees.
    level = tl.where(here, added - (total / period)[:, None], 0.0)
    cosine_bins = waves + bin[None, :] * period + residue[:, None]
    waving = (bin < bins)[None, :] & (residue < period)[:, None]
    cosines = tl.load(cosine_bins, mask=waving, other=0.0)
    sines = tl.load(cosine_bins + bins * period, mask=waving, other=0.0)
    # Three products of shorter numbers: as exact as one of single precision, by the matrix units.
    real = tl.dot(level, cosines, input_precision="tf32x3")
    imaginary = tl.dot(level, sines, input_precision="tf32x3")
    sums += program.to(tl.int64) * (NUMBERS + SIZE)
    spread = tl.sum(squares, 1) - total * total / positions
    tl.store(sums, tl.sum(tl.where(spread < 0, 0.0, spread)))  # a maximum would hide what is no number
    lowest = tl.abs(total + tl.sum(shift, 1) * positions) + smallest
    tl.store(sums + 1, tl.sum(tl.where(taken, tl.log(lowest), 0.0)))
    logarithms = tl.log(tl.sqrt(real * real + imaginary * imaginary) + smallest)
    tl.store(sums + NUMBERS + bin, tl.sum(tl.where(taken[:, None], logarithms, 0.0), 0))
