r"""Query-centred attention by compact tiles: neighbouring queries share most of their keys.

The grid is cut into tiles of queries. A tile of t×t queries with a window w needs the (t + w − 1)² keys around it, its
halo; all its logits are one matrix product, and what lies outside a query's own square is masked. That is more
arithmetic than the definition (196 keys for 49 at t = 8, w = 7), all of it in matrix products, and far fewer bytes: each
key is copied (t + w − 1)² / t² times, not w². Memory grows with pixels.

A CPU takes the tiles block by block: what a block needs stays in the caches, and its memory is used again by the next.
Forward runs `scaled_dot_product_attention`. Backward makes the weights P of a tile again, from its queries Q, keys K,
values V and mask M; with G the gradient of its output,

.. math:: P = \mathrm{softmax}(\mathrm{scale}\; Q K^\top + M), \quad
          dM = P \odot (G V^\top - \mathrm{rowsum}(P \odot G V^\top)), \\
          dQ = \mathrm{scale}\; dM\, K, \quad dK = \mathrm{scale}\; dM^\top Q, \quad dV = P^\top G,

and the gradient of a key is summed over the halos it lies in. Other devices, compiled graphs, transforms of `torch.func`
and second derivatives take all tiles at once and the formula written out, since fused kernels have no second derivative
and none with respect to the bias.
"""

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from spatially.nn.regular_attention.field import Field
from spatially.nn.regular_attention.tiling import Tiling, best

BLOCK = 2**19  # logits of a block: 2 MB in single precision

Places = list[tuple[slice, slice]]


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, rows: Field, columns: Field, bias: Tensor | None, scale: float
) -> Tensor:
    """Attention of each query over its square; bias (heads, window, window)."""
    down, across = best(rows), best(columns)
    asked, seen = _over_the_end(query, down, across), [_with_border(part, down, across) for part in (key, value)]
    mask = _mask(down, across, bias, query)
    by_block = query.device.type == "cpu" and not torch.compiler.is_compiling()
    if by_block and not transformed(query, key, value, bias):
        out: Tensor = _ByBlock.apply(asked, *seen, mask, down, across, scale)  # type: ignore[no-untyped-call]
    else:
        fused = _fused_kernels_serve(query, key, value, bias)
        out = _at_once(asked, *seen, mask, down, across, scale, fused=fused)
    return out[:, : rows.length, : columns.length]


def _at_once(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, down: Tiling, across: Tiling, scale: float, *, fused: bool
) -> Tensor:
    """All tiles in one product."""
    batch, *_, heads, size = query.shape
    mask = mask.index_select(0, _patterns(down, across, mask.device)).flatten(0, 1).unsqueeze(1)
    # With a bias the heads differ in their masks and lead; without one they share it, like the images of the batch.
    lead, follow = len(mask), down.tiles * across.tiles * heads * batch // len(mask)
    queries = query.unflatten(2, (across.tiles, across.tile)).unflatten(1, (down.tiles, down.tile))
    parts = [queries, *(_spans(_spans(part, 2, across), 1, down) for part in (key, value))]
    queries, keys, values = (
        part.permute(1, 3, 5, 0, 2, 4, 6).reshape(lead, follow, part.shape[2] * part.shape[4], size) for part in parts
    )
    if fused:
        out = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask.to(query.dtype), scale=scale)
    else:  # as fused kernels do: products and sums of half precision in single
        queries, keys, values = (part.to(mask.dtype) for part in (queries, keys, values))
        logits = (queries * scale) @ keys.transpose(-2, -1)
        logits = logits + mask if transformed(queries, keys, mask) else logits.add_(mask)
        out = (logits.softmax(-1) @ values).to(query.dtype)
    out = out.reshape(down.tiles, across.tiles, heads, batch, down.tile, across.tile, size)
    return out.permute(3, 0, 4, 1, 5, 2, 6).reshape(query.shape)


class _ByBlock(torch.autograd.Function):
    """The same, block by block."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, down: Tiling, across: Tiling, scale: float
    ) -> Tensor:
        ctx.save_for_backward(query, key, value, mask)
        ctx.options = down, across, scale
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        for images, asked, seen, patterns in _blocks(query, mask, down, across):
            added = mask.index_select(0, patterns).flatten(0, 1).unsqueeze(1)
            queries = _gather(query[images], asked, len(added))
            keys, values = (_gather(part[images], seen, len(added)) for part in (key, value))
            found = F.scaled_dot_product_attention(queries, keys, values, attn_mask=added, scale=scale)
            for target, part in _tiles(out[images], asked, found):
                target.copy_(part)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, (down, across, scale) = ctx.saved_tensors, ctx.options
        if torch.is_grad_enabled() or transformed(gradient):
            return *_derivatives(inputs, ctx.needs_input_grad, gradient, ctx.options), None, None, None
        query, key, value, mask = inputs
        dq, dk, dv, dm = (torch.zeros(part.shape, dtype=mask.dtype) for part in inputs)
        for images, asked, seen, patterns in _blocks(query, mask, down, across):
            added = mask.index_select(0, patterns).flatten(0, 1).unsqueeze(1)
            queries, gradients = (_gather(part[images], asked, len(added)).to(mask.dtype) for part in (query, gradient))
            keys, values = (_gather(part[images], seen, len(added)).to(mask.dtype) for part in (key, value))
            queries *= scale
            weights = (queries @ keys.mT).add_(added).softmax(-1)
            slopes = torch.ops.aten._softmax_backward_data(gradients @ values.mT, weights, -1, mask.dtype)
            if ctx.needs_input_grad[3]:
                dm.index_add_(0, patterns, slopes.sum(1).unflatten(0, (len(patterns), -1)))
            for target, part in _tiles(dq[images], asked, slopes @ keys):
                torch.mul(part, scale, out=target)
            for whole, found in ((dk, slopes.mT @ queries), (dv, weights.mT @ gradients)):
                for target, part in _tiles(whole[images], seen, found):
                    target.add_(part)
        return dq.to(query.dtype), dk.to(query.dtype), dv.to(query.dtype), dm, None, None, None


def _derivatives(
    inputs: tuple[Tensor, ...], wanted: tuple[bool, ...], gradient: Tensor, options: tuple[Tiling, Tiling, float]
) -> list[Tensor | None]:
    """The gradients as something that can be differentiated again."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        apart = [part.view_as(part) for part in inputs]  # even where query, key and value are one tensor
        out = _at_once(*apart, *options, fused=False)
        learning = [part for part, want in zip(apart, wanted, strict=False) if want]
        found = iter(torch.autograd.grad(out, learning, gradient, create_graph=again))
    return [next(found) if want else None for want in wanted[: len(inputs)]]


