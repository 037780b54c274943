r"""Self-attention inside windows of a feature map (Liu et al. 2021, as Xu et al., section 3.2, and Kim et al. start from it).

.. math:: \mathrm{softmax}\left(\frac{q k^T}{\sqrt d} + T[Δ] + B[Δ] + M\right) v

The map is rolled by (−shift, −shift), filled up to whole windows at the bottom and right, cut, attended to window by
window, put together and rolled back. T is a learned table over the offsets Δ = (Δy, Δx) inside a window, B the Gaussian
bias (optional), and M is −∞ between points of a shifted window that are no neighbours in the map. Points that were filled
in are tokens of value 0 and do take part, as in timm's Swin Transformer; so a map of any size has its answer.
"""

from typing import Literal

import torch
import torch.nn.functional as F
from timm.layers import to_2tuple, trunc_normal_
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.nn.check import whole
from spatially.nn.conv_projection import ConvProjection
from spatially.nn.gaussian_bias import GaussianBias, Grid

FORMULA_DEVICES = ("cpu",)  # where the formula itself is faster than the fused operation


def fill(grid: Grid, window: Grid) -> Grid:
    """How many rows and columns are missing to whole windows.

    >>> fill((10, 14), (7, 7))
    (4, 0)
    """
    return -grid[0] % window[0], -grid[1] % window[1]


def offset_index(window: Grid, *, device: torch.device | None = None) -> Tensor:
    """Row of the position table for each pair of a window, (height·width)² numbers in one dimension.

    >>> offset_index((1, 3)).view(3, 3).tolist()
    [[2, 1, 0], [3, 2, 1], [4, 3, 2]]
    """
    height, width = window
    rows, columns = torch.arange(height, device=device), torch.arange(width, device=device)
    down = (rows[:, None] - rows + height - 1) * (2 * width - 1)
    right = columns[:, None] - columns + width - 1
    return (down[:, None, :, None] + right[None, :, None, :]).flatten()


