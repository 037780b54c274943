"""How a tensor holds a map: which axis is which, what lies before the grid, and the map (B, C, h, w) taken out of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spatially.observe.origin import APART, IMAGE, Points

#: The images of the pass in which layouts are found: two tell the axis of the batch apart from the others.
IMAGES = 2


@dataclass(frozen=True, eq=False)
class Layout:
    """One way to hold a map.

    Attributes:
        name: "nchw", "nhwc", "tokens" (batch, tokens, channels), or "windows" for any other order of positions.
        grid: rows and columns.
        prefix: tokens that lie nowhere in the image, such as the class token.
        channels: of the map.
        batch_axis: the axis that the images are on; ``share`` neighbours on it belong to one image.
        share: 1, or the number of windows of an image.
        channel_axis: the axis of the channels.
        order: the entry of each position, where they do not simply follow each other.
    """

    name: str
    grid: tuple[int, int]
    prefix: int
    channels: int
    batch_axis: int
    share: int
    channel_axis: int
    order: Tensor | None

    def map(self, tensor: Tensor) -> Tensor:
        """The map (batch, channels, rows, columns): a view, except from windows."""
        if self.name == "nchw":
            return tensor
        if self.name == "nhwc":
            return tensor.permute(0, 3, 1, 2)
        if self.name == "tokens":
            return tensor[:, self.prefix :].transpose(1, 2).unflatten(2, self.grid)
        channels_first = tensor.movedim(self.channel_axis, 0).unflatten(self._batch_axis_after, (-1, self.share))
        flat = channels_first.movedim(self._batch_axis_after, 0).flatten(2)
        assert self.order is not None
        return flat.index_select(2, self.order.to(flat.device)).unflatten(2, self.grid)

    @property
    def _batch_axis_after(self) -> int:
        """Where the images are once the channels stand first."""
        return self.batch_axis + (self.batch_axis < self.channel_axis)


def layout_of(points: Points) -> Layout | None:
    """The layout of a tensor whose elements come from ``points``; None if it does not hold a whole map of each image."""
    if len(points.shape) < 3:
        return None
    channel_axis = _channel_axis(points)
    if channel_axis is None:
        return None
    shape = points.shape
    numbers, grid = _numbers(points.apply(lambda part: part.select(channel_axis, 0)))
    for axis in range(numbers.ndim):
        inside = _of_one_image(numbers, axis, grid[0] * grid[1])
        if inside is not None:
            batch_axis = axis + (axis >= channel_axis)
            return _named(inside, shape, grid, batch_axis, channel_axis)
    return None


def _channel_axis(points: Points) -> int | None:
    """The axis along which nothing changes its place: the longest, if a grid of one row or column leaves several."""
    constant = [axis for axis in range(len(points.shape)) if not points.varies(axis)]
    return max(constant, key=lambda axis: (points.shape[axis], -axis), default=None)


def _numbers(points: Points) -> tuple[Tensor, tuple[int, int]]:
    """``image · rows · columns + row · columns + column`` of every element, -1 for what lies nowhere; the grid."""
    nowhere = points.row.isnan()
    image = torch.floor(points.row / IMAGE).nan_to_num(0.0)
    (down, rows), (across, columns) = (_rank(part, nowhere) for part in (points.row - image * IMAGE, points.column))
    numbers = (image.long() * rows + down) * columns + across
    return numbers.masked_fill(nowhere, -1), (rows, columns)


def _rank(part: Tensor, nowhere: Tensor) -> tuple[Tensor, int]:
    """Coordinates as whole numbers from 0 on, and how many differ."""
    values = part[~nowhere].unique()
    if not len(values):
        return torch.zeros_like(part, dtype=torch.long), 0
    values = values[torch.cat([values.new_ones(1, dtype=torch.bool), values.diff() > APART])]
    return torch.bucketize(part.nan_to_num(0.0).contiguous(), values - APART / 2, right=True) - 1, len(values)


def _of_one_image(numbers: Tensor, axis: int, area: int) -> Tensor | None:
    """Positions in the order in which an image holds them, if ``axis`` is the images' and both hold them alike."""
    size = numbers.shape[axis]
    if size % IMAGES or not area:
        return None
    first, second = numbers.unflatten(axis, (IMAGES, size // IMAGES)).movedim(axis, 0).flatten(1)
    present = first >= 0
    if not torch.equal(second, torch.where(present, first + area, first)):
        return None
    ordered = first[present].sort().values
    whole = len(ordered) == area and torch.equal(ordered, torch.arange(area, device=ordered.device))
    return first if whole else None


def _named(inside: Tensor, shape: torch.Size, grid: tuple[int, int], batch_axis: int, channel_axis: int) -> Layout:
    prefix = int((inside < 0).sum())
    following = torch.arange(len(inside) - prefix, device=inside.device)
    in_order = bool((inside[:prefix] < 0).all()) and torch.equal(inside[prefix:], following)
    share = shape[batch_axis] // IMAGES
    name = "windows"
    if in_order and (batch_axis, share) == (0, 1):
        if len(shape) == 4 and channel_axis == 1 and tuple(shape[2:]) == grid:
            name = "nchw"
        elif len(shape) == 4 and channel_axis == 3 and tuple(shape[1:3]) == grid:
            name = "nhwc"
        elif len(shape) == 3 and channel_axis == 2:
            name = "tokens"
    return Layout(
        name=name,
        grid=grid,
        prefix=prefix,
        channels=shape[channel_axis],
        batch_axis=batch_axis,
        share=share,
        channel_axis=channel_axis,
        order=inside.argsort(stable=True)[prefix:] if name == "windows" else None,
    )
