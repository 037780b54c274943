r"""Query-centred attention as its definition reads, one gathered square a query: slow, plain, and the measure of the others.

With :math:`S(n)` the slots of query n and :math:`k_s` the key in slot s,

.. math:: o_n = \sum_{s \in S(n)} \frac{\exp(\mathrm{scale}\; q_n \cdot k_s + b_s)}
                                       {\sum_{t \in S(n)} \exp(\mathrm{scale}\; q_n \cdot k_t + b_t)} v_s.

Memory grows with pixels × window². Derivatives of every order come from PyTorch.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from spatially.nn.regular_attention.field import Field


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, rows: Field, columns: Field, bias: Tensor | None, scale: float
) -> Tensor:
    """Attention of each query over its square; bias (heads, window, window)."""
    window, dtype = rows.window, query.dtype
    if dtype in (torch.float16, torch.bfloat16):  # as all ways do: products and sums in single precision
        query, key, value = (tensor.float() for tensor in (query, key, value))
    keys, values = (_squares(tensor, rows, columns) for tensor in (key, value))  # (B, H, W, heads, window², D)
    logits = (query * scale).unsqueeze(-2) @ keys.transpose(-2, -1)  # (B, H, W, heads, 1, window²)
    if bias is not None:
        logits = logits + bias.to(logits.dtype).reshape(-1, 1, window * window)
    inside = _inside(rows, query.device)[:, None, :, None] & _inside(columns, query.device)[None, :, None, :]
    logits = logits.masked_fill(~inside.reshape(rows.length, columns.length, 1, 1, -1), float("-inf"))
    return (logits.softmax(-1) @ values).squeeze(-2).to(dtype)


def _squares(tensor: Tensor, rows: Field, columns: Field) -> Tensor:
    padded = F.pad(tensor, (0, 0, 0, 0, columns.padding, columns.padding, rows.padding, rows.padding))
    lines = padded.index_select(1, _slots(rows, tensor.device).flatten().clamp(0, rows.keys - 1))
    squares = lines.index_select(2, _slots(columns, tensor.device).flatten().clamp(0, columns.keys - 1))
    squares = squares.unflatten(2, (columns.length, columns.window)).unflatten(1, (rows.length, rows.window))
    return squares.permute(0, 1, 3, 5, 2, 4, 6).flatten(4, 5)


def _slots(field: Field, device: torch.device) -> Tensor:
    """The key in each slot: (length, window)."""
    starts = torch.tensor(field.starts, device=device)
    return starts[:, None] + torch.arange(field.window, device=device)


def _inside(field: Field, device: torch.device) -> Tensor:
    slots = _slots(field, device)
    return (slots >= 0) & (slots < field.keys)
