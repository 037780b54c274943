"""One attention layer: what it is, and its weights in one forward pass."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from spatially.errors import UserError
from spatially.observe.attention_arrangement import Arrangement
from spatially.observe.attention_sources import Source

PART = 128 * 2**20  # bytes of weights that are computed at a time


@dataclass(frozen=True)
class Layer:
    """An attention layer, the same for every batch of one input size.

    Attributes:
        index: its number among the model's attention layers.
        name: path of the module in which it happens, e.g. "blocks.3.attn"; unique.
        kind: "global": every position sees all; "window": those of its own window; "neighbourhood": the square around
            itself; "class": the queries are tokens without a position.
        heads: number of heads.
        grid, key_grid: rows and columns of the queries and of the keys; (0, 0) where none has a position.
        prefix, key_prefix: tokens without a position (class, distillation, registers), first on the axes of queries and
            keys. Where padding takes part, one more column, the prefix's last, holds what it gets.
        reach: how many positions a query sees at most.
    """

    index: int
    name: str
    kind: str
    heads: int
    grid: tuple[int, int]
    key_grid: tuple[int, int]
    prefix: int
    key_prefix: int
    reach: int

    @property
    def shape(self) -> tuple[int, int, int]:
        """Heads, queries and keys of the weights."""
        queries, keys = self.grid[0] * self.grid[1], self.key_grid[0] * self.key_grid[1]
        return self.heads, self.prefix + queries, self.key_prefix + keys


class Weights:
    """A layer's attention weights for the images of a batch, computed when asked for; dead when the consumer returns.

    `weights[i]` is (heads, queries, keys) of image i, `weights.whole()` (B, heads, queries, keys) of all, and
    `weights.parts()` gives a few images at a time. The axes hold the prefix first, then the image row by row.
    """

    def __init__(self, layer: Layer, source: Source, arrangement: Arrangement, images: int) -> None:
        self.layer = layer
        self.arrangement = arrangement
        self._source: Source | None = source
        self._images = images

    def __len__(self) -> int:
        return self._images

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self._images, *self.layer.shape

    def __getitem__(self, image: int) -> Tensor:
        if not -self._images <= image < self._images:
            raise IndexError(f"image {image} of {self._images}")
        return self.whole(slice(image % self._images, image % self._images + 1))[0]

    def __iter__(self) -> Iterator[Tensor]:
        return (self[image] for image in range(self._images))

    def whole(self, images: slice = slice(None)) -> Tensor:
        """(B, heads, queries, keys) of all images, or of some."""
        local = self.local(images)
        queries, keys = self.arrangement.queries, self.arrangement.keys
        if queries.in_order and keys.in_order:
            return local[:, 0]
        # A query that is padding is written to a row beyond the last, and cut off.
        rows = torch.where(queries.position < 0, queries.length, queries.position)
        place = rows[:, :, None] * keys.length + keys.position[:, None]  # (windows, n, m)
        dense = local.new_zeros(len(local), self.layer.heads, (queries.length + 1) * keys.length)
        dense = dense.index_add(2, place.flatten(), local.transpose(1, 2).flatten(2))
        return dense.unflatten(2, (queries.length + 1, keys.length))[:, :, :-1]

    def parts(self, size: int = PART) -> Iterator[tuple[slice, Tensor]]:
        """The images' numbers and their weights, as many images at a time as `size` bytes hold."""
        heads, queries, keys = self.layer.shape
        for images in self._cut(heads * queries * keys, size):
            yield images, self.whole(images)

    def local(self, images: slice = slice(None)) -> Tensor:
        """(B, windows, heads, n, m) window by window; `arrangement` says where the queries and keys belong."""
        if self._source is None:
            raise UserError(
                "attention weights live while their consumer runs: keep what you need of them, not themselves"
            )
        return self._source.take(range(self._images)[images], self._images)

    def local_parts(self, size: int = PART) -> Iterator[tuple[slice, Tensor]]:
        """`local`, as many images at a time as `size` bytes hold."""
        windows, queries = self.arrangement.queries.position.shape
        keys = self.arrangement.keys.position.shape[1]
        for images in self._cut(windows * self.layer.heads * queries * keys, size):
            yield images, self.local(images)

    def release(self) -> None:
        self._source = None

    def _cut(self, numbers: int, size: int) -> Iterator[slice]:
        step = max(1, size // (4 * numbers))
        return (slice(first, min(first + step, self._images)) for first in range(0, self._images, step))
