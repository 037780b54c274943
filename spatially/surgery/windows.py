"""Swin's windows, cut from a map that is projected already, and squares around each query in their place.

Swin pads its map with zeros and projects window by window. A convolution must see the whole map, so the projection comes
first and the windows are cut from its queries, keys and values. Where there was a zero token before the projection there is
the projection of nothing, its bias, after it: `cut` fills the padding with that, and the layer computes what it did.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spatially.nn.conv_projection import ConvProjection
from spatially.nn.gaussian_bias import GaussianBias
from spatially.nn.regular_attention import regular_attention
from spatially.nn.window_attention import fill, fill_up, neighbour_mask

Pair = tuple[int, int]
Parts = tuple[Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class Windows:
    """How a map of `size` is cut. timm shifts, then pads; the others pad, then shift."""

    size: Pair
    window: Pair
    shift: Pair
    pad_first: bool

    def cut(self, parts: Parts, *, nothing: Parts | None) -> Tensor:
        """Queries, keys and values (B, H, W, C), side by side in windows: (B·windows, window area, 3·C)."""
        maps = torch.cat(parts, -1)
        maps = maps if self.pad_first else self._roll(maps, -1)
        if any(missing := fill(self.size, self.window)):
            maps = fill_up(maps, *missing, None if nothing is None else torch.cat(nothing))
        maps = self._roll(maps, -1) if self.pad_first else maps
        batch, height, width, channels = maps.shape
        rows, columns = self.window
        maps = maps.reshape(batch, height // rows, rows, width // columns, columns, channels)
        return maps.transpose(2, 3).reshape(-1, rows * columns, channels)

    def join(self, windows: Tensor) -> Tensor:
        """(B·windows, window area, C) back to (B, H, W, C)."""
        rows, columns = self.window
        missing = fill(self.size, self.window)
        height, width, channels = self.size[0] + missing[0], self.size[1] + missing[1], windows.shape[-1]
        maps = windows.reshape(-1, height // rows, width // columns, rows, columns, channels)
        maps = maps.transpose(2, 3).reshape(-1, height, width, channels)
        maps = self._roll(maps, 1) if self.pad_first else maps
        maps = maps[:, : self.size[0], : self.size[1]]
        return (maps if self.pad_first else self._roll(maps, 1)).contiguous()

    def mask(self, like: Tensor) -> Tensor | None:
        """Added to the logits of each window, so that a shift makes no neighbours: (windows, 1, area, area) or None."""
        if not any(self.shift):
            return None
        return neighbour_mask(self.size, self.window, self.shift, device=like.device, dtype=like.dtype)

    def _roll(self, maps: Tensor, direction: int) -> Tensor:
        if not any(self.shift):
            return maps
        return torch.roll(maps, (direction * self.shift[0], direction * self.shift[1]), (1, 2))


def project(projection: nn.Module, maps: Tensor) -> Parts:
    """Queries, keys and values of a map, by one linear layer or a `ConvProjection`."""
    return projection(maps) if isinstance(projection, ConvProjection) else projection(maps).chunk(3, -1)


def pair_bias(table: Tensor | None, owner: nn.Module, window: Pair) -> Tensor:
    """All that `owner` adds to the logits of a window's pairs: (1, heads or 1, area, area).

    `table` is the bias of its position table, spread to pairs; None where the table is gone.
    """
    gaussian: GaussianBias | None = getattr(owner, "gaussian_bias", None)
    if gaussian is not None:
        bias = gaussian(window)[None]
        return bias if table is None else table + bias
    if table is not None:
        return table
    # False is the zero that takes the dtype of what it is added to.
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=owner.relative_position_index.device)  # type: ignore[arg-type]


def square_bias(owner: nn.Module, *, heads: int, own_window: Pair, window: int) -> Tensor | None:
    """All that `owner` adds to the logits of the `window`×`window` square around a query: (heads, window, window).

    The table has a row for each offset of a query from a key, up to its own window's side less one; the square's slots are
    the offsets of a key from its query, so the middle of the table is read backwards.
    """
    gaussian: GaussianBias | None = getattr(owner, "gaussian_bias", None)
    table: Tensor | None = getattr(owner, "relative_position_bias_table", None)
    bias = None if gaussian is None else gaussian.square(window).expand(heads, -1, -1)
    if table is None:
        return bias
    (rows, columns), half = own_window, window // 2
    offsets = table.mT.unflatten(1, (2 * rows - 1, 2 * columns - 1)).flip(1, 2)
    middle = offsets[:, rows - 1 - half : rows + half, columns - 1 - half : columns + half]
    return middle if bias is None else middle + bias


def attend_to_windows(
    cut: Tensor, *, heads: int, bias: Tensor, mask: Tensor | None, dropout: Callable[[Tensor], Tensor], scale: float
) -> Tensor:
    """Attention inside windows that `Windows.cut` made: (B·windows, area, 3·C) to (B·windows, area, C)."""
    query, key, value = cut.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
    logits = (query * scale) @ key.mT + bias
    if mask is not None:
        logits = (logits.unflatten(0, (-1, len(mask))) + mask).flatten(0, 1)
    out = dropout(logits.softmax(-1)).to(value.dtype) @ value
    return out.transpose(1, 2).flatten(-2)


def attend_to_squares(parts: Parts, *, heads: int, field: tuple[int, str], bias: Tensor | None, scale: float) -> Tensor:
    """Attention of every position of (B, H, W, C) maps over the square around it; `field` is its side and its border."""
    query, key, value = (maps.unflatten(-1, (heads, -1)) for maps in parts)
    if bias is not None:
        bias = bias.to(query.dtype)
    out = regular_attention(query, key, value, window=field[0], border=field[1], bias=bias, scale=scale)
    return out.flatten(-2)
