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
    keys, values = (squares(tensor, rows, columns) for tensor in (key, value))  # (B, H, W, heads, window², D)
    logits = (query * scale).unsqueeze(-2) @ keys.transpose(-2, -1)  # (B, H, W, heads, 1, window²)
    if bias is not None:
        logits = logits + bias.to(logits.dtype).reshape(-1, 1, window * window)
    seen = inside(rows, columns, query.device)[:, :, None, None]
    logits = logits.masked_fill(~seen, float("-inf"))
    return (logits.softmax(-1) @ values).squeeze(-2).to(dtype)


def squares(tensor: Tensor, rows: Field, columns: Field) -> Tensor:
    """The square around each position: (B, H, W, heads, window², D)."""
    padded = F.pad(tensor, (0, 0, 0, 0, columns.padding, columns.padding, rows.padding, rows.padding))
    lines = padded.index_select(1, _slots(rows, tensor.device).flatten().clamp(0, rows.keys - 1))
    squares = lines.index_select(2, _slots(columns, tensor.device).flatten().clamp(0, columns.keys - 1))
    squares = squares.unflatten(2, (columns.length, columns.window)).unflatten(1, (rows.length, rows.window))
    return squares.permute(0, 1, 3, 5, 2, 4, 6).flatten(4, 5)


def inside(rows: Field, columns: Field, device: torch.device) -> Tensor:
    """Which slots of each square take part: (H, W, window²)."""
    return (_inside(rows, device)[:, None, :, None] & _inside(columns, device)[None, :, None, :]).flatten(2)


def slots(rows: Field, columns: Field, device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of the position in each slot, each (H, W, window²); outside the map where it is padded or masked."""
    down, across = (_slots(field, device) - field.padding for field in (rows, columns))
    down, across = torch.broadcast_tensors(down[:, None, :, None], across[None, :, None, :])
    return down.flatten(2), across.flatten(2)


def _slots(field: Field, device: torch.device) -> Tensor:
    """The key in each slot: (length, window)."""
    starts = torch.tensor(field.starts, device=device)
    return starts[:, None] + torch.arange(field.window, device=device)


def _inside(field: Field, device: torch.device) -> Tensor:
    slots = _slots(field, device)
    return (slots >= 0) & (slots < field.keys)
