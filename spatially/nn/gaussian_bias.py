r"""Gaussian attention bias: nearer patches weigh more (Kim et al., section 4, equation 3).

For patches n and m at offset (Δy, Δx) in the grid,

.. math:: B[n, m] = A^2 \exp\left(-\frac{Δx^2 + Δy^2}{2σ^2}\right),

added to the attention logits beside whatever bias the layer has. One learnable (A, σ) a layer, shared by its heads
(`per_head=True`: one each, for the ablation), starting at A = 1, σ = 5, without weight decay. At A = 0 it does nothing.

>>> bias = GaussianBias()((14, 14)).detach()
>>> [round(float(bias[0, 0, m]), 6) for m in (0, 1, 195)]
[1.0, 0.980199, 0.001159]
"""

import torch
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.nn.check import number, odd, whole
from spatially.nn.relative_position import Grid, check_sides, pairs


class GaussianBias(nn.Module):
    """The bias of every pair of a grid or window, of every offset, or of a query's square; any grid at any time."""

    def __init__(
        self,
        heads: int = 1,
        *,
        per_head: bool = False,
        amplitude: float = 1.0,
        sigma: float = 5.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        whole("heads", heads)
        amplitude, sigma = number("amplitude", amplitude), number("sigma", sigma)
        if sigma == 0:
            raise UserError("sigma must not be 0: the bias divides by its square")
        self.starts = (amplitude, sigma)
        count = heads if per_head else 1
        self.amplitude = nn.Parameter(torch.empty(count, device=device, dtype=dtype))
        self.sigma = nn.Parameter(torch.empty(count, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Back to the values it started with."""
        nn.init.constant_(self.amplitude, self.starts[0])
        nn.init.constant_(self.sigma, self.starts[1])

    def forward(self, grid: Grid) -> Tensor:
        """The bias of all pairs of a grid (or window), row by row: (heads or 1, height·width, height·width)."""
        return pairs(self.table(grid))

    def share(self, grid: Grid) -> Tensor:
        """Δx² + Δy² of all offsets, which depend on the grid alone: (2·height − 1, 2·width − 1)."""
        check_sides(grid)
        # Half precision has no room for the squares of large offsets: at least single here, rounded once at the end.
        accurate = torch.promote_types(self.sigma.dtype, torch.float32)
        rows, columns = (
            torch.arange(1 - side, side, device=self.sigma.device, dtype=accurate).square() for side in grid
        )
        return rows[:, None] + columns

    def table(self, grid: Grid, *, shared: Tensor | None = None) -> Tensor:
        """The bias of every offset of a grid: (heads or 1, 2·height − 1, 2·width − 1)."""
        squares = self.share(grid) if shared is None else shared
        variance, strength = (value.to(squares.dtype).square()[:, None, None] for value in (self.sigma, self.amplitude))
        return (strength * torch.exp(squares / (-2 * variance))).to(self.sigma.dtype)

    def square(self, window: int) -> Tensor:
        """The bias of the `window`×`window` square around a query, for `regular_attention`: (heads or 1, window, window)."""
        reach = odd("window", window) // 2 + 1
        return self.table((reach, reach))

    def extra_repr(self) -> str:
        """How it starts, and for how many heads."""
        return f"heads={len(self.sigma)}, amplitude={self.starts[0]}, sigma={self.starts[1]}"
