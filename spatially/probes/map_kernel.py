"""The Triton kernel of `map_numbers`: sums over some channels of one image."""

import torch
import triton
import triton.language as tl
from torch import Tensor

CHANNELS, POSITIONS = 64, 32  # of a program, and of one of its steps
NUMBERS = 2  # sums before those of the waves: of squares, and of the logarithms at frequency 0


def summed(maps: Tensor, waves: Tensor, smallest: float) -> Tensor:
    """Of maps (batch, channels, positions): (batch, blocks of channels, sums)."""
    batch, channels, positions = maps.shape
    bins = len(waves) // 2
    size = max(16, triton.next_power_of_2(bins))
    blocks = triton.cdiv(channels, CHANNELS)
    sums = torch.empty(batch, blocks, NUMBERS + size, device=maps.device, dtype=torch.float32)
    sum_channels[(batch * blocks,)](
        maps, waves, sums, *maps.stride(), blocks, channels, positions, bins, smallest,
        SIZE=size, CHANNELS=CHANNELS, POSITIONS=POSITIONS, NUMBERS=NUMBERS, num_warps=4, num_stages=2,
    )  # fmt: skip
    return sums


@triton.jit
def sum_channels(
    maps, waves, sums, image_step, channel_step, position_step, blocks, channels, positions, bins, smallest,
    SIZE: tl.constexpr, CHANNELS: tl.constexpr, POSITIONS: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    channel = program % blocks * CHANNELS + tl.arange(0, CHANNELS)
    taken = channel < channels
    maps += (program // blocks).to(tl.int64) * image_step + channel[:, None] * channel_step
    bin, step = tl.arange(0, SIZE), tl.arange(0, POSITIONS)
    cosine_bins = waves + bin[None, :] * positions
    total = tl.zeros((CHANNELS,), tl.float32)
    for first in range(0, positions, POSITIONS):
        place = first + step
        here = taken[:, None] & (place < positions)[None, :]
        total += tl.sum(tl.load(maps + place[None, :] * position_step, mask=here, other=0.0).to(tl.float32), 1)
    mean = total / positions
    squares = tl.zeros((CHANNELS,), tl.float32)
    real = tl.zeros((CHANNELS, SIZE), tl.float32)
    imaginary = tl.zeros((CHANNELS, SIZE), tl.float32)
    for first in range(0, positions, POSITIONS):
        place = first + step
        here = taken[:, None] & (place < positions)[None, :]
        rest = tl.load(maps + place[None, :] * position_step, mask=here, other=0.0).to(tl.float32) - mean[:, None]
        rest = tl.where(here, rest, 0.0)
        squares += tl.sum(rest * rest, 1)
        waving = (bin < bins)[None, :] & (place < positions)[:, None]
        cosines = tl.load(cosine_bins + place[:, None], mask=waving, other=0.0)
        sines = tl.load(cosine_bins + bins * positions + place[:, None], mask=waving, other=0.0)
        # Three products of shorter numbers: as exact as one of single precision, by the matrix units.
        real = tl.dot(rest, cosines, acc=real, input_precision="tf32x3")
        imaginary = tl.dot(rest, sines, acc=imaginary, input_precision="tf32x3")
    sums += program.to(tl.int64) * (NUMBERS + SIZE)
    tl.store(sums, tl.sum(squares))
    tl.store(sums + 1, tl.sum(tl.where(taken, tl.log(tl.abs(mean) * positions + smallest), 0.0)))
    logarithms = tl.log(tl.sqrt(real * real + imaginary * imaginary) + smallest)
    tl.store(sums + NUMBERS + bin, tl.sum(tl.where(taken[:, None], logarithms, 0.0), 0))
