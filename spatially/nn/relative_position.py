r"""Relative position bias: a value for every offset between two patches (Kim et al., section 3, figure 5).

A layer adds to the attention logits of patches n and m at offset (Δy, Δx), n minus m, and head h

* :class:`RelPosBias` (Swin): a learnable table, :math:`B_h[n, m] = T_h[Δy, Δx]`;
* :class:`RelPosMlp` (Swin V2): a small network of the logarithm of the offset,
  :math:`B_h[n, m] = \mathrm{MLP}_h(s(Δy), s(Δx))` with :math:`s(Δ) = \operatorname{sign}(Δ) \log(1 + |Δ|)`.

Both answer for any grid: `table` gives the values of all offsets of an H×W grid, (heads, 2H − 1, 2W − 1), and `pairs`
spreads such a table to all pairs of patches, (heads, HW, HW). The network is evaluated at the grid's own offsets, the
learnable table is resized when the grid is not the one it was made for. What `share` gives depends on the grid alone,
so that a model works it out once for all of its layers. Weights are named as in timm's layers.

>>> pairs(torch.arange(5).reshape(1, 1, 5))  # three patches in a row: offset 0 is the table's middle, 2
tensor([[[2, 1, 0],
         [3, 2, 1],
         [4, 3, 2]]])
"""

import torch
from timm.layers import Mlp, trunc_normal_
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.nn.resize import resize

Grid = tuple[int, int]


def pairs(table: Tensor) -> Tensor:
    """What belongs to each offset, (…, 2H − 1, 2W − 1), for each pair of patches, row by row: (…, HW, HW)."""
    height, width = ((side + 1) // 2 for side in table.shape[-2:])
    squares = table.unfold(-2, height, 1).unfold(
        -2, width, 1
    )  # (…, H, W, H, W), the keys in reverse order: no copy yet
    return squares.flip(-2, -1).reshape(*table.shape[:-2], height * width, height * width)


def resize_table(table: Tensor, grid: Grid) -> Tensor:
    """A table (heads, 2h − 1, 2w − 1) for another grid, bicubic: (heads, 2H − 1, 2W − 1). Offset 0 stays in the middle."""
    return resize(table, (2 * grid[0] - 1, 2 * grid[1] - 1))


class RelPosBias(nn.Module):
    """A learnable value for every offset of `grid` and every head."""

    def __init__(
        self,
        heads: int,
        *,
        grid: Grid,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.heads, self.grid = heads, check_grid(grid)
        offsets = (2 * self.grid[0] - 1) * (2 * self.grid[1] - 1)
        self.relative_position_bias_table = nn.Parameter(torch.empty(offsets, heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """A truncated normal of standard deviation 0.02."""
        trunc_normal_(self.relative_position_bias_table, std=0.02)

    def share(self, grid: Grid) -> None:
        """Nothing: what depends on the grid alone."""

    def table(self, grid: Grid, *, shared: Tensor | None = None) -> Tensor:
        """The value of every offset of a grid: (heads, 2·height − 1, 2·width − 1)."""
        check_sides(grid)
        rows, columns = (2 * side - 1 for side in self.grid)
        return resize_table(self.relative_position_bias_table.mT.reshape(self.heads, rows, columns), grid)

    def forward(self, grid: Grid) -> Tensor:
        """The bias of all pairs of a grid, row by row: (heads, height·width, height·width)."""
        return pairs(self.table(grid))

    def extra_repr(self) -> str:
        """Heads, and the grid that its table is for."""
        return f"heads={self.heads}, grid={self.grid}"


class RelPosMlp(nn.Module):
    """A network from the logarithm of an offset to a value for every head; the same weights for every grid."""

    def __init__(
        self,
        heads: int,
        *,
        hidden: int = 128,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        # The dropout of hidden units while training is timm's.
        self.mlp = Mlp(2, hidden, heads, act_layer=nn.ReLU, drop=(0.125, 0.0), device=device, dtype=dtype)

    def share(self, grid: Grid) -> Tensor:
        """The logarithms of all offsets, which depend on the grid alone: (2·height − 1, 2·width − 1, 2)."""
        check_sides(grid)
        weight = self.mlp.fc1.weight
        accurate = torch.promote_types(weight.dtype, torch.float32)

        def logarithms(side: int) -> Tensor:
            offsets = torch.arange(1 - side, side, device=weight.device, dtype=accurate)
            return offsets.sign() * offsets.abs().log1p()

        along = torch.meshgrid(logarithms(grid[0]), logarithms(grid[1]), indexing="ij")
        return torch.stack(along, -1).to(weight.dtype)

    def table(self, grid: Grid, *, shared: Tensor | None = None) -> Tensor:
        """The value of every offset of a grid: (heads, 2·height − 1, 2·width − 1)."""
        values: Tensor = self.mlp(self.share(grid) if shared is None else shared)
        return values.permute(2, 0, 1)

    def forward(self, grid: Grid) -> Tensor:
        """The bias of all pairs of a grid, row by row: (heads, height·width, height·width)."""
        return pairs(self.table(grid))


def check_grid(grid: Grid) -> Grid:
    """The grid as a pair of whole numbers."""
    check_sides(grid)
    return int(grid[0]), int(grid[1])


def check_sides(grid: Grid) -> None:
    """A grid has at least one patch down and across."""
    if len(grid) != 2 or any(side < 1 for side in grid):
        raise UserError(f"grid must be two positive numbers of patches: got {grid!r}")
