"""The kernels as an operation of PyTorch: `spatially::regular_attention`, with its derivative, fake form and FLOP formula.

It takes the projections as they come: one packed (B, H, W, 3, heads, D); or queries and values packed (B, H, W, 2, heads, D)
with the keys apart; or three tensors (B, H, W, heads, D). Gradients come back in the same form, without a copy. Forward keeps
the output and one log-sum-exp a query. Further derivatives, and those of many gradients at once, are taken of the tiled
path, which PyTorch can differentiate.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from spatially.nn.regular_attention import tiled
from spatially.nn.regular_attention.field import Field
from spatially.nn.regular_attention.launch import launch_for
from spatially.nn.regular_attention.projections import unpack

LOG2E = 1.4426950408889634
LARGEST_BATCH = 65535  # images of one launch


def readable(tensor: Tensor) -> Tensor:
    """The tensor itself where descriptors can read it (addresses in steps of 16 bytes, channels side by side), or a copy."""
    if tensor.data_ptr() % 16 == 0 and _in_steps(tensor.shape, tensor.stride(), tensor.itemsize):
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


@lru_cache(maxsize=4096)
def _in_steps(shape: torch.Size, strides: tuple[int, ...], size: int) -> bool:
    steps = [step for length, step in zip(shape[:-1], strides[:-1], strict=True) if length > 1]
    return strides[-1] == 1 and all(step and step * size % 16 == 0 for step in steps)


@torch.library.custom_op("spatially::regular_attention", mutates_args=())
def attention(
    projections: list[Tensor], bias: Tensor | None, window: int, border: str, scale: float
) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp (to base 2) of every query: (B, heads, H, W)."""
    if len(projections[0]) > LARGEST_BATCH:
        pieces = zip(*(part.split(LARGEST_BATCH) for part in projections), strict=True)
        outs, lses = zip(*(attention(list(piece), bias, window, border, scale) for piece in pieces), strict=True)
        return torch.cat(outs), torch.cat(lses)
    query, key, value = (readable(part) for part in unpack(projections))
    batch, height, width, heads, _ = query.shape
    out = torch.empty(query.shape, device=query.device, dtype=query.dtype)
    lse = torch.empty(batch, heads, height, width, device=query.device, dtype=torch.float32)
    if query.numel():
        launch = launch_for("forward", query, bias, window, border)
        limit = 2.0**14 if query.dtype == torch.float16 else 2.0**64  # of a sum whose parts the dtype still holds
        launch((query, key, value, launch.table(bias, scale, query), out, lse), scale * LOG2E, LIMIT=limit)
    return out, lse


@attention.register_fake
def _(projections: list[Tensor], bias: Tensor | None, window: int, border: str, scale: float) -> tuple[Tensor, Tensor]:
    query = unpack(projections)[0]
    batch, height, width, heads, _ = query.shape
    return (
        torch.empty(query.shape, device=query.device, dtype=query.dtype),
        query.new_empty(batch, heads, height, width, dtype=torch.float32),
    )


@torch.library.custom_op("spatially::regular_attention_backward", mutates_args=())
def backward(
    projections: list[Tensor], bias: Tensor | None, out: Tensor, lse: Tensor, gradient: Tensor,
    window: int, border: str, scale: float, learns: bool,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    """Gradients of the projections, and of the bias (empty where it does not learn)."""
    if len(projections[0]) > LARGEST_BATCH:
        pieces = zip(*(part.split(LARGEST_BATCH) for part in (*projections, out, lse, gradient)), strict=True)
        found = [
            backward(list(piece[:-3]), bias, *piece[-3:], window, border, scale, learns) for piece in pieces
        ]  # fmt: skip
        parts = [torch.cat(part) for part in zip(*(one for one, _ in found), strict=True)]
        return parts, torch.stack([one for _, one in found]).sum(0)
    query, key, value = (readable(part) for part in unpack(projections))
    gradients = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in projections]
    empty = query.new_empty(0, dtype=torch.float32)
    if not query.numel():
        return gradients, torch.zeros_like(bias) if learns and bias is not None else empty
    dq, dk, dv = unpack(gradients)
    gradient = readable(gradient)
    delta = torch.empty_like(lse)
    launch = launch_for("backward_queries", query, bias, window, border)
    table = launch.table(bias, scale, query)
    launch((query, key, value, table, out, lse, gradient, dq, delta), scale * LOG2E, scale)
    launch = launch_for("backward_keys", query, bias, window, border)
    table = launch.table(bias, scale, query)
    launch((query, key, value, table, lse, gradient, delta, dk, dv), scale * LOG2E, scale)
    if not learns or bias is None:
        return gradients, empty
    return gradients, _bias_gradient(query, key, value, bias, lse, gradient, delta, window, border, scale)


