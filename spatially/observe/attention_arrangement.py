"""From where queries and keys come from to where their weights belong: which window, which head, which place in the image.

Attention is computed on tensors of leading axes, queries and keys, (…, n, m). One image of the batch has a number of windows
(one, for attention over the whole image) with a number of heads each. Leading elements of one image whose queries and keys
come from the same places are the heads of one window. Two images tell how the leading axes hold any number: the elements of
image 1 stand one step beyond those of image 0, on one axis.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import torch
from torch import Tensor

from spatially.observe.origin import APART, IMAGE, Points

Grid = tuple[int, int]
_TOKEN, _PADDING = -1, -2


class NotPlaced(Exception):
    """Why a layer's weights cannot be laid out in the image."""


@dataclass(frozen=True)
class Axis:
    """Where the n queries (or keys) of each window stand among all: first the prefix, then the grid row by row."""

    position: Tensor  # (windows, n); −1 for a query that is padding
    grid: Grid
    tokens: int  # class, distillation and register tokens
    padding: bool  # keys only: one more column, after the tokens, holds what padding gets

    @property
    def prefix(self) -> int:
        return self.tokens + self.padding

    @property
    def length(self) -> int:
        return self.prefix + self.grid[0] * self.grid[1]

    @property
    def in_order(self) -> bool:
        """Whether one window holds everything as it should stand."""
        whole = torch.arange(self.length, device=self.position.device)
        return self.position.shape == (1, self.length) and bool((self.position[0] == whole).all())


@dataclass(frozen=True)
class Arrangement:
    """Of one attention layer, at one input size, for any number of images."""

    lead: Tensor  # (leading axes, windows, heads): index of image 0
    axis: int  # the leading axis that holds the images
    step: int  # how far on it the next image is
    queries: Axis
    keys: Axis
    reach: int  # how many positions a query sees at most

    @property
    def windows(self) -> int:
        return self.lead.shape[1]

    @property
    def heads(self) -> int:
        return self.lead.shape[2]

    @cached_property
    def follows(self) -> bool:
        """Whether the windows and heads of an image follow each other on the leading axes, and the images on the first."""
        sizes = [self.step, *(int(one.max()) + 1 for one in self.lead[1:])]
        if self.axis or prod(sizes) != self.windows * self.heads:
            return False
        number = torch.zeros_like(self.lead[0])
        for one, size in zip(self.lead, sizes, strict=True):
            number = number * size + one
        return bool((number.flatten() == torch.arange(number.numel(), device=number.device)).all())

    def pick(self, tensor: Tensor, images: range, batch: int) -> Tensor:
        """Of (leading axes, n, m): what belongs to some images of the batch, (images, windows, heads, n, m)."""
        if self.follows and images.step == 1:
            own = tensor if len(images) == batch else tensor[images.start * self.step : images.stop * self.step]
            return own.reshape(len(images), *self.lead.shape[1:], *tensor.shape[-2:])
        return tensor[self.index(torch.tensor(images, device=self.lead.device), batch)]

    def index(self, images: Tensor, batch: int) -> tuple[Tensor, ...]:
        """For each leading axis, the index of (image, window, head), of `images` among `batch`."""
        found = [one.expand(len(images), -1, -1) for one in self.lead]
        outer, inner = self.lead[self.axis] // (2 * self.step), self.lead[self.axis] % self.step
        found[self.axis] = (outer * batch + images.view(-1, 1, 1)) * self.step + inner
        return tuple(found)


