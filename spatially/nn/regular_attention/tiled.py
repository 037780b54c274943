r"""Query-centred attention by compact tiles: neighbouring queries share most of their keys.

The grid is cut into tiles of queries. A tile of t×t queries with a window w needs the (t + w − 1)² keys around it, its
halo; all its logits are one matrix product, and what lies outside a query's own square is masked. That is more
arithmetic than the definition (196 keys for 49 at t = 8, w = 7), all of it in matrix products, and far fewer bytes: each
key is copied (t + w − 1)² / t² times, not w². Memory grows with pixels.

Inference runs `scaled_dot_product_attention`. Where derivatives may be taken, the same formula is written out, since
fused kernels have no second derivative and none with respect to the bias.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from spatially.nn.regular_attention.field import Field
from spatially.nn.regular_attention.tiling import Tiling, best


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, rows: Field, columns: Field, bias: Tensor | None, scale: float
) -> Tensor:
    """Attention of each query over its square; bias (heads, window, window)."""
    down, across = best(rows), best(columns)
    batch, height, width, heads, size = query.shape
    tiles = down.tiles * across.tiles
    # With a bias the heads differ in their masks and lead; without one they share it, like the images of the batch.
    lead, follow = (tiles * heads, batch) if bias is not None else (tiles, heads * batch)
    asked, seen = down.tile * across.tile, down.span * across.span
    queries = _tiles(query, down, across).reshape(lead, follow, asked, size)
    keys = _halos(key, down, across).reshape(lead, follow, seen, size)
    values = _halos(value, down, across).reshape(lead, follow, seen, size)
    mask = _mask(down, across, bias, query).reshape(lead, 1, asked, seen)
    if _fused_kernels_serve(query, key, value, bias):
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, scale=scale)
    else:
        out = _written_out(queries, keys, values, mask, scale)
    out = out.reshape(down.tiles, across.tiles, heads, batch, down.tile, across.tile, size)
    out = out.permute(3, 0, 4, 1, 5, 2, 6).reshape(batch, down.covered, across.covered, heads, size)
    return out[:, :height, :width]


def _written_out(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    dtype = queries.dtype
    if dtype in (torch.float16, torch.bfloat16):  # as fused kernels do: products and sums in single precision
        queries, keys, values, mask = (tensor.float() for tensor in (queries, keys, values, mask))
    logits = (queries * scale) @ keys.transpose(-2, -1)
    logits = logits + mask if transformed(queries, keys, mask) else logits.add_(mask)
    return (logits.softmax(-1) @ values).to(dtype)


def _tiles(tensor: Tensor, down: Tiling, across: Tiling) -> Tensor:
    """Queries by tile: (tiles down, tiles across, heads, B, rows, columns, D)."""
    over = (down.covered - tensor.shape[1], across.covered - tensor.shape[2])
    tensor = F.pad(tensor, (0, 0, 0, 0, 0, over[1], 0, over[0])) if any(over) else tensor
    tensor = tensor.unflatten(2, (across.tiles, across.tile)).unflatten(1, (down.tiles, down.tile))
    return tensor.permute(1, 3, 5, 0, 2, 4, 6)


def _halos(tensor: Tensor, down: Tiling, across: Tiling) -> Tensor:
    """Keys by tile, each with its halo: (tiles down, tiles across, heads, B, rows, columns, D)."""
    above, beside = down.field.padding, across.field.padding
    tensor = F.pad(tensor, (0, 0, 0, 0, beside, beside, above, above)) if above or beside else tensor
    tensor = _spans(_spans(tensor, 2, across), 1, down)
    return tensor.permute(1, 3, 5, 0, 2, 4, 6)


def _spans(tensor: Tensor, axis: int, tiling: Tiling) -> Tensor:
    """The axis cut into overlapping spans, one a tile."""
    if tiling.tiles == 1:
        return tensor.unsqueeze(axis)  # the one span is the whole axis
    begins = torch.tensor(tiling.begins, device=tensor.device)
    keys = begins[:, None] + torch.arange(tiling.span, device=tensor.device)
    # A gather whose derivative is a sum of slices: faster there than the strided view of `unfold`.
    return tensor.index_select(axis, keys.flatten()).unflatten(axis, (tiling.tiles, tiling.span))


def _mask(down: Tiling, across: Tiling, bias: Tensor | None, like: Tensor) -> Tensor:
    """What is added to the logits of each tile: the bias in a query's slots, −∞ outside them.

    (tiles down, tiles across, heads or 1, rows, columns, key rows, key columns). Tiles that lie alike share a pattern;
    the bias is looked up once a pattern.
    """
    window = down.field.window
    slots = [tiling.slots(like.device) for tiling in (down, across)]  # (patterns, queries, keys), each
    taken = [(slot >= 0) & (slot < window) for slot in slots]
    outside = ~(taken[0][:, None, None, :, None, :, None] & taken[1][None, :, None, None, :, None, :])
    if bias is None:
        mask = torch.zeros(outside.shape, device=like.device, dtype=like.dtype)
    else:
        lookup = [slot.clamp(0, window - 1).flatten() for slot in slots]
        mask = bias.to(like.dtype).index_select(1, lookup[0]).index_select(2, lookup[1])
        mask = mask.unflatten(2, slots[1].shape).unflatten(1, slots[0].shape).permute(1, 4, 0, 2, 5, 3, 6)
    mask = mask.masked_fill(outside, float("-inf"))
    for axis, tiling in enumerate((down, across)):
        mask = mask.index_select(axis, torch.tensor(tiling.patterns, device=like.device))
    return mask


def _fused_kernels_serve(*tensors: Tensor | None) -> bool:
    """Whether only values are wanted: no derivative of any kind, and no transform of `torch.func` under way."""
    given = [tensor for tensor in tensors if tensor is not None]
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)) and not transformed(*given)


def transformed(*tensors: Tensor | None) -> bool:
    """Whether a transform of `torch.func` or forward-mode differentiation is under way, which kernels know nothing of."""
    if torch.compiler.is_compiling():
        return False
    if torch._C._are_functorch_transforms_active():
        return True
    return any(forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors if tensor is not None)
