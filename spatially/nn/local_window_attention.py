r"""Self-attention inside non-overlapping windows, one position table for all heads (Park & Kim, figure 8: AlterNet).

The map is cut into windows of `window` × `window` positions, and a query q sees the keys k of its own window:

.. math:: y_q = W_o \left[\sum_k \mathrm{softmax}_k\left(\frac{Q_q \cdot K_k}{\sqrt d} + T[k_y - q_y + w - 1,\;
          k_x - q_x + w - 1]\right) V_k\right]_{heads} + b_o.

Where the map's sides are no multiples of the window, the last windows reach over the border, and the positions outside
take no part. A side shorter than the window is one window. The paper's maps are multiples of its window, 7.

>>> layer = LocalWindowAttention(8, heads=2, head_dim=4, window=7)
>>> layer(torch.zeros(1, 8, 14, 9)).shape, layer.position_table.shape
(torch.Size([1, 8, 14, 9]), torch.Size([13, 13]))
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.nn.check import shaped

Grid = tuple[int, int]


class LocalWindowAttention(nn.Module):
    """From maps (B, features, H, W) to maps (B, out_features, H, W), any H and W at any time."""

    def __init__(
        self,
        features: int,
        out_features: int | None = None,
        *,
        heads: int = 8,
        head_dim: int = 64,
        window: int = 7,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("features", features), ("heads", heads), ("head_dim", head_dim), ("window", window)):
            if not isinstance(value, int) or value < 1:
                raise UserError(f"{name} must be a whole number from 1 on: got {value!r}")
        self.heads, self.head_dim, self.window, self.attn_drop = heads, head_dim, window, attn_drop
        inner = heads * head_dim
        self.qkv = nn.Linear(features, 3 * inner, bias=False, device=device, dtype=dtype)
        self.proj = nn.Linear(inner, out_features or features, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)
        self.position_table = nn.Parameter(torch.empty(2 * window - 1, 2 * window - 1, device=device, dtype=dtype))
        self.reset_position_table()

    def reset_position_table(self) -> None:
        """Draw the table anew, as the authors do."""
        nn.init.normal_(self.position_table, std=0.02)

    def forward(self, maps: Tensor) -> Tensor:
        """Attention of every window, as a map."""
        features = self.qkv.in_features
        shaped("maps", maps, f"batch, {features}, height, width", axis=1, size=features)
        height, width = maps.shape[-2:]
        size = (min(self.window, height), min(self.window, width))
        count = (-(-height // size[0]), -(-width // size[1]))
        below, right = count[0] * size[0] - height, count[1] * size[1] - width
        bias = self.bias(size)
        if below or right:
            inside = _inside((height, width), size, count, device=maps.device)
            bias = torch.where(inside[:, None, None, :], bias, float("-inf"))  # (windows, 1, n, n)
            bias = bias.repeat(maps.shape[0], 1, 1, 1)
            maps = F.pad(maps, (0, right, 0, below))
        tokens = maps.unflatten(3, (count[1], size[1])).unflatten(2, (count[0], size[0])).permute(0, 2, 4, 3, 5, 1)
        tokens = self._attend(tokens.flatten(3, 4).flatten(0, 2), bias)
        # Rows of channels stay together in memory: the residual sum that follows keeps the layout of its own stream.
        out = tokens.reshape(maps.shape[0], *count, *size, tokens.shape[-1]).transpose(2, 3).flatten(3, 4).flatten(1, 2)
        return out[:, :height, :width].permute(0, 3, 1, 2)

    def bias(self, size: Grid) -> Tensor:
        """The table's entry for every query and key of a window, row by row: (height·width, height·width)."""
        rows, columns = (self._offsets(length) for length in size)
        pairs = self.position_table[rows[:, None, :, None], columns[None, :, None, :]]
        return pairs.flatten(2, 3).flatten(0, 1)

    def _offsets(self, length: int) -> Tensor:
        places = torch.arange(length, device=self.position_table.device)
        return places - places[:, None] + (self.window - 1)

    def _attend(self, tokens: Tensor, bias: Tensor) -> Tensor:
        """Attention among the n tokens (windows, n, features) of each window, with a bias for each pair."""
        queries, keys, values = (
            self.qkv(tokens).unflatten(-1, (3, self.heads, self.head_dim)).permute(2, 0, 3, 1, 4).unbind(0)
        )
        mixed = F.scaled_dot_product_attention(
            queries,
            keys,
            values,
            attn_mask=bias.to(queries.dtype),
            dropout_p=self.attn_drop if self.training else 0.0,
        )
        mixed = mixed.transpose(1, 2)
        if torch.compiler.is_exporting():  # another kernel may lay its output out otherwise, and no view would fit both
            mixed = mixed.clone(memory_format=torch.contiguous_format)
        return self.proj_drop(self.proj(mixed.flatten(2)))

    def extra_repr(self) -> str:
        """What the submodules do not show."""
        return f"heads={self.heads}, head_dim={self.head_dim}, window={self.window}, attn_drop={self.attn_drop}"


def _inside(grid: Grid, size: Grid, count: Grid, *, device: torch.device) -> Tensor:
    """Which positions of each window lie on the map: bool (windows, height·width). The first of a window always does."""
    rows, columns = (
        (torch.arange(number * length, device=device) < side).unflatten(0, (number, length))
        for side, length, number in zip(grid, size, count, strict=True)
    )
    return (rows[:, None, :, None] & columns[None, :, None, :]).flatten(2, 3).flatten(0, 1)
