"""The kernels as an operation of PyTorch: `spatially::regular_attention`, with its derivative, fake form and FLOP formula.

It takes the projections as they come: one packed (B, H, W, 3, heads, D); or queries and values packed (B, H, W, 2, heads, D)
with the keys apart; or three tensors (B, H, W, heads, D). Gradients come back in the same form, without a copy. Forward keeps
the output and one log-sum-exp a query. A second derivative is taken of the tiled path, which PyTorch can differentiate.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from spatially.nn.regular_attention import kernels, tiled
from spatially.nn.regular_attention.field import BORDERS, Field
from spatially.nn.regular_attention.shapes import Shape, choose

LOG2E = 1.4426950408889634


def unpack(projections: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value as views."""
    if len(projections) == 1:
        query, key, value = projections[0].unbind(3)
    elif len(projections) == 2:
        query, value = projections[0].unbind(3)
        key = projections[1]
    else:
        query, key, value = projections
    return query, key, value


@torch.library.custom_op("spatially::regular_attention", mutates_args=())
def attention(
    projections: list[Tensor], bias: Tensor | None, window: int, border: str, scale: float
) -> tuple[Tensor, Tensor]:
    """The output, and the log-sum-exp (to base 2) of every query: (B, heads, H, W)."""
    query, key, value = unpack(projections)
    batch, height, width, heads, _ = query.shape
    out = torch.empty(query.shape, device=query.device, dtype=query.dtype)
    lse = torch.empty(batch, heads, height, width, device=query.device, dtype=torch.float32)
    if not query.numel():
        return out, lse
    grid, place, launch = _launch("forward", query, window, border)
    kernels.forward[grid](
        query, key, value, query if bias is None else bias, out, lse,
        *query.stride()[:4], *key.stride()[:4], *value.stride()[:4], *place, scale * LOG2E,
        BIAS=bias is not None, **launch,
    )  # fmt: skip
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
    query, key, value = unpack(projections)
    gradients = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in projections]
    empty = query.new_empty(0, dtype=torch.float32)
    if not query.numel():
        return gradients, torch.zeros_like(bias) if learns and bias is not None else empty
    dq, dk, dv = unpack(gradients)
    if gradient.stride(-1) != 1:
        gradient = gradient.contiguous()
    delta = torch.empty_like(lse)
    pointer = query if bias is None else bias
    strides = (*query.stride()[:4], *key.stride()[:4], *value.stride()[:4], *gradient.stride()[:4])
    grid, place, launch = _launch("backward_queries", query, window, border)
    kernels.backward_queries[grid](
        query, key, value, pointer, out, lse, gradient, dq, delta,
        *strides, *dq.stride()[:4], *place, scale * LOG2E, scale, BIAS=bias is not None, **launch,
    )  # fmt: skip
    grid, place, launch = _launch("backward_keys", query, window, border)
    kernels.backward_keys[grid](
        query, key, value, pointer, lse, gradient, delta, dk, dv,
        *strides, *dk.stride()[:4], *dv.stride()[:4], *place, scale * LOG2E, scale, BIAS=bias is not None, **launch,
    )  # fmt: skip
    if not learns or bias is None:
        return gradients, empty

    return gradients, _bias_gradient(query, key, value, bias, lse, gradient, delta, window, border, scale)


def _bias_gradient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, lse: Tensor, gradient: Tensor, delta: Tensor,
    window: int, border: str, scale: float,
) -> Tensor:  # fmt: skip
    """Sums of many programs, in one order: the same bits each time."""
    heads, shape = query.shape[3], _tile("backward_bias", query, window)
    (programs,), place, launch = _launch("backward_bias", query, window, border)
    rows, columns = shape.keys(window)
    chunks, slots = rows // shape.chunk, triton.next_power_of_2(window * window)
    cells = slots if border == "shift" else shape.rows * shape.columns * shape.chunk * columns
    partial = torch.empty(programs * chunks, cells, device=query.device, dtype=torch.float32)
    kernels.backward_bias[(programs * chunks,)](
        query, key, value, bias, lse, gradient, delta, partial,
        *query.stride()[:4], *key.stride()[:4], *value.stride()[:4], *gradient.stride()[:4], *place, scale * LOG2E,
        STEPS=shape.steps, SLOTS=slots, **launch,
    )  # fmt: skip
    summed = partial.view(-1, heads, chunks, cells).sum(0)  # chunk and head are the fastest of the programs' numbers
    if border == "shift":
        table = summed.sum(1)[:, : window * window]
    else:
        pairs = summed.view(heads, chunks, shape.rows * shape.columns, shape.chunk * columns).transpose(1, 2)
        table = pairs.reshape(heads, -1).double() @ _slots(shape, window, query.device)
    return table.reshape(bias.shape).to(bias.dtype)


@backward.register_fake
def _(
    projections: list[Tensor], bias: Tensor | None, out: Tensor, lse: Tensor, gradient: Tensor,
    window: int, border: str, scale: float, learns: bool,
) -> tuple[list[Tensor], Tensor]:  # fmt: skip
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for part in projections]
    return parts, torch.empty_like(bias) if learns and bias is not None else out.new_empty(0, dtype=torch.float32)


