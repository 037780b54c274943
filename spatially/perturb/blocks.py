r"""Random block shuffling and masking (Xu, sections 4.1 and 4.2).

An image is cut into whole blocks of k×k pixels from the top left; a remainder strip at the right and bottom stays as it
is. Of the n whole blocks, :math:`\operatorname{round}(\alpha n)` are chosen without replacement. Shuffling permutes the
chosen blocks uniformly (a block may stay where it is); masking replaces them by Gaussian noise with the image's own mean
and standard deviation in each channel.

The draw of an image is a pure function of (seed, image number, kind, k). It does not depend on α: the chosen sets are
nested in α, so that a curve over α follows the same image as it falls apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from spatially import randomness
from spatially.perturb.check import check_block, check_images, check_index, check_ratio
from spatially.perturb.pixels import as_float

# Pixel sums are taken over whole numbers in units of 2⁻²⁰, so that their order, and with it the device, does not matter.
_UNIT = 1 << 20
_SLICE_ON_GPU = 128  # images at a time where each operation costs a launch


def shuffle_blocks(images: Tensor, *, block: int, ratio: float, index: Tensor | Sequence[int], seed: int = 0) -> Tensor:
    """Permute a share ``ratio`` of the ``block``×``block`` blocks of each image.

    >>> images = torch.rand(2, 3, 32, 32)
    >>> shuffled = shuffle_blocks(images, block=8, ratio=0.5, index=[0, 1])
    >>> bool((shuffled.flatten().sort().values == images.flatten().sort().values).all())
    True
    """
    check_images(images)
    return draw_blocks(images, kind="shuffle", block=block, index=index, seed=seed).shuffle(ratio)


def mask_blocks(
    images: Tensor,
    *,
    block: int,
    ratio: float,
    index: Tensor | Sequence[int],
    seed: int = 0,
    clip: bool = False,
) -> Tensor:
    """Replace a share ``ratio`` of the blocks by noise with the image's mean and deviation, per channel.

    The noise may leave 0..1, as the definition says; ``clip=True`` cuts it.
    """
    check_images(images)
    return draw_blocks(images, kind="mask", block=block, index=index, seed=seed).mask(ratio, clip=clip)


def draw_blocks(images: Tensor, *, kind: str, block: int, index: Tensor | Sequence[int], seed: int = 0) -> Blocks:
    """The draw for a batch, from which every ratio is made: a sweep over α draws once.

    Images may also come as bytes, a quarter of the memory; what is made of them is float32 in 0..1.
    """
    if images.dtype != torch.uint8:
        check_images(images)
    block = check_block(block, height=images.shape[2], width=images.shape[3])
    numbers = check_index(index, count=len(images), device=images.device)
    return Blocks(images=images, kind=kind, block=block, index=numbers, seed=seed)


@dataclass(frozen=True, eq=False)
class Blocks:
    """A batch of images with the order in which their blocks fall to shuffling or masking as α grows."""

    images: Tensor
    kind: str
    block: int
    index: Tensor
    seed: int

    @property
    def grid(self) -> tuple[int, int]:
        """Whole blocks in each column and each row."""
        return self.images.shape[2] // self.block, self.images.shape[3] // self.block

    @property
    def count(self) -> int:
        """Whole blocks in an image."""
        return self.grid[0] * self.grid[1]

    @property
    def covered(self) -> float:
        """The share of the image's pixels that whole blocks cover."""
        return self.count * self.block**2 / (self.images.shape[2] * self.images.shape[3])

    def chosen(self, ratio: float) -> int:
        """How many blocks a ratio chooses: round(α·n)."""
        return round(check_ratio(ratio) * self.count)

    def _bits(self, purpose: str) -> Tensor:
        return randomness.element_bits(self._stream(purpose), self.index, self.count)

    def _stream(self, purpose: str) -> int:
        return randomness.stream(self.seed, self.kind, purpose, self.block)

    @cached_property
    def order(self) -> Tensor:
        """Block numbers in the order in which they are chosen, ``(B, n)``."""
        return self._bits("order").argsort(dim=1, stable=True)

    @cached_property
    def _destiny(self) -> Tensor:
        """A second number for each block, in the order of choice: sorting it permutes whatever is chosen."""
        return self._bits("permutation").gather(1, self.order)

    @cached_property
    def _levels(self) -> Tensor:
        """The noise before it is scaled, for every pixel, in its compact form."""
        levels = torch.empty(self.images.shape, dtype=torch.int16, device=self.images.device)
        for rows in self._slices():
            levels[rows] = randomness.normal_levels(self._stream("noise"), self.index[rows], (*self.images.shape[1:],))
        return levels

    @cached_property
    def _statistics(self) -> tuple[Tensor, Tensor]:
        parts = [channel_statistics(as_float(self.images[rows])) for rows in self._slices()]
        mean, deviation = zip(*parts, strict=True)
        return torch.cat(mean), torch.cat(deviation)

    def _noise(self, rows: slice) -> Tensor:
        """Noise with the images' own mean and deviation, as if every block were masked."""
        mean, deviation = self._statistics
        unit = randomness.normal_values(self._levels[rows]).to(mean.dtype)
        # Two roundings, one an operation: a fused multiply-add would differ between devices.
        return unit.mul_(deviation[rows]).add_(mean[rows])

    @cached_property
    def _kept_noise(self) -> Tensor:
        """The noise of all images, made once for all ratios, where memory is plenty and time is not."""
        noise = torch.cat([self._noise(rows) for rows in self._slices()])
        del self.__dict__["_levels"]
        return noise

    def _slices(self) -> Iterator[slice]:
        """A few images at a time: the 64-bit numbers behind the noise take several times the images' own memory."""
        count = len(self.images)
        step = max(1, count // 32) if self.images.device.type == "cpu" else _SLICE_ON_GPU
        return (slice(first, first + step) for first in range(0, count, step))

    def source(self, ratio: float) -> Tensor:
        """The block that each place shows after shuffling, ``(B, n)``."""
        chosen = self.chosen(ratio)
        places = self.order[:, :chosen]
        permutation = self._destiny[:, :chosen].argsort(dim=1, stable=True)
        identity = torch.arange(self.count, device=places.device).expand(len(places), -1)
        return identity.scatter(1, places, places.gather(1, permutation))

    def masked(self, ratio: float) -> Tensor:
        """Which blocks are masked, bool ``(B, n)``."""
        places = self.order[:, : self.chosen(ratio)]
        return torch.zeros(len(places), self.count, dtype=torch.bool, device=places.device).scatter(1, places, True)

    def shuffle(self, ratio: float) -> Tensor:
        """The images with a share ``ratio`` of their blocks permuted."""
        if self.chosen(ratio) == 0:
            return self._plain()
        # Moving whole blocks is seven times faster on a GPU, moving rows of blocks ten times faster on a CPU.
        move = self.move_rows if self.images.device.type == "cpu" else self.move_blocks
        shuffled = as_float(move(self.source(ratio)))
        if self.covered == 1:
            return shuffled
        result = self._plain()
        result[:, :, : shuffled.shape[2], : shuffled.shape[3]] = shuffled
        return result

    def move_blocks(self, source: Tensor) -> Tensor:
        """The whole blocks, each from where ``source`` says, by an index over blocks."""
        (rows, columns), k = self.grid, self.block
        whole = self.images[:, :, : rows * k, : columns * k]
        blocks = whole.unflatten(3, (columns, k)).unflatten(2, (rows, k)).permute(0, 2, 4, 1, 3, 5)
        image = torch.arange(len(source), device=source.device)[:, None]
        moved = blocks[image, source // columns, source % columns].unflatten(1, (rows, columns))
        return moved.permute(0, 3, 1, 4, 2, 5).reshape(whole.shape)

    def move_rows(self, source: Tensor) -> Tensor:
        """The same by an index over rows of blocks, k pixels that lie together in memory."""
        (rows, columns), k = self.grid, self.block
        batch, channels = self.images.shape[:2]
        line = torch.arange(k, device=source.device)[:, None]
        # From block numbers (B, rows, 1, columns) to numbers of rows of blocks within a channel (B, rows, k, columns).
        within = source.view(batch, rows, 1, columns)
        within = (within // columns * k + line) * columns + within % columns
        plane = torch.arange(batch * channels, device=source.device).view(batch, channels, 1, 1, 1)
        index = within[:, None] + plane * (rows * k * columns)
        return self._rows.index_select(0, index.flatten()).view(batch, channels, rows * k, columns * k)

    @cached_property
    def _rows(self) -> Tensor:
        """The rows of every whole block, ``(B·C·height·columns, k)``."""
        height, width = (side * self.block for side in self.grid)
        return self.images[:, :, :height, :width].reshape(-1, self.block)

    def mask(self, ratio: float, *, clip: bool = False) -> Tensor:
        """The images with a share ``ratio`` of their blocks replaced by noise."""
        result = self._plain()
        if self.chosen(ratio) == 0:
            return result
        blocks = self.masked(ratio).view(-1, 1, *self.grid)
        height, width = (side * self.block for side in self.grid)
        on_cpu = self.images.device.type == "cpu"
        for rows in self._slices():
            noise = (self._noise(rows) if on_cpu else self._kept_noise[rows])[:, :, :height, :width]
            pixels = blocks[rows].repeat_interleave(self.block, dim=2).repeat_interleave(self.block, dim=3)
            target = result[rows, :, :height, :width]
            torch.where(pixels, noise.clamp(0, 1) if clip else noise, target, out=target)
        return result

    def _plain(self) -> Tensor:
        """A copy of the images as they are, in 0..1."""
        return as_float(self.images) if self.images.dtype == torch.uint8 else self.images.clone()

    def perturb(self, ratio: float) -> Tensor:
        """Shuffle or mask, as the draw's kind says."""
        return self.shuffle(ratio) if self.kind == "shuffle" else self.mask(ratio)


def channel_statistics(images: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation (over all pixels) of each image and channel, ``(B, C, 1, 1)``.

    Pixels are rounded to whole multiples of 2⁻²⁰ and summed as integers, whose sums are the same in every order; what
    follows is one correctly rounded operation at a time.
    """
    values = images if images.dtype == torch.float64 else images.float()  # half precision cannot count so far
    levels = (values * _UNIT).round().to(torch.int64)
    pixels = images.shape[2] * images.shape[3]
    mean = levels.sum(dim=(2, 3), keepdim=True).double() / pixels
    square = (levels * levels).sum(dim=(2, 3), keepdim=True).double() / pixels
    deviation = (square - mean * mean).clamp(min=0).sqrt()
    return (mean / _UNIT).to(images.dtype), (deviation / _UNIT).to(images.dtype)