def _blocks(
    query: Tensor, mask: Tensor, down: Tiling, across: Tiling
) -> Iterator[tuple[slice, Places, Places, Tensor]]:
    """Some images, some tiles: where those lie among the queries and their halos among the keys, and their patterns."""
    batch, heads = len(query), query.shape[3]
    tile = heads * mask.shape[2] * mask.shape[3]
    images = max(min(BLOCK // tile, batch), 1)
    tiles = max(BLOCK // (tile * images), 1)
    patterns = _patterns(down, across, query.device)
    asked, seen = (
        [(slice(y, y + high), slice(x, x + wide)) for y in rows for x in columns]
        for rows, high, columns, wide in (
            (range(0, down.covered, down.tile), down.tile, range(0, across.covered, across.tile), across.tile),
            (down.begins, down.span, across.begins, across.span),
        )
    )
    for first in range(0, len(asked), tiles):
        some = slice(first, first + tiles)
        for image in range(0, batch, images):
            yield slice(image, image + images), asked[some], seen[some], patterns[some]


def _gather(tensor: Tensor, places: Places, lead: int) -> Tensor:
    """The pixels at these places, as matrices: (lead, all others of tiles, heads and images, pixels, D)."""
    parts = torch.stack([tensor[:, rows, columns].permute(3, 0, 1, 2, 4) for rows, columns in places])
    return parts.reshape(lead, parts[..., 0, 0, 0].numel() // lead, parts.shape[3] * parts.shape[4], parts.shape[5])


def _tiles(tensor: Tensor, places: Places, found: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """For each of these places the pixels there, and what was found for them."""
    batch, *_, heads, size = tensor.shape
    for (rows, columns), part in zip(places, found.view(len(places), heads, batch, -1, size), strict=True):
        target = tensor[:, rows, columns]
        yield target, part.unflatten(2, target.shape[1:3]).permute(1, 2, 3, 0, 4)


def _over_the_end(query: Tensor, down: Tiling, across: Tiling) -> Tensor:
    """Queries with zeros where tiles reach over the end."""
    below, beside = down.covered - query.shape[1], across.covered - query.shape[2]
    return F.pad(query, (0, 0, 0, 0, 0, beside, 0, below)) if below or beside else query


def _with_border(tensor: Tensor, down: Tiling, across: Tiling) -> Tensor:
    """Keys or values with the zeros that lie around the image."""
    above, beside = down.field.padding, across.field.padding
    return F.pad(tensor, (0, 0, 0, 0, beside, beside, above, above)) if above or beside else tensor


def _spans(tensor: Tensor, axis: int, tiling: Tiling) -> Tensor:
    """The axis cut into overlapping spans, one a tile."""
    if tiling.tiles == 1:
        return tensor.unsqueeze(axis)  # the one span is the whole axis
    begins = torch.tensor(tiling.begins, device=tensor.device)
    keys = begins[:, None] + torch.arange(tiling.span, device=tensor.device)
    # A gather whose derivative is a sum of slices: faster there than the strided view of `unfold`.
    return tensor.index_select(axis, keys.flatten()).unflatten(axis, (tiling.tiles, tiling.span))


def _mask(down: Tiling, across: Tiling, bias: Tensor | None, like: Tensor) -> Tensor:
    """What is added to the logits of a tile: the bias in a query's slots, −∞ outside them.

    (patterns, heads or 1, queries, keys), at least in single precision. Tiles that lie alike share a pattern.
    """
    window = down.field.window
    dtype = torch.promote_types(like.dtype, torch.float32)
    slots = [tiling.slots(like.device) for tiling in (down, across)]  # (patterns, queries, keys), each
    taken = [(slot >= 0) & (slot < window) for slot in slots]
    outside = ~(taken[0][:, None, None, :, None, :, None] & taken[1][None, :, None, None, :, None, :])
    if bias is None:
        mask = torch.zeros(outside.shape, device=like.device, dtype=dtype)
    else:
        lookup = [slot.clamp(0, window - 1).flatten() for slot in slots]
        mask = bias.to(dtype).index_select(1, lookup[0]).index_select(2, lookup[1])
        mask = mask.unflatten(2, slots[1].shape).unflatten(1, slots[0].shape).permute(1, 4, 0, 2, 5, 3, 6)
    return mask.masked_fill(outside, float("-inf")).flatten(5, 6).flatten(3, 4).flatten(0, 1)


def _patterns(down: Tiling, across: Tiling, device: torch.device) -> Tensor:
    """For each tile the number of its pattern in the mask, row by row."""
    distinct = max(across.patterns) + 1
    return torch.tensor([one * distinct + other for one in down.patterns for other in across.patterns], device=device)


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
