r"""Self-attention of a map over the square around each point, with its projections (Xu, section 5.2).

With :math:`S` the `window_size`×`window_size` offsets around 0, and q, k, v projections of the map of which one may be a
convolution,

.. math:: y_n = W \left[\sum_{s \in S} \mathrm{softmax}_s\left(\frac{q_n \cdot k_{n+s}}{\sqrt d} + b_s\right)
                v_{n+s}\right]_{heads}.

>>> RegularSelfAttention(8, 2)(torch.zeros(1, 5, 9, 8)).shape
torch.Size([1, 5, 9, 8])
"""

from typing import Any, Literal

import torch
from torch import Tensor, nn

from spatially.nn.check import odd
from spatially.nn.conv_projection import ConvProjection
from spatially.nn.gaussian_bias import GaussianBias
from spatially.nn.regular_attention import packed_regular_attention, regular_attention
from spatially.nn.window_attention import projection

Border = Literal["mask", "zero", "shift"]


class RegularSelfAttention(nn.Module):
    """Multi-head attention of a map (B, H, W, C) to the square around each point, with its projections.

    With `qk_norm` queries and keys of a layer with a convolution are normalised, see `ConvProjection`.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        window_size: int = 7,
        border: Border = "mask",
        convolved: Literal["query", "key", "value"] | None = None,
        depthwise: bool = False,
        qk_norm: bool = False,
        gaussian_bias: GaussianBias | None = None,
        qkv_bias: bool = True,
        proj_drop: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.window_size = odd("window_size", window_size)
        self.border = border
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
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def forward(self, x: Tensor) -> Tensor:
        """Attend; the same at every point away from the border."""
        return self.proj_drop(self.proj(self._attend(x).flatten(-2)))

    def _attend(self, x: Tensor) -> Tensor:
        heads = (self.num_heads, -1)
        field: dict[str, Any] = {"window": self.window_size, "border": self.border, "bias": self._bias()}
        if not isinstance(self.qkv, ConvProjection):
            return packed_regular_attention(self.qkv(x).unflatten(-1, (3, *heads)), **field)
        if self.qkv.convolved == "key":
            packed, key = self.qkv.packed(x)
            return packed_regular_attention(packed.unflatten(-1, heads), key.unflatten(-1, heads), **field)
        return regular_attention(*(part.unflatten(-1, heads) for part in self.qkv(x)), **field)

    def _bias(self) -> Tensor | None:
        if self.gaussian_bias is None:
            return None
        return self.gaussian_bias.square(self.window_size).expand(self.num_heads, -1, -1)

    def extra_repr(self) -> str:
        """Heads, square and border."""
        return f"heads={self.num_heads}, window_size={self.window_size}, border={self.border!r}"