def arrange(query: Points, key: Points) -> Arrangement:
    """From the origins of two images' queries (…, n) and keys (…, m)."""
    lead = query.shape[:-1]
    if not lead:
        raise NotPlaced("its queries and keys have no axis for images")
    queries, keys = (
        side.apply(lambda part: part.expand(*lead, part.shape[-1]).flatten(0, -2)) for side in (query, key)
    )
    image = _image(queries, keys)
    if (image == image[0]).all():
        raise NotPlaced("it is computed for one image at a time")
    query_position, query_grid, query_tokens = _positions(queries, image)
    key_position, key_grid, key_tokens = _positions(keys, image)
    _, window = torch.unique(torch.cat([query_position, key_position], 1), dim=0, return_inverse=True)
    count = int(window.max()) + 1
    window = _as_they_come(window, count)
    members = torch.bincount(image * count + window, minlength=2 * count)
    if (members != members[0]).any():
        raise NotPlaced("its windows have different numbers of heads")
    order = torch.argsort(image * count + window, stable=True).view(2, count, -1)
    index = torch.stack(torch.unravel_index(order, lead))  # (axes, 2, windows, heads)
    axis, step = _step(index)
    first = order[0, :, 0]
    padding = bool((key_position == _PADDING).any())
    if int((query_position[first] >= 0).sum()) != query_grid[0] * query_grid[1]:
        raise NotPlaced("a position asks several times")
    if count > 1 and query_tokens:
        raise NotPlaced("tokens without a place take part in several windows")
    return Arrangement(
        lead=index[:, 0],
        axis=axis,
        step=step,
        queries=_axis(query_position[first], query_grid, query_tokens, padding=False),
        keys=_axis(key_position[first], key_grid, key_tokens, padding=padding),
        reach=int((key_position >= 0).sum(1).max()),
    )


def _as_they_come(window: Tensor, count: int) -> Tensor:
    """The windows numbered in the order in which they first come up."""
    places = torch.arange(len(window), device=window.device)
    first = places.new_full((count,), len(window)).scatter_reduce(0, window, places, "amin")
    return first.argsort().argsort()[window]


def _image(queries: Points, keys: Points) -> Tensor:
    """Which of the two images each leading element belongs to."""
    rows = torch.cat([queries.row, keys.row], 1)
    number = torch.floor(rows / IMAGE)
    low = torch.where(number.isnan(), torch.inf, number).amin(1)
    high = torch.where(number.isnan(), -torch.inf, number).amax(1)
    if not torch.isfinite(low).all() or (low != high).any():
        raise NotPlaced("queries and keys are of several images, or of none")
    return low.long()


def _positions(points: Points, image: Tensor) -> tuple[Tensor, Grid, int]:
    """Numbers of the grid's places (leading, n), negative for what has none; the grid; how many tokens have no place."""
    row, column = points.row - image[:, None] * IMAGE, points.column
    nowhere = row.isnan()
    (down, height), (across, width) = (_ranks(part, nowhere) for part in (row, column))
    position = torch.where(nowhere, torch.where(column.isnan(), _PADDING, _TOKEN), down * width + across)
    if len(position[position >= 0].unique()) != height * width:
        raise NotPlaced("its positions are no grid")
    tokens = (position == _TOKEN).sum(1)
    if (tokens != tokens[0]).any():
        raise NotPlaced("its windows have different numbers of tokens without a place")
    return position, (height, width), int(tokens[0])


def _ranks(part: Tensor, nowhere: Tensor) -> tuple[Tensor, int]:
    """Coordinates as whole numbers: 0 for the smallest, the same for all that are less than `APART` from each other."""
    values = part[~nowhere].unique()  # sorted
    if not len(values):
        return torch.zeros_like(part, dtype=torch.long), 0
    steps = torch.cat([values.new_zeros(1, dtype=torch.bool), values.diff() > APART])
    starts = values[steps]
    ranks = torch.bucketize(part.nan_to_num(0.0), starts - APART / 2, right=True)
    return ranks, int(steps.sum()) + 1


def _axis(position: Tensor, grid: Grid, tokens: int, *, padding: bool) -> Axis:
    free = position == _TOKEN
    number = free.cumsum(1) - 1
    placed = torch.where(free, number, position + tokens + padding)
    return Axis(torch.where(position == _PADDING, tokens if padding else -1, placed), grid, tokens, padding)


def _step(index: Tensor) -> tuple[int, int]:
    apart = index[:, 1] - index[:, 0]
    (axes,) = torch.nonzero(apart.flatten(1).any(1), as_tuple=True)
    if len(axes) != 1:
        raise NotPlaced("its images are spread over several axes")
    axis = int(axes[0])
    step = int(apart[axis].flatten()[0])
    if step < 1 or (apart[axis] != step).any():
        raise NotPlaced("its images do not follow each other evenly")
    return axis, step


def grid_positions(points: Points) -> tuple[Tensor, Grid]:
    """Where the places of a whole map of two images (2, places) stand in its grid."""
    position, grid, tokens = _positions(points, torch.arange(2, device=points.row.device))
    if tokens or (position < 0).any() or (position[0] != position[1]).any():
        raise NotPlaced("its map holds what has no place")
    return position[0], grid