def _bias_gradient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, lse: Tensor, gradient: Tensor, delta: Tensor,
    window: int, border: str, scale: float,
) -> Tensor:  # fmt: skip
    """Sums of many programs, in one order: the same bits each time."""
    launch = launch_for("backward_bias", query, bias, window, border)
    heads, shape, slots = query.shape[3], launch.shape, triton.next_power_of_2(window * window)
    chunks, pairs = shape.chunks(window), (shape.rows * shape.columns, shape.chunk * launch.key_columns)
    partial = torch.empty(
        math.prod(launch.grid), slots if border == "shift" else math.prod(pairs),
        device=query.device, dtype=torch.float32,
    )  # fmt: skip
    table = launch.table(bias, scale, query)
    launch(
        (query, key, value, table, lse, gradient, delta, partial), scale * LOG2E, STEPS=shape.steps, SLOTS=slots
    )  # fmt: skip
    summed = partial.view(-1, heads, chunks, partial.shape[1]).sum(0)
    if border == "shift":
        table = summed.sum(1)[:, : window * window]
    else:
        by_pair = summed.view(heads, chunks, *pairs).transpose(1, 2).reshape(heads, -1)
        table = (
            by_pair.double() @ (launch.slots[:, None] == torch.arange(window * window, device=query.device)).double()
        )
    return table.reshape(bias.shape).to(bias.dtype)