def _slots(shape: Shape, window: int, device: torch.device) -> Tensor:
    """Which slot each pair of a tile's queries and keys is: (pairs, window²), one 1 a row at most."""
    rows, columns = shape.keys(window)
    down = torch.arange(rows, device=device) - torch.arange(shape.rows, device=device)[:, None]
    across = torch.arange(columns, device=device) - torch.arange(shape.columns, device=device)[:, None]
    slots = torch.arange(window, device=device)
    one = (down[..., None] == slots).double(), (across[..., None] == slots).double()
    pairs = torch.einsum("rks,clt->rcklst", *one)
    return pairs.reshape(-1, window * window)


def _tile(kernel: str, query: Tensor, window: int) -> Shape:
    _, height, width, _, size = query.shape
    return choose(kernel, height=height, width=width, window=window, size=size, bytes=query.element_size())


def _launch(kernel: str, query: Tensor, window: int, border: str) -> tuple[tuple[int], tuple[int, ...], dict[str, Any]]:
    """How many programs, what they need to know of the place, and the constants they are compiled with."""
    batch, height, width, heads, size = query.shape
    shape = _tile(kernel, query, window)
    rows, columns = shape.keys(window)
    across, strips = -(-width // shape.columns), -(-height // (shape.rows * shape.steps))
    constants = {
        "WINDOW": window,
        "BORDER": BORDERS.index(border),
        "QROWS": shape.rows,
        "QCOLUMNS": shape.columns,
        "KROWS": rows,
        "KCOLUMNS": columns,
        "CHUNK": shape.chunk,
        "SIZE": max(16, triton.next_power_of_2(size)),
        "PRECISION": "ieee" if query.dtype == torch.float32 else "tf32",
        "num_warps": shape.warps,
        "num_stages": shape.stages,
    }
    return (batch * heads * strips * across,), (height, width, heads, size, across, strips), constants


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    projections, bias, window, border, scale = inputs
    ctx.save_for_backward(*projections, *([] if bias is None else [bias]), *output)
    ctx.count, ctx.biased = len(projections), bias is not None
    ctx.learns = bias is not None and ctx.needs_input_grad[1]
    ctx.options = (window, border, scale)
    ctx.mark_non_differentiable(output[1])


def _differentiate(context: Any, gradient: Tensor, _: Tensor) -> tuple[Any, ...]:
    saved = context.saved_tensors
    projections, bias = list(saved[: context.count]), saved[context.count] if context.biased else None
    parts, bias_gradient = backward(projections, bias, *saved[-2:], gradient, *context.options, context.learns)
    return parts, bias_gradient if context.learns else None, None, None, None


attention.register_autograd(_differentiate, setup_context=_save)


def _save_again(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    projections, bias, _, _, gradient, window, border, scale, learns = inputs
    ctx.save_for_backward(*projections, *([] if bias is None else [bias]), gradient)
    ctx.count, ctx.biased, ctx.learns = len(projections), bias is not None, learns
    ctx.options = (window, border, scale)


def _differentiate_again(context: Any, parts: list[Tensor], bias_gradient: Tensor) -> tuple[Any, ...]:
    """The derivative of the derivative, of the tiled path."""
    *saved, gradient = context.saved_tensors
    with torch.enable_grad():
        inputs = [tensor.detach().requires_grad_() for tensor in saved]
        slope = gradient.detach().requires_grad_()
        projections, bias = inputs[: context.count], inputs[context.count] if context.biased else None
        window, border, scale = context.options
        query, key, value = unpack(projections)
        rows, columns = (Field(length, window, border) for length in query.shape[1:3])
        out = tiled.attend(query, key, value, rows=rows, columns=columns, bias=bias, scale=scale)
        wanted = [*projections, *([bias] if context.learns else [])]
        given = [*parts, *([bias_gradient] if context.learns else [])]
        pairs = [(one, other) for one, other in zip(wanted, given, strict=True) if other is not None]
        first = torch.autograd.grad(out, [one for one, _ in pairs], slope, create_graph=True)
        second = torch.autograd.grad(first, [*inputs, slope], [other for _, other in pairs], allow_unused=True)
    *firsts, last = second
    bias_part = firsts[context.count] if context.biased else None
    return firsts[: context.count], bias_part, None, None, last, None, None, None, None


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


def attend(
    query: Tensor, key: Tensor, value: Tensor, *, rows: Field, columns: Field, bias: Tensor | None, scale: float
) -> Tensor:
    """Attention of each query over its square; bias (heads, window, window)."""
    return attend_packed([query, key, value], rows=rows, bias=bias, scale=scale)


def attend_packed(projections: Sequence[Tensor], *, rows: Field, bias: Tensor | None, scale: float) -> Tensor:
    """The same of projections in any of their forms."""
    parts = [part if part.stride(-1) == 1 else part.contiguous() for part in projections]
    bias = None if bias is None else bias.contiguous()
    out, _ = attention(parts, bias, rows.window, rows.border, scale)
    return out
