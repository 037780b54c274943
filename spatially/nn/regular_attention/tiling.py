"""How an axis is cut into tiles of queries, and which span of keys each tile needs."""

from dataclasses import dataclass

import torch
from torch import Tensor

from spatially.nn.regular_attention.field import Field

LARGEST_TILE = 16
COPYING = 7  # copying a key costs about as much as its logits with this many queries squared (heads of 32, measured)


@dataclass(frozen=True)
class Tiling:
    """Tiles of `tile` queries along a field; the last one may reach over the end."""

    field: Field
    tile: int

    @property
    def tiles(self) -> int:
        """Number of tiles."""
        return -(-self.field.length // self.tile)

    @property
    def covered(self) -> int:
        """Queries in all tiles, those over the end included."""
        return self.tiles * self.tile

    @property
    def span(self) -> int:
        """Keys a tile needs."""
        return min(self.tile + self.field.window - 1, self.field.keys) if self.tiles > 1 else self.field.keys

    def _start(self, query: int) -> int:
        return self.field.starts[min(query, self.field.length - 1)]  # a query over the end does as the last one does

    @property
    def begins(self) -> tuple[int, ...]:
        """The first key of each tile's span."""
        last = self.field.keys - self.span
        return tuple(min(max(self._start(tile * self.tile), 0), last) for tile in range(self.tiles))

    def queries(self, device: torch.device | None = None) -> Tensor:
        """The queries of each tile: (tiles, queries)."""
        return torch.arange(self.covered, device=device).view(self.tiles, self.tile)

    def keys(self, device: torch.device | None = None) -> Tensor:
        """The keys of each tile's span: (tiles, keys)."""
        return torch.tensor(self.begins, device=device)[:, None] + torch.arange(self.span, device=device)

    @property
    def _kinds(self) -> tuple[tuple[tuple[int, ...], ...], tuple[int, ...]]:
        places = [
            tuple(self._start(tile * self.tile + query) - begin for query in range(self.tile))
            for tile, begin in enumerate(self.begins)
        ]
        distinct = tuple(dict.fromkeys(places))
        return distinct, tuple(distinct.index(place) for place in places)

    @property
    def patterns(self) -> tuple[int, ...]:
        """For each tile the number of its pattern: the first, the last and those between usually make three."""
        return self._kinds[1]

    def slots(self, device: torch.device) -> Tensor:
        """The slot of a query that each key of the span is, for each pattern: (patterns, queries, keys).

        A key outside the query's field has a negative number or one from `window` on.
        """
        starts = torch.tensor(self._kinds[0], device=device)
        return torch.arange(self.span, device=device) - starts[:, :, None]


def best(field: Field) -> Tiling:
    """The tiling of an axis with the least estimated work: logits, and copies of keys and values into the tiles."""
    chosen, least = Tiling(field, 1), float("inf")
    for tile in range(1, min(field.length, LARGEST_TILE) + 1):  # a plain loop: every `torch.compile` follows it
        tiling = Tiling(field, tile)
        work = tiling.tiles * tiling.span * (tile + COPYING)
        if work < least:
            chosen, least = tiling, work
    return chosen