@backward.register_fake
def _(
    projections: list[Tensor], bias: Tensor | None, out: Tensor, lse: Tensor, gradient: Tensor,
    window: int, border: str, scale: float, learns: bool,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in projections]
    return parts, torch.empty_like(bias) if learns and bias is not None else out.new_empty(0, dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    projections, bias, window, border, scale = inputs
    ctx.save_for_backward(*projections, *([] if bias is None else [bias]), *output)
    ctx.count, ctx.biased = len(projections), bias is not None
    ctx.options = (window, border, scale)
    ctx.mark_non_differentiable(output[1])


def _differentiate(context: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    saved = context.saved_tensors
    projections, bias = list(saved[: context.count]), saved[context.count] if context.biased else None
    learns = context.biased and context.needs_input_grad[1]  # asked here: forward counts each projection by itself
    if tiled.transformed(gradient):
        parts, bias_gradient = _differentiate_transformed(context, gradient, learns)
        return parts, bias_gradient, None, None, None
    parts, bias_gradient = backward(projections, bias, *saved[-2:], gradient, *context.options, learns)
    return parts, bias_gradient if learns else None, None, None, None


def _differentiate_transformed(context: Any, gradient: Tensor, learns: bool) -> tuple[list[Tensor], Tensor | None]:
    """The derivative for many gradients at once, or along a tangent: of the tiled path."""
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs = [_apart(tensor) for tensor in context.saved_tensors[:-2]]
        projections, bias = inputs[: context.count], inputs[context.count] if context.biased else None
        wanted = inputs if learns else projections
        found = _tiled_gradients(projections, bias, gradient, context.options, wanted, again=again)
    return list(found[: context.count]), found[-1] if learns else None


attention.register_autograd(_differentiate, setup_context=_save)


def _save_again(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    projections, bias, _, _, gradient, window, border, scale, learns = inputs
    ctx.save_for_backward(*projections, *([] if bias is None else [bias]), gradient)
    ctx.count, ctx.biased, ctx.learns = len(projections), bias is not None, learns
    ctx.options = (window, border, scale)


def _differentiate_again(context: Any, parts: list[Tensor], bias_gradient: Tensor) -> tuple[Any, ...]:
    """The derivative of the derivative, of the tiled path; with a graph of its own where a further one is wanted."""
    *saved, gradient = context.saved_tensors
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        inputs, slope = [_apart(tensor) for tensor in saved], _apart(gradient)
        given = [*parts, *([bias_gradient] if context.learns else [])]
        pairs = [(one, other) for one, other in zip(inputs, given, strict=False) if other is not None]
        projections, bias = inputs[: context.count], inputs[context.count] if context.biased else None
        wanted = [one for one, _ in pairs]
        first = _tiled_gradients(projections, bias, slope, context.options, wanted, again=True)
    second = torch.autograd.grad(
        first, [*inputs, slope], [other for _, other in pairs], allow_unused=True, create_graph=again
    )
    *firsts, last = second
    bias_part = firsts[context.count] if context.biased else None
    return firsts[: context.count], bias_part, None, None, last, None, None, None, None


def _apart(tensor: Tensor) -> Tensor:
    """The same numbers, to differentiate by: apart from other uses of the tensor, and linked to what it was made of."""
    part = tensor.view_as(tensor)
    return part if part.requires_grad else part.requires_grad_()


def _tiled_gradients(
    projections: Sequence[Tensor], bias: Tensor | None, gradient: Tensor, options: tuple[int, str, float],
    wanted: Sequence[Tensor], *, again: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Gradients of the tiled path, in the kernels' own precision."""
    window, border, scale = options
    query, key, value = unpack(projections)
    rows, columns = (Field(length, window, border) for length in query.shape[1:3])
    with torch.autocast(query.device.type, enabled=False):
        out = tiled.attend(query, key, value, rows=rows, columns=columns, bias=bias, scale=scale)
        return torch.autograd.grad(out, wanted, gradient, create_graph=again)


backward.register_autograd(_differentiate_again, setup_context=_save_again)


@register_flop_formula(torch.ops.spatially.regular_attention)
def _flops(projections: list[Any], bias: Any, window: int, *_: Any, **__: Any) -> int:
    """Two products of every query with its square."""
    return 2 * _product(projections, window)


@register_flop_formula(torch.ops.spatially.regular_attention_backward)
def _backward_flops(
    projections: list[Any], bias: Any, out: Any, lse: Any, gradient: Any, window: int, *_: Any, **__: Any
) -> int:
    """Five products: the logits again, and the gradients of values, weights, queries and keys."""
    return 5 * _product(projections, window)


def _product(projections: list[Any], window: int) -> int:
    shape = projections[0]
    batch, height, width, *_, heads, size = shape
    return 2 * batch * height * width * heads * size * window**2


def attend(projections: Sequence[Tensor], *, rows: Field, bias: Tensor | None, scale: float) -> Tensor:
    """Attention of each query over its square, of projections in any of their forms; bias (heads, window, window)."""
    projections = [tiled.for_backward(part) for part in projections]
    bias = None if bias is None else tiled.for_backward(bias)
    size, step = projections[0].shape[-1], 16 // projections[0].element_size()
    if not size % step:
        return attention(projections, bias, rows.window, rows.border, scale)[0]
    # Descriptors read 16 bytes at a time; further channels of 0 change nothing.
    wider = [F.pad(part, (0, -size % step)) for part in projections]
    return attention(wider, bias, rows.window, rows.border, scale)[0][..., :size]
