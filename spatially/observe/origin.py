"""Where in the image the numbers of a tensor come from, and what becomes of that when they are moved, chosen or mixed.

Every element of a tensor has an origin: an image of the batch and a point in it, in pixels. Linear layers and
convolutions mix channels of one place; their output comes from the mean of the points they mixed. Class tokens come from
nowhere, and so does padding; the two are told apart. A product of queries and keys has two origins, one of each.

Held as numbers of the tensor's shape: ``IMAGE``·image + y and x; y is NaN for what comes from nowhere, and then x is 0 for
a token and NaN for padding. Axes along which an origin does not change have stride 0 and take no memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import nan
from typing import Any

import torch
from torch import Tensor

IMAGE = float(2**20)  # no image is as high
APART = 0.25  # pixels: nearer origins are the same


@dataclass(frozen=True)
class Points:
    """One origin for each element of a tensor."""

    row: Tensor
    column: Tensor

    @property
    def shape(self) -> torch.Size:
        return self.row.shape

    @classmethod
    def of_images(cls, images: Tensor) -> Points:
        """(B, C, H, W): every pixel comes from itself."""
        batch, _, height, width = images.shape
        number = torch.arange(batch, device=images.device, dtype=torch.float64) * IMAGE
        rows = torch.arange(height, device=images.device, dtype=torch.float64) + 0.5
        columns = torch.arange(width, device=images.device, dtype=torch.float64) + 0.5
        points = cls((number[:, None] + rows).view(batch, 1, height, 1), columns.view(1, 1, 1, width))
        return points.apply(lambda part: part.expand(images.shape))

    @classmethod
    def nowhere(cls, like: Tensor, *, padding: bool) -> Points:
        row = torch.full((1,) * like.ndim, nan, device=like.device, dtype=torch.float64)
        column = row if padding else torch.zeros_like(row)
        return cls(row.expand(like.shape), column.expand(like.shape))

    def apply(self, function: Callable[..., Any]) -> Any:
        """Move the origins as `function` moves a tensor; a list of points where it gives several."""
        row, column = function(self.row), function(self.column)
        if isinstance(row, Tensor):
            return Points(row, column)
        return [Points(*pair) for pair in zip(row, column, strict=True)]

    def mean(self, *axes: int) -> Points:
        """The origin of what mixes these axes, which stay with length 1. What comes from nowhere does not count."""
        points = self.thin(*axes)
        axes = tuple(axis for axis in axes if points.shape[axis] > 1)
        if not axes:
            return points
        somewhere = ~points.row.isnan()
        count = somewhere.sum(axes, keepdim=True)
        row = points.row.nan_to_num(0.0).sum(axes, keepdim=True) / count
        column = torch.where(somewhere, points.column, 0.0).sum(axes, keepdim=True) / count
        token = (~points.column.isnan()).sum(axes, keepdim=True) > 0
        return Points(row, torch.where(count > 0, column, torch.where(token, 0.0, nan)))

    def thin(self, *axes: int) -> Points:
        """Length 1 along those of the axes (all, when none are named) that hold one number again and again."""
        row, column = self.row, self.column
        for axis in axes or range(row.ndim):
            if row.stride(axis) == 0 and column.stride(axis) == 0 and row.shape[axis] > 1:
                row, column = row.narrow(axis, 0, 1), column.narrow(axis, 0, 1)
        return Points(row, column)

    def expand(self, shape: torch.Size | tuple[int, ...]) -> Points:
        return Points(self.row.expand(shape), self.column.expand(shape))

    def varies(self, axis: int) -> bool:
        """Whether two elements along the axis lie at different points of the image."""
        points = self.thin()
        if points.shape[axis] == 1:
            return False
        somewhere = ~points.row.isnan()
        for part in (points.row, points.column):
            low = torch.where(somewhere, part, torch.inf).amin(axis)
            high = torch.where(somewhere, part, -torch.inf).amax(axis)
            if bool((high - low > APART).any()):
                return True
        return False

    def spread(self) -> float:
        """How much the origins differ within their images; 0 when all is from one point or from nowhere."""
        points = self.thin()
        somewhere = ~points.row.isnan()
        if int(somewhere.sum()) < 2:
            return 0.0
        return float((points.row[somewhere] % IMAGE).var() + points.column[somewhere].var())


@dataclass(frozen=True)
class Origin:
    """What is known of a tensor: where its elements come from; for products of queries and keys, where both do."""

    points: Points
    key: Points | None = None

    @property
    def shape(self) -> torch.Size:
        return self.points.shape

    @property
    def sides(self) -> list[Points]:
        return [self.points] if self.key is None else [self.points, self.key]

    @property
    def apart(self) -> bool:
        """Whether queries and keys lie on axes of their own, as those of weights do."""
        key = self.key
        return key is not None and any(self.points.varies(axis) != key.varies(axis) for axis in range(len(self.shape)))

    @property
    def alone(self) -> Origin:
        """One origin: of two, that which says more."""
        return Origin(max(self.sides, key=Points.spread))

    def map(self, function: Callable[[Points], Points]) -> Origin:
        return Origin(*(function(side) for side in self.sides))

    def apply(self, function: Callable[..., Any]) -> Any:
        """Move the origins as `function` moves a tensor; a list where it gives several tensors."""
        moved = [side.apply(function) for side in self.sides]
        if isinstance(moved[0], Points):
            return Origin(*moved)
        return [Origin(*sides) for sides in zip(*moved, strict=True)]


def choose(origins: list[Origin], shape: torch.Size) -> Origin:
    """The origin of what is computed element by element from several: of the one that says most.

    Whole tensors before broadcast ones, pairs before single points, then whichever lies most spread out, then the first. What
    is added to a map is a map: a pair counts as one beside single points only where it has queries and keys.
    """
    whole = [origin for origin in origins if origin.shape.numel() == shape.numel()] or origins
    rich = [origin for origin in whole if origin.key is not None]
    if len(rich) < len(whole):
        rich = [origin for origin in rich if origin.apart] or [origin.alone for origin in whole]
    best = rich[0]
    if any(origin is not best for origin in rich):
        spreads = [origin.points.spread() for origin in rich]
        best = rich[max(range(len(rich)), key=lambda number: (round(spreads[number], 3), -number))]
    return best.map(lambda points: points.expand(shape))
