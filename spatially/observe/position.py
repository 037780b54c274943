"""One embedding or bias of a model as labelled arrays, and places in a grid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isqrt
from typing import Any

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from spatially.errors import UserError

Grid = tuple[int, int]

MOST_PREFIX_TOKENS = 16


@dataclass(frozen=True, eq=False)
class Position:
    """One embedding or bias of a model.

    Attributes:
        name: path of the parameter or module that holds it.
        kind: absolute, sinusoidal, relative, gaussian, decomposed or rotary.
        layer: of how manieth attention layer with a bias it is; None for what belongs to no layer.
        grid: rows and columns it is for, of the image or of a window; of the queries, for a bias. None where it has none.
        key_grid: rows and columns of the keys, for a bias.
        arrays: everything it holds, labelled: ``embedding (y, x, channel)`` and ``prefix (token, channel)``; ``offsets
            (head, offset_y, offset_x)``, query minus key; and so on.
    """

    name: str
    kind: str
    grid: Grid | None
    arrays: Mapping[str, xr.DataArray]
    layer: int | None = None
    key_grid: Grid | None = None
    _pairs: xr.DataArray | None = field(default=None, repr=False)

    @property
    def is_bias(self) -> bool:
        """Whether it adds to attention logits, whatever the image is."""
        return self._pairs is not None or "offsets" in self.arrays

    def bias(self, query: Grid | None = None) -> xr.DataArray:
        """The bias of one query against all keys, (head, key_y, key_x); without one, of all queries:
        (head, query_y, query_x, key_y, key_x)."""
        if not self.is_bias or self.grid is None:
            raise UserError(
                f"{self.name} is {self.kind} and adds no bias to attention that is the same for every image"
            )
        if query is not None:
            row, column = check_place(query, self.grid, what="query")
            if self._pairs is not None:
                return self._pairs.isel(query_y=row, query_x=column)
            return self._of_query(row, column)
        if self._pairs is not None:
            return self._pairs
        height, width = self.grid
        each = [[self._of_query(row, column).values for column in range(width)] for row in range(height)]
        values = np.moveaxis(np.asarray(each), 2, 0)
        return xr.DataArray(values, dims=("head", "query_y", "query_x", "key_y", "key_x"), name="bias")

    def similarity(self, query: Grid) -> xr.DataArray:
        """The cosine of a patch's embedding with every patch's, (key_y, key_x): what an absolute embedding says of nearness."""
        if "embedding" not in self.arrays or self.grid is None:
            raise UserError(f"{self.name} is {self.kind} and holds no embedding of a grid of patches")
        row, column = check_place(query, self.grid, what="query")
        vectors = self.arrays["embedding"].values.astype(np.float64)
        lengths = np.linalg.norm(vectors, axis=-1)
        # A vector of nothing is like no other.
        cosines = vectors @ vectors[row, column] / np.maximum(lengths * lengths[row, column], np.finfo(np.float64).tiny)
        return xr.DataArray(cosines, dims=("key_y", "key_x"), name="similarity")

    def _of_query(self, row: int, column: int) -> xr.DataArray:
        """Row y of the keys stands at offset query − y: the table is read backwards, from the query's own end."""
        assert self.grid is not None
        height, width = self.grid
        table = self.arrays["offsets"].values
        seen = table[:, row : row + height, column : column + width][:, ::-1, ::-1]
        return xr.DataArray(seen, dims=("head", "key_y", "key_x"), name="bias")


def check_place(place: Sequence[int], grid: Grid, *, what: str) -> Grid:
    """A row and a column inside a grid."""
    if len(place) != 2 or any(isinstance(one, bool) or not isinstance(one, (int, np.integer)) for one in place):
        raise UserError(f"{what} must be a row and a column, two whole numbers, but came as {place!r}")
    row, column = int(place[0]), int(place[1])
    if not (0 <= row < grid[0] and 0 <= column < grid[1]):
        raise UserError(
            f"{what} {(row, column)} lies outside the grid: rows go from 0 to {grid[0] - 1}, columns to {grid[1] - 1}"
        )
    return row, column


def centre(grid: Grid) -> Grid:
    """The middle of a grid; of an even one the upper left of its central four.

    >>> centre((14, 14)), centre((7, 8))
    ((6, 6), (3, 3))
    """
    return (grid[0] - 1) // 2, (grid[1] - 1) // 2


def as_position(position: Any, *named: str) -> str | Grid:
    """A position as a user gives it: one of the names, or a row and a column, whichever a model then has."""
    if isinstance(position, str) and position in named:
        return position
    if not isinstance(position, str) and isinstance(position, Sequence) and len(position) == 2:
        return check_place(position, (1 << 31, 1 << 31), what="position")
    names = "".join(f"{name!r}, " for name in named)
    raise UserError(f"position must be {names}or a row and a column, but came as {position!r}")


def grid_of_tokens(tokens: int, size: Grid | None = None) -> tuple[int, Grid] | None:
    """How many prefix tokens, and which grid, so many tokens are: one of the image's proportions, else a square.

    >>> grid_of_tokens(197), grid_of_tokens(142, (224, 160)), grid_of_tokens(1)
    ((1, (14, 14)), (2, (14, 10)), None)
    """
    for height, width in (size or (1, 1), (1, 1)):
        for prefix in range(min(MOST_PREFIX_TOKENS, tokens - 4) + 1):
            rows = isqrt((tokens - prefix) * height // width)
            if rows and rows * rows * width == (tokens - prefix) * height and rows * width % height == 0:
                return prefix, (rows, rows * width // height)
    return None


def as_pair(value: Any) -> Grid | None:
    """Two sides, from one number or two."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value, value
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(side, int) for side in value):
        return value[0], value[1]
    return None


def as_array(tensor: Tensor) -> np.ndarray:
    return tensor.detach().to(device="cpu", dtype=torch.promote_types(tensor.dtype, torch.float32)).numpy().copy()


def labelled(values: np.ndarray, *dims: str) -> xr.DataArray:
    return xr.DataArray(values, dims=dims)
