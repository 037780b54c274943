"""The kernels as an operation of PyTorch: `spatially::regular_attention`, with its derivative, fake form and FLOP formula.

It takes the projections as they come: one packed (B, H, W, 3, heads, D); or queries and values packed (B, H, W, 2, heads, D)
with the keys apart; or three tensors (B, H, W, heads, D). Gradients come back in the same form, without a copy. Forward keeps
the output and one log-sum-exp a query. A second derivative is taken of the tiled path, which PyTorch can differentiate.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula
from triton.tools.tensor_descriptor import TensorDescriptor

from spatially.nn.regular_attention import kernels, tiled
from spatially.nn.regular_attention.field import BORDERS, Field
from spatially.nn.regular_attention.projections import unpack
from spatially.nn.regular_attention.shapes import Problem, choose, power

LOG2E = 1.4426950408889634
LARGEST_BATCH = 65535  # images of one launch


def readable(tensor: Tensor) -> Tensor:
    """The tensor itself where descriptors can read it (addresses in steps of 16 bytes, channels side by side), or a copy."""
    steps = [step for length, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if length > 1]
    aligned = all(step and step * tensor.element_size() % 16 == 0 for step in steps)
    if aligned and tensor.stride(-1) == 1 and tensor.data_ptr() % 16 == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


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
        launch = Launch("forward", query, bias, window, border, scale)
        limit = 2.0**14 if query.dtype == torch.float16 else 2.0**64  # of a sum whose parts the dtype still holds
        launch(
            query, launch.blocks(key), launch.blocks(value), launch.table(), out, lse,
            *query.stride()[:4], *out.stride()[:4], *launch.place, scale * LOG2E, LIMIT=limit,
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
    launch = Launch("backward_queries", query, bias, window, border, scale)
    launch(
        query, launch.blocks(key), launch.blocks(value), launch.table(), out, lse, gradient, dq, delta,
        *query.stride()[:4], *out.stride()[:4], *gradient.stride()[:4], *dq.stride()[:4],
        *launch.place, scale * LOG2E, scale,
    )  # fmt: skip
    launch = Launch("backward_keys", query, bias, window, border, scale)
    launch(
        launch.blocks(query), key, value, launch.table(), lse, launch.blocks(gradient), delta, dk, dv,
        *key.stride()[:4], *value.stride()[:4], *dk.stride()[:4], *dv.stride()[:4],
        *launch.place, scale * LOG2E, scale,
    )  # fmt: skip
    if not learns or bias is None:
        return gradients, empty
    return gradients, _bias_gradient(query, key, value, bias, lse, gradient, delta, window, border, scale)


def _bias_gradient(
    query: Tensor, key: Tensor, value: Tensor, bias: Tensor, lse: Tensor, gradient: Tensor, delta: Tensor,
    window: int, border: str, scale: float,
) -> Tensor:  # fmt: skip
    """Sums of many programs, in one order: the same bits each time."""
    launch = Launch("backward_bias", query, bias, window, border, scale)
    heads, shape, slots = query.shape[3], launch.shape, triton.next_power_of_2(window * window)
    chunks, pairs = shape.chunks(window), (shape.rows * shape.columns, shape.chunk * launch.key_columns)
    partial = torch.empty(
        math.prod(launch.grid) * chunks, slots if border == "shift" else math.prod(pairs),
        device=query.device, dtype=torch.float32,
    )  # fmt: skip
    launch.grid = (launch.grid[0], heads * chunks, launch.grid[2])
    launch(
        query, launch.blocks(key), launch.blocks(value), launch.table(), lse, gradient, delta, partial,
        *query.stride()[:4], *gradient.stride()[:4], *launch.place, scale * LOG2E, STEPS=shape.steps, SLOTS=slots,
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


@dataclass
class Launch:
    """One kernel for one problem: its shape, its programs, and its arguments in the forms that it takes."""

    kernel: str
    query: Tensor
    bias: Tensor | None
    window: int
    border: str
    scale: float

    def __post_init__(self) -> None:
        batch, height, width, heads, size = self.query.shape
        problem = Problem(
            self.kernel, height, width, self.window, size, self.query.element_size(), self.bias is not None
        )
        self.shape = choose(problem, _chip(self.query.device))
        self.narrow = width <= self.shape.columns and self.bias is None and self._sees_only_the_image
        across, strips = -(-width // self.shape.columns), -(-height // (self.shape.rows * self.shape.steps))
        self.grid = (across * strips, heads, batch)
        self.place = (height, width, size, across)

    def __call__(self, *arguments: Any, **constants: Any) -> None:
        shape = self.shape
        if self.kernel != "backward_bias":
            constants |= {"BIAS": self.bias is not None, "NARROW": self.narrow}
        if shape.registers is not None:
            constants["maxnreg"] = shape.registers
        getattr(kernels, self.kernel)[self.grid](
            *arguments,
            WINDOW=self.window,
            BORDER=BORDERS.index(self.border),
            ROWS=shape.rows,
            COLUMNS=shape.columns,
            KCOLUMNS=self.key_columns,
            CHUNK=shape.chunk,
            CHUNKS=shape.chunks(self.window),
            SIZE=self.block_size,
            PRECISION="ieee" if self.query.dtype == torch.float32 else "tf32",
            num_warps=shape.warps,
            num_stages=shape.stages,
            **constants,
        )

    @property
    def _sees_only_the_image(self) -> bool:
        """Whether what lies outside takes no part: keys where they count as 0, and queries where squares slide, do."""
        return self.border != ("shift" if self.kernel == "backward_keys" else "zero")

    @property
    def key_columns(self) -> int:
        """The columns that pass by a tile: its own and their neighbours; in a grid no wider than a tile, the grid's."""
        return power(self.query.shape[2]) if self.narrow else self.shape.key_columns(self.window)

    @property
    def block_size(self) -> int:
        """Channels of a block: a power of two, 16 at least."""
        return max(16, triton.next_power_of_2(self.query.shape[-1]))

    def blocks(self, tensor: Tensor) -> TensorDescriptor:
        """A map that passes by a tile in chunks."""
        maps = tensor.permute(0, 3, 1, 2, 4)
        block = [1, 1, self.shape.chunk, self.key_columns, self.block_size]
        # The step along an axis of one place is never taken, but checked.
        strides = [step if length > 1 else 16 for length, step in zip(maps.shape, maps.stride(), strict=True)]
        return TensorDescriptor(maps, list(maps.shape), [*strides[:4], 1], block)

    @cached_property
    def slots(self) -> Tensor:
        """The slot (from 0 to window² − 1) of each pair of a tile's queries and keys, −1 outside the square: (pairs,)."""
        rows = self.shape.chunks(self.window) * self.shape.chunk
        return _pair_slots(self.shape.rows, self.shape.columns, rows, self.key_columns, self.window, self.query.device)

    def table(self) -> Tensor:
        """The bias as the kernel reads it (see there); anything where there is none."""
        if self.bias is None:
            return self.query
        bias = self.bias.float()
        if self.border == "shift":
            return bias.contiguous()
        slots = self.slots
        if self.kernel == "backward_keys":  # where a query sees a key in slot s, the key sees it in the opposite one
            slots = torch.where(slots < 0, -1, self.window**2 - 1 - slots)
        table = (bias / self.scale).flatten(1)[:, slots.clamp(min=0)]
        return table.masked_fill_(slots < 0, float("-inf"))


@lru_cache(maxsize=64)
def _pair_slots(rows: int, columns: int, key_rows: int, key_columns: int, window: int, device: torch.device) -> Tensor:
    down = torch.arange(key_rows, device=device) - torch.arange(rows, device=device)[:, None]
    over = torch.arange(key_columns, device=device) - torch.arange(columns, device=device)[:, None]
    taken = [(slot >= 0) & (slot < window) for slot in (down, over)]
    number = down[:, None, :, None] * window + over[None, :, None, :]
    return torch.where(taken[0][:, None, :, None] & taken[1][None, :, None, :], number, -1).flatten()


@lru_cache
def _chip(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


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


def attend(projections: Sequence[Tensor], *, rows: Field, bias: Tensor | None, scale: float) -> Tensor:
    """Attention of each query over its square, of projections in any of their forms; bias (heads, window, window)."""
    size, step = projections[0].shape[-1], 16 // projections[0].element_size()
    if not size % step:
        return attention(list(projections), bias, rows.window, rows.border, scale)[0]
    # Descriptors read 16 bytes at a time; further channels of 0 change nothing.
    wider = [F.pad(part, (0, -size % step)) for part in projections]
    return attention(wider, bias, rows.window, rows.border, scale)[0][..., :size]
