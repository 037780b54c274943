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

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from spatially.nn.regular_attention.field import Field
from spatially.nn.regular_attention.tiling import Tiling, best

# Logits of a block: 1 MB in single precision, which the caches of two cores hold with all that is made of it.
BLOCK = 2**18


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, rows: Field, columns: Field, bias: Tensor | None, scale: float
) -> Tensor:
    """Attention of each query over its square; bias (heads, window, window)."""
    down, across = best(rows), best(columns)
    maps = [_over_the_end(query, down, across), *(_with_border(part, down, across) for part in (key, value))]
    mask = _mask(down, across, bias, query)
    recorded = torch.compiler.is_compiling() or torch.jit.is_tracing()
    some = recorded or len(query) > 0  # of no images, fused kernels of PyTorch 2.11 end the process
    if query.device.type == "cpu" and some and not recorded and not transformed(query, key, value, bias):
        out: Tensor = _ByBlock.apply(*map(for_backward, maps), mask, down, across, scale)
    else:
        fused = some and _fused_kernels_serve(query, key, value, bias)
        out = _at_once(maps, mask, down, across, scale, fused=fused)
    return out[:, : rows.length, : columns.length]


def _at_once(maps: list[Tensor], mask: Tensor, down: Tiling, across: Tiling, scale: float, *, fused: bool) -> Tensor:
    """All tiles in one product; maps: query, key and value."""
    query, key, value = maps
    batch, *_, heads, size = query.shape
    patterns = torch.tensor(_patterns(down, across), device=mask.device)
    mask = mask.index_select(1, patterns).transpose(0, 1).flatten(0, 1).unsqueeze(1)
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


def for_backward(part: Tensor) -> Tensor:
    """A copy of what was made in inference mode, which autograd refuses to keep even where the bias alone learns."""
    if torch.compiler.is_compiling():  # which cannot ask, and makes tensors of its own
        return part
    return part.clone() if part.is_inference() and torch.is_grad_enabled() else part


class _ByBlock(torch.autograd.Function):
    """The same, block by block: some images of some tiles that share a pattern."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, down: Tiling, across: Tiling, scale: float
    ) -> Tensor:
        given = query, key, value, mask
        ctx.options = down, across, scale
        mask = mask.detach()  # fused kernels refuse one that learns
        blocks, images = ctx.blocks = _blocks(query, down, across)
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
        kept = []
        for target, *parts in zip(*(part.split(images) for part in (out, query, key, value)), strict=True):
            (asked,), seen = _heads_first(parts[:1], mask.dtype), _heads_first(parts[1:], mask.dtype)
            if any(ctx.needs_input_grad):
                kept += [asked, seen]
            result = torch.empty_like(asked)
            for pattern, queries_at, keys_at in blocks:
                queries, keys, values = (_matrices(asked, queries_at), *_matrices(seen, keys_at))
                added = mask[:, pattern].unsqueeze(1)
                found = F.scaled_dot_product_attention(queries, keys, values, attn_mask=added, scale=scale)
                result.index_copy_(2, queries_at.flatten(), _planes(found, queries_at))
            target.copy_(_heads_last(result, query))
        ctx.save_for_backward(*given, *kept)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        with torch.autocast(gradient.device.type, enabled=False):  # as forward, whoever asks for the gradient
            return _ByBlock._backward(ctx, gradient)

    @staticmethod
    def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or transformed(gradient):
            return *_derivatives(ctx, gradient), None, None, None
        query, key, value, mask, *kept = ctx.saved_tensors
        *_, scale = ctx.options
        blocks, images = ctx.blocks
        mask_slope = torch.zeros_like(mask)
        found = []
        for asked, seen, slope in zip(kept[::2], kept[1::2], gradient.split(images), strict=True):
            (came,) = _heads_first([slope], mask.dtype)
            dq, (dk, dv) = torch.empty_like(asked), torch.zeros_like(seen)
            for pattern, queries_at, keys_at in blocks:
                queries, gradients = _matrices(asked, queries_at), _matrices(came, queries_at)
                keys, values = _matrices(seen, keys_at)
                weights = (queries.mul_(scale) @ keys.mT).add_(mask[:, pattern].unsqueeze(1)).softmax(-1)
                slopes = torch.ops.aten._softmax_backward_data(gradients @ values.mT, weights, -1, mask.dtype)
                if ctx.needs_input_grad[3]:
                    mask_slope[:, pattern] += slopes.sum(1)
                dq.index_copy_(2, queries_at.flatten(), _planes(slopes @ keys, queries_at))
                dk.index_add_(2, keys_at.flatten(), _planes(slopes.mT @ queries, keys_at))
                dv.index_add_(2, keys_at.flatten(), _planes(weights.mT @ gradients, keys_at))
            pairs = (dq.mul_(scale), query), (dk, key), (dv, value)
            found.append([_heads_last(part, like).to(like.dtype) for part, like in pairs])
        whole = found[0] if len(found) == 1 else [torch.cat(parts) for parts in zip(*found, strict=True)]
        return *whole, mask_slope, None, None, None


def _derivatives(ctx: Any, gradient: Tensor) -> list[Tensor | None]:
    """The gradients as something that can itself be differentiated."""
    again, wanted = torch.is_grad_enabled(), ctx.needs_input_grad[:4]
    with torch.enable_grad():
        inputs = [part.view_as(part) for part in ctx.saved_tensors[:4]]  # apart, even where they are one tensor
        out = _at_once(inputs[:3], inputs[3], *ctx.options, fused=False)
        learning = [part for part, want in zip(inputs, wanted, strict=True) if want]
        found = iter(torch.autograd.grad(out, learning, gradient, create_graph=again))
    return [next(found) if want else None for want in wanted]


def _blocks(query: Tensor, down: Tiling, across: Tiling) -> tuple[list[tuple[int, Tensor, Tensor]], int]:
    """For each block its pattern, and which pixels its queries and keys are, (tiles, pixels) each; and how many images."""
    batch, *_, heads, _ = query.shape
    queries_at, keys_at = (
        (rows[:, None, :, None] * length + columns[:, None]).flatten(0, 1).flatten(1)
        for rows, columns, length in (
            (down.queries(), across.queries(), across.covered),
            (down.keys(), across.keys(), across.field.keys),
        )
    )
    tile = heads * queries_at.shape[1] * keys_at.shape[1]
    images = max(min(BLOCK // tile, batch), 1)
    tiles = -(-BLOCK // (tile * images))
    alike: dict[int, list[int]] = {}
    for number, pattern in enumerate(_patterns(down, across)):
        alike.setdefault(pattern, []).append(number)
    blocks = [
        (pattern, queries_at[some], keys_at[some])
        for pattern, numbers in alike.items()
        for some in torch.tensor(numbers).chunk(-(-len(numbers) // tiles))
    ]
    return blocks, images


def _heads_first(maps: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Maps of one shape (B, H, W, heads, D) together: (maps, heads, B, pixels, D)."""
    batch, height, width, heads, size = maps[0].shape
    planes = maps[0].new_empty(len(maps), heads, batch, height, width, size, dtype=dtype)
    for plane, part in zip(planes, maps, strict=True):  # copies that all cores share, as those of `stack` are not
        plane.copy_(part.permute(3, 0, 1, 2, 4))
    return planes.flatten(3, 4)