def neighbour_mask(
    grid: Grid,
    window: Grid,
    shift: Grid,
    *,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """(windows, 1, n, n): 0 between points that may see each other, −∞ between those a roll has brought together.

    >>> neighbour_mask((1, 4), (1, 2), (0, 1))[:, 0].tolist()
    [[[0.0, 0.0], [0.0, 0.0]], [[0.0, -inf], [-inf, 0.0]]]
    """
    missing = fill(grid, window)
    height, width = grid[0] + missing[0], grid[1] + missing[1]
    # What came round lies in the last `shift` rows and columns of the filled map.
    below = torch.arange(height, device=device) >= height - shift[0]
    beside = torch.arange(width, device=device) >= width - shift[1]
    part = 2 * below[:, None] + beside.int()
    part = (
        part.view(height // window[0], window[0], width // window[1], window[1])
        .transpose(1, 2)
        .flatten(2)
        .flatten(0, 1)
    )
    apart = part[:, None, :, None] != part[:, None, None, :]
    return torch.zeros(apart.shape, device=device, dtype=dtype).masked_fill(apart, float("-inf"))


class WindowAttention(nn.Module):
    """Multi-head attention of a map (B, H, W, C) inside windows, with its projections; any map at any time.

    `convolved` makes one of query, key and value by a convolution over the whole map, before it is rolled and cut; with
    `qk_norm` queries and keys are then normalised, see `ConvProjection`.
    Layers of one stage can share `offset_index` and `neighbour_mask`; alone it makes its own.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window_size: int | Grid = 7,
        shift_size: int | Grid = 0,
        convolved: Literal["query", "key", "value"] | None = None,
        depthwise: bool = False,
        qk_norm: bool = False,
        position_table: bool = True,
        gaussian_bias: GaussianBias | None = None,
        qkv_bias: bool = True,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise UserError(f"dim must be a multiple of num_heads: got {dim} and {num_heads}")
        self.num_heads = num_heads
        self.window_size: Grid = to_2tuple(window_size)
        self.shift_size: Grid = to_2tuple(shift_size)
        for side, shift in zip(self.window_size, self.shift_size, strict=True):
            if not 0 <= shift < whole("window_size", side):
                raise UserError(
                    f"shift_size must be from 0 to below the window, {self.window_size}: got {self.shift_size}"
                )
        self.scale = (dim // num_heads) ** -0.5
        self.relative_position_bias_table: nn.Parameter | None
        if position_table:
            height, width = self.window_size
            table = torch.empty((2 * height - 1) * (2 * width - 1), num_heads, device=device, dtype=dtype)
            self.relative_position_bias_table = nn.Parameter(trunc_normal_(table, std=0.02))
        else:
            self.register_parameter("relative_position_bias_table", None)
        self.gaussian_bias = gaussian_bias
        self.qkv = projection(
            dim,
            convolved=convolved,
            depthwise=depthwise,
            normalised_heads=num_heads if qk_norm else None,
            bias=qkv_bias,
            device=device,
            dtype=dtype,
        )
        self.attn_drop = attn_drop
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor, *, index: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        """Attend; `index` is `offset_index` of the window, `mask` is `neighbour_mask` of this map."""
        grid = (x.shape[1], x.shape[2])
        shifted = any(self.shift_size)
        if shifted and mask is None:
            mask = neighbour_mask(grid, self.window_size, self.shift_size, device=x.device, dtype=x.dtype)
        bias = self.bias(index)
        if mask is not None:
            bias = mask if bias is None else bias + mask
        query, key, value = self._windows(x)
        attended = self._attend(query, key, value, bias)
        x = self.proj_drop(self.proj(self._map(attended, grid)))
        return torch.roll(x, self.shift_size, (1, 2)) if shifted else x

    def bias(self, index: Tensor | None = None) -> Tensor | None:
        """What is added to the logits of every window, (heads or 1, n, n): table and Gaussian; None without either."""
        area = self.window_size[0] * self.window_size[1]
        bias = None if self.gaussian_bias is None else self.gaussian_bias(self.window_size)
        if self.relative_position_bias_table is not None:
            if index is None:
                index = offset_index(self.window_size, device=self.relative_position_bias_table.device)
            # Selecting columns of the transposed table needs no second copy, and its gradient is a plain sum.
            table = self.relative_position_bias_table.t().index_select(1, index).view(-1, area, area)
            bias = table if bias is None else table + bias
        return bias

    def _windows(self, x: Tensor) -> tuple[Tensor, ...]:
        """Query, key and value, each (B, windows, heads, n, d) and contiguous: one copy from map to heads."""
        back = (-self.shift_size[0], -self.shift_size[1])
        nothing: tuple[Tensor, ...] | None
        if isinstance(self.qkv, ConvProjection):
            parts, nothing = self.qkv(x), self.qkv.of_nothing()
            if any(back):
                parts = tuple(torch.roll(part, back, (1, 2)) for part in parts)
        else:  # linear layers and rolls commute, and the input is a third of what comes out
            x = torch.roll(x, back, (1, 2)) if any(back) else x
            parts = self.qkv(x).unflatten(-1, (3, -1)).unbind(-2)
            nothing = None if self.qkv.bias is None else self.qkv.bias.chunk(3)
        return tuple(self._cut(part, value) for part, value in zip(parts, nothing or (None,) * 3, strict=True))

    def _cut(self, x: Tensor, nothing: Tensor | None) -> Tensor:
        down, right = fill((x.shape[1], x.shape[2]), self.window_size)
        if down or right:
            x = fill_up(x, down, right, nothing)
        batch, height, width, dim = x.shape
        rows, columns = self.window_size
        across = (batch, height // rows, rows, width // columns, columns, self.num_heads, dim // self.num_heads)
        windows = x.view(across).permute(0, 1, 3, 5, 2, 4, 6)
        count = (height // rows) * (width // columns)
        return windows.reshape(batch, count, self.num_heads, rows * columns, dim // self.num_heads)

    def _map(self, attended: Tensor, grid: Grid) -> Tensor:
        down, right = fill(grid, self.window_size)
        rows, columns = self.window_size
        batch, dim = attended.shape[0], attended.shape[-1]
        across = (batch, (grid[0] + down) // rows, (grid[1] + right) // columns, self.num_heads, rows, columns, dim)
        x = attended.view(across).permute(0, 1, 4, 2, 5, 3, 6)
        x = x.reshape(batch, grid[0] + down, grid[1] + right, self.num_heads * dim)
        return x[:, : grid[0], : grid[1]] if down or right else x

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None) -> Tensor:
        drop = self.attn_drop if self.training else 0.0
        if query.device.type in FORMULA_DEVICES:
            # The bias learns, which the CPU's fused kernel cannot do: its fallback is slower than the formula itself.
            area = query.shape[-2]
            pairs = torch.bmm((query * self.scale).flatten(0, 2), key.flatten(0, 2).mT).view(
                *query.shape[:3], area, area
            )
            weights = F.softmax(pairs if bias is None else pairs + bias, dim=-1)
            if drop:
                weights = F.dropout(weights, drop)
            return torch.bmm(weights.flatten(0, 2), value.flatten(0, 2)).view(query.shape)
        shape = query.shape
        if bias is not None and bias.ndim == 4:  # differs from window to window: these go along with the heads
            bias = bias.expand(-1, self.num_heads, -1, -1).flatten(0, 1)
            query, key, value = query.flatten(1, 2), key.flatten(1, 2), value.flatten(1, 2)
        else:
            query, key, value = query.flatten(0, 1), key.flatten(0, 1), value.flatten(0, 1)
        bias = None if bias is None else bias[None].to(query.dtype)
        attended = F.scaled_dot_product_attention(query, key, value, bias, dropout_p=drop, scale=self.scale)
        return attended.reshape(shape)

    def extra_repr(self) -> str:
        """Heads, window and shift."""
        return f"heads={self.num_heads}, window_size={self.window_size}, shift_size={self.shift_size}"


def projection(
    dim: int,
    *,
    convolved: Literal["query", "key", "value"] | None = None,
    depthwise: bool = False,
    normalised_heads: int | None = None,
    bias: bool = True,
    device: torch.device | None = None,
    dtype: torch.dtype | None = None,
) -> ConvProjection | nn.Linear:
    """What makes query, key and value: one packed linear layer, or a `ConvProjection`."""
    if convolved is None:
        if normalised_heads is not None:
            raise UserError("qk_norm needs a convolution: choose convolved='query', 'key' or 'value'")
        return nn.Linear(dim, 3 * dim, bias=bias, device=device, dtype=dtype)
    return ConvProjection(
        dim,
        convolved=convolved,
        depthwise=depthwise,
        normalised_heads=normalised_heads,
        bias=bias,
        device=device,
        dtype=dtype,
    )


def fill_up(x: Tensor, down: int, right: int, value: Tensor | None) -> Tensor:
    """(B, H, W, C) with rows and columns of `value` (C,), or 0, below and to the right."""
    if value is None:
        return F.pad(x, (0, 0, 0, right, 0, down))
    value = value.to(x.dtype)
    batch, height, width, dim = x.shape
    x = torch.cat([x, value.expand(batch, height, right, dim)], 2)
    return torch.cat([x, value.expand(batch, down, width + right, dim)], 1)
