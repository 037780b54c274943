r"""PiT's pooling layer: fewer spatial tokens, more channels (Heo et al., section 3.2, figure 4).

Tokens come as prefix tokens (class, distillation) followed by the H×W spatial ones, row by row. The spatial tokens go
through a 3×3 convolution with one group an input channel, `out_dim / in_dim` filters a group; the prefix tokens, which have
no place, through one linear layer:

.. math:: y_o[i] = b_o + \sum_{u ∈ \{-1, 0, 1\}^2} w_o[u] \; x_{c(o)}[s·i + d·u], \qquad  y_{prefix} = W x_{prefix} + b,

with stride s = 2, dilation d = 1 and zeros around the map, so that a side of n becomes ⌈n/2⌉.

Dense tasks want a finer map from the same weights (section 4.2). A pool then has stride 1, and the taps of the pools behind
it spread out to meet the tokens they met before, as in a dilated ResNet. For pools 1, 2, … behind tokens at stride p,

.. math:: s_i = 1 \text{ if } p·2^i > \text{output stride, else } 2; \qquad d_i = \prod_{j < i} 2 / s_j.

Then every 2nd (4th, …) value of a dense pool's map is the value of the strided pool. With `own=True` a dense pool's own lost
stride spreads its taps too, :math:`d_i = \prod_{j ≤ i} 2/s_j`: the paper's words ("dilated convolution in the pooling
layer") when the last pool alone is dense, at the price of taps that the weights were not trained for.

>>> pool_steps(2, first=8, output_stride=32), pool_steps(2, first=8, output_stride=8)
([(2, 1), (2, 1)], [(1, 1), (1, 2)])
>>> pool_steps(2, first=8, output_stride=16), pool_steps(2, first=8, output_stride=16, own=True)
([(2, 1), (1, 1)], [(2, 1), (1, 2)])
"""

import torch
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.nn.check import shaped

Grid = tuple[int, int]


class TokenPool(nn.Module):
    """Prefix and spatial tokens of width `in_dim` to fewer of width `out_dim`; `stride=1` keeps their number."""

    def __init__(
        self,
        in_dim: int,
        out_dim: int,
        *,
        stride: int = 2,
        dilation: int = 1,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if in_dim < 1 or out_dim < 1 or out_dim % in_dim:
            raise UserError(f"out_dim must be a multiple of in_dim, {in_dim}: got {out_dim}")
        if stride < 1 or dilation < 1:
            raise UserError(f"stride and dilation must be at least 1: got {stride} and {dilation}")
        self.conv = nn.Conv2d(
            in_dim,
            out_dim,
            kernel_size=3,
            stride=stride,
            padding=dilation,
            dilation=dilation,
            groups=in_dim,
            device=device,
            dtype=dtype,
        )
        self.fc = nn.Linear(in_dim, out_dim, device=device, dtype=dtype)

    def forward(self, tokens: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """Tokens (batch, prefix + height·width, in_dim) of a grid (height, width): the pooled ones and their grid."""
        width = self.fc.in_features
        shaped("tokens", tokens, f"batch, prefix + height·width, {width}", axis=-1, size=width)
        spatial = self.conv(token_map(tokens, grid))
        pooled = spatial.flatten(2).transpose(1, 2)
        prefix = tokens[:, : prefix_length(tokens, grid)]
        if prefix.shape[1]:
            pooled = torch.cat((self.fc(prefix), pooled), dim=1)
        return pooled, (spatial.shape[-2], spatial.shape[-1])


def prefix_length(tokens: Tensor, grid: Grid) -> int:
    """How many tokens stand before those of the grid."""
    prefix = tokens.shape[1] - grid[0] * grid[1]
    if prefix < 0:
        raise UserError(f"grid must not have more places than there are tokens, {tokens.shape[1]}: got {grid}")
    return prefix


def token_map(tokens: Tensor, grid: Grid) -> Tensor:
    """The spatial tokens as a map (batch, channels, height, width): a view, its channels next to each other in memory."""
    return tokens[:, prefix_length(tokens, grid) :].transpose(1, 2).unflatten(2, grid)


def pool_steps(pools: int, *, first: int, output_stride: int | None = None, own: bool = False) -> list[tuple[int, int]]:
    """(stride, dilation) of each pool behind tokens at stride `first`, for a last map at `output_stride`."""
    allowed = [first * 2**number for number in range(pools + 1)]
    if output_stride is not None and output_stride not in allowed:
        raise UserError(f"output_stride must be one of {', '.join(map(str, allowed))}: got {output_stride}")
    steps, spread = [], 1
    for reduction in allowed[1:]:
        stride = 2 if output_stride is None or reduction <= output_stride else 1
        wider = spread * 2 // stride
        steps.append((stride, wider if own else spread))
        spread = wider
    return steps