def _heads_last(planes: Tensor, like: Tensor) -> Tensor:
    """(heads, B, pixels, D) as (B, H, W, heads, D)."""
    return planes.unflatten(2, like.shape[1:3]).permute(1, 2, 3, 0, 4)


def _matrices(planes: Tensor, pixels: Tensor) -> Tensor:
    """The pixels of each tile, of maps (…, heads, B, pixels, D): (…, heads, B·tiles, pixels, D)."""
    return planes.index_select(-2, pixels.flatten()).unflatten(-2, pixels.shape).flatten(-4, -3)


def _planes(matrices: Tensor, pixels: Tensor) -> Tensor:
    """The pixels of all tiles in a row: (heads, B, pixels, D)."""
    heads, many, _, size = matrices.shape
    return matrices.view(heads, many // len(pixels), pixels.numel(), size)


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
    # A gather whose derivative is a sum of slices: faster there than the strided view of `unfold`.
    return tensor.index_select(axis, tiling.keys(tensor.device).flatten()).unflatten(axis, (tiling.tiles, tiling.span))


def _mask(down: Tiling, across: Tiling, bias: Tensor | None, like: Tensor) -> Tensor:
    """What is added to the logits of a tile: the bias in a query's slots, −∞ outside them.

    (heads or 1, patterns, queries, keys), at least in single precision. Tiles that lie alike share a pattern.
    """
    window = down.field.window
    dtype = torch.promote_types(like.dtype, torch.float32)
    rows, columns = (tiling.slots(like.device) for tiling in (down, across))  # (patterns, queries, keys), each
    rows, columns = rows[:, None, :, None, :, None], columns[:, None, :, None, :]
    inside = (rows >= 0) & (rows < window) & (columns >= 0) & (columns < window)
    slots = torch.where(inside, rows * window + columns, window * window).flatten(4).flatten(2, 3).flatten(0, 1)
    table = torch.zeros(1, window**2, device=like.device, dtype=dtype) if bias is None else bias.to(dtype).flatten(1)
    table = F.pad(table, (0, 1), value=float("-inf"))  # the slot of all that lies outside
    return table.index_select(1, slots.flatten()).unflatten(1, slots.shape)


def _patterns(down: Tiling, across: Tiling) -> list[int]:
    """For each tile the number of its pattern in the mask, row by row."""
    rows, columns = down.patterns, across.patterns
    distinct = max(columns) + 1
    return [row * distinct + column for row in rows for column in columns]


def _fused_kernels_serve(*tensors: Tensor | None) -> bool:
    """Whether only values are wanted: no derivative of any kind, and no transform of `torch.func` under way."""
    given = [tensor for tensor in tensors if tensor is not None]
    return not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)) and not transformed(*given)


def transformed(*tensors: Tensor | None) -> bool:
    """Whether a transform of `torch.func`, forward-mode differentiation or `is_grads_batched` is under way.

    Kernels know nothing of them.
    """
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return True
    if torch.compiler.is_compiling():  # which cannot ask further
        return False
    return any(torch._C._functorch.is_legacy_batchedtensor(tensor) for tensor in tensors if tensor is not None)
