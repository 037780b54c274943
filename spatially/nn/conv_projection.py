r"""Queries, keys and values of which one comes from a convolution (Xu et al., section 5.1).

With f the feature map, one of the three looks at the k×k neighbourhood of its point (here the key), the others at the
point alone:

.. math:: key_{i,j} = b + \sum_{p,q} K_{p,q}\, f_{i+p,\,j+q}, \qquad query_{i,j} = W_q f_{i,j} + b_q, \qquad
          value_{i,j} = W_v f_{i,j} + b_v,

over the whole map, 0 outside it. K is dense (C·C·k² weights) or depth-wise (C·k², no point-wise part).

Neighbours on a map are alike, so that a step of an optimiser that moves every weight by as much moves a dense key k² times
as far as a linear one: logits grow until the softmax is saturated, and training stalls or diverges. With `normalised_heads`
queries and keys have, head by head, a mean square of 1,

.. math:: \hat q = q \,/\, \sqrt{\tfrac1d \textstyle\sum_c q_c^2 + 10^{-6}},

and no logit :math:`\hat q \cdot \hat k / \sqrt d` exceeds :math:`\sqrt d`. It learns nothing, and without it the layer is
the paper's.

>>> projection = ConvProjection(8, convolved="key")
>>> [tuple(part.shape) for part in projection(torch.zeros(2, 5, 6, 8))]
[(2, 5, 6, 8), (2, 5, 6, 8), (2, 5, 6, 8)]
"""

from typing import Literal, cast, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.nn.check import odd, shaped, whole
from spatially.nn.map_convolution import convolve_map

Convolved = Literal["query", "key", "value"]
PARTS = get_args(Convolved)
NORMALISED = "normalised_heads"  # the buffer's name


class ConvProjection(nn.Module):
    """(B, H, W, C) → query, key and value, each (B, H, W, C), in attention's usual order.

    The convolution's weights are named after what they make (`key.weight`), so that weights of one kind are never
    taken for another's; the other two are packed in `linear`, in the order query, key, value. `normalised_heads` is the
    number of heads whose queries and keys are normalised; None leaves them as they are. A buffer of that name stands beside the
    weights then, so that they cannot be loaded for the other form by mistake.
    """

    def __init__(
        self,
        dim: int,
        *,
        convolved: Convolved = "key",
        depthwise: bool = False,
        kernel_size: int = 3,
        bias: bool = True,
        normalised_heads: int | None = None,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if convolved not in PARTS:
            raise UserError(f"convolved must be one of {', '.join(PARTS)}: got {convolved!r}")
        odd("kernel_size", kernel_size)
        if normalised_heads is not None and dim % whole("normalised_heads", normalised_heads):
            raise UserError(f"normalised_heads must divide dim, {dim}: got {normalised_heads}")
        self.dim = dim
        self.heads = normalised_heads
        if normalised_heads is not None:
            self.register_buffer(NORMALISED, torch.tensor(normalised_heads, device=device))
        self.convolved = convolved
        self.depthwise = depthwise
        self.linear = nn.Linear(dim, 2 * dim, bias=bias, device=device, dtype=dtype)
        convolution = nn.Conv2d(
            dim,
            dim,
            kernel_size,
            padding=kernel_size // 2,
            groups=dim if depthwise else 1,
            bias=bias,
            device=device,
            dtype=dtype,
        )
        self.add_module(convolved, convolution)

    @property
    def convolution(self) -> nn.Conv2d:
        """The layer that makes the convolved part."""
        return cast(nn.Conv2d, getattr(self, self.convolved))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value; the two linear ones are views of one tensor."""
        packed, convolved = self.packed(x)
        return self._in_order(convolved, *packed.unbind(-2))

    def packed(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The two linear ones (B, H, W, 2, C), in the order query, key, value; and the convolved one (B, H, W, C)."""
        shaped("x", x, f"batch, height, width, {self.dim}", axis=-1, size=self.dim)
        layer = self.convolution
        convolved = convolve_map(x, layer.weight, layer.bias, layer.groups)
        return self._normalise(self.linear(x).unflatten(-1, (2, self.dim)), convolved)

    def of_nothing(self) -> tuple[Tensor, Tensor, Tensor] | None:
        """Query, key and value where the map is 0, (C,) each: the biases; None without.

        They are not normalised: nothing is there to be of the same size as elsewhere, and a bias that is still 0 would have
        a gradient a thousand times that of the weights.
        """
        if self.linear.bias is None or self.convolution.bias is None:
            return None
        return self._in_order(self.convolution.bias, *self.linear.bias.unflatten(-1, (2, self.dim)).unbind(-2))

    def _normalise(self, packed: Tensor, convolved: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys, wherever they are, with a mean square of 1 in each head."""
        if self.heads is None:
            return packed, convolved
        if self.convolved == "value":
            return self._of_mean_square_one(packed), convolved
        normed = self._of_mean_square_one(packed[..., 0, :])
        return torch.stack([normed, packed[..., 1, :]], dim=-2), self._of_mean_square_one(convolved)

    def _of_mean_square_one(self, x: Tensor) -> Tensor:
        heads = x.unflatten(-1, (self.heads, -1))
        # Autocast computes it in single precision; products of queries and keys want the precision of what came in.
        return F.rms_norm(heads, heads.shape[-1:], eps=1e-6).to(x.dtype).flatten(-2)

    def _in_order(self, convolved: Tensor, first: Tensor, second: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        parts = [first, second]
        parts.insert(PARTS.index(self.convolved), convolved)
        query, key, value = parts
        return query, key, value

    def extra_repr(self) -> str:
        """Which part is convolved, and how."""
        normed = "" if self.heads is None else f", {NORMALISED}={self.heads}"
        return f"convolved={self.convolved!r}, depthwise={self.depthwise}{normed}"
