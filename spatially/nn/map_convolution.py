"""A convolution of maps as they lie, (B, H, W, C), that compilers leave as it is: `spatially::map_convolution`.

torch.compile sees many convolutions in a graph and then lays out every map of four dimensions that leads to one with its
second dimension innermost, whatever that dimension is. For images (B, C, H, W) those are the channels; for the maps of a
transformer (B, H, W, C) it is the height, so that every norm and sum around them reads across memory (an eighth of a training
step of Swin with convolutional keys). Behind an operation of its own a convolution is read and written in place.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def convolve_map(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """Maps (B, H, W, C) convolved at every point, by weights (out, C / groups, k, k) with odd k."""
    if not torch.compiler.is_compiling() or x.device.type != "cuda":
        return _convolve(x, weight, bias, groups)
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
    return convolution(x, weight, bias, groups)


def _convolve(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    images = x.permute(0, 3, 1, 2)  # channels last in memory: read and written as it lies
    if x.device.type == "cpu" and groups == 1 and x.shape[1] * x.shape[2] < x.shape[3]:
        # The CPU's channels-last kernel is up to twice as slow on small maps with many channels; two copies are cheap.
        images = images.contiguous()
    convolved = F.conv2d(images, weight, bias, padding=weight.shape[-1] // 2, groups=groups)
    # A view of a map of height or width 1 can pass for either layout, so the result is asked for in ours.
    return convolved.permute(0, 2, 3, 1).contiguous()


@torch.library.custom_op("spatially::map_convolution", mutates_args=())
def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    """The convolution, for compiled graphs."""
    return _convolve(x, weight, bias, groups)


@convolution.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, groups: int) -> Tensor:
    return x.new_empty(*x.shape[:3], weight.shape[0])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, groups = inputs
    ctx.save_for_backward(x, weight)
    ctx.biased, ctx.groups = bias is not None, groups


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    x, weight = ctx.saved_tensors
    padding, ones = [weight.shape[-1] // 2] * 2, [1, 1]
    wanted = [*ctx.needs_input_grad[:2], ctx.biased and ctx.needs_input_grad[2]]
    dx, dweight, dbias = torch.ops.aten.convolution_backward(
        gradient.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2), weight, [weight.shape[0]] if ctx.biased else None,
        ones, padding, ones, False, [0, 0], ctx.groups, wanted,
    )  # fmt: skip
    return None if dx is None else dx.permute(0, 2, 3, 1), dweight, dbias, None


convolution.register_autograd(_differentiate, setup_context=_save)
