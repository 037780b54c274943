r"""Attention over the square centred on each query (Xu et al., section 4: the regular receptive field).

.. math:: o_n = \sum_{s} \mathrm{softmax}_s(\mathrm{scale}\; q_n \cdot k_{n+s} + b_s)\, v_{n+s},
          \qquad s \in \{-\lfloor w/2 \rfloor, …, \lfloor w/2 \rfloor\}^2

on feature maps (B, H, W, heads, D), with an optional bias b for each offset. One function, several ways to compute it:
`tiled` runs anywhere; `triton` is a kernel for CUDA, the default there; `reference` is the definition, spelt out. Meta
tensors take the reference, so that operations counted there are those of the definition.
"""

from collections.abc import Callable
from importlib.util import find_spec
from operator import index

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from spatially.errors import UserError
from spatially.nn.check import number, odd
from spatially.nn.regular_attention import reference, tiled
from spatially.nn.regular_attention.field import BORDERS, Field
from spatially.nn.regular_attention.projections import unpack

LARGEST_WINDOW, LARGEST_SIZE = 13, 128  # of the kernels
TRITON = find_spec("triton") is not None
# Asked once: `torch.compile` cannot ask.
AUTOCAST = {kind for kind in ("cpu", "cuda", "mps", "xpu") if torch.amp.is_autocast_available(kind)}
KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


ANYWHERE: dict[str, Callable[..., Tensor]] = {"reference": reference.attend, "tiled": tiled.attend}
BACKENDS = (*ANYWHERE, "triton")


def regular_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int,
    border: str = "mask",
    bias: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """Attention of every position over the `window`×`window` square around it.

    Args:
        query, key, value: (B, H, W, heads, D), any strides: views of one packed projection are welcome.
        window: side of the square, odd. The grid may be smaller.
        border: what lies outside the image: ``mask``: takes no part; ``zero``: enters as key 0 and value 0, like a
            padded convolution; ``shift``: the square slides inward, so that near the border the query is off-centre.
        bias: (heads, window, window), added to the logits of each slot of the square, its middle being the query
            itself (with ``shift``, near the border, what the square's middle falls on).
        scale: factor of the logits; 1/√D when not given.
        backend: ``tiled``, ``triton`` or ``reference``; chosen by the input when not given.

    Returns:
        (B, H, W, heads, D), of the query's dtype.

    >>> query = key = value = torch.ones(1, 4, 6, 2, 8)
    >>> regular_attention(query, key, value, window=3).shape
    torch.Size([1, 4, 6, 2, 8])
    """
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _check_tensor(name, tensor)
    if has_torch_function((query, key, value)):  # an observer sees one call, whichever way it is computed
        return handle_torch_function(
            regular_attention,
            (query, key, value),
            query,
            key,
            value,
            window=window,
            border=border,
            bias=bias,
            scale=scale,
            backend=backend,
        )
    return _attend([query, key, value], window=window, border=border, bias=bias, scale=scale, backend=backend)


def packed_regular_attention(
    packed: Tensor,
    key: Tensor | None = None,
    *,
    window: int,
    border: str = "mask",
    bias: Tensor | None = None,
    scale: float | None = None,
    backend: str | None = None,
) -> Tensor:
    """The same, straight from a projection: the kernels read it as it lies, and its gradient comes back whole.

    Args:
        packed: query, key and value (B, H, W, 3, heads, D); or query and value (B, H, W, 2, heads, D).
        key: (B, H, W, heads, D), where `packed` holds none, as when a convolution makes it.

    >>> packed_regular_attention(torch.ones(1, 4, 6, 3, 2, 8), window=3).shape
    torch.Size([1, 4, 6, 2, 8])
    """
    _check_tensor("packed", packed)
    if key is not None:
        _check_tensor("key", key)
    parts = 3 if key is None else 2
    if packed.ndim != 6 or packed.shape[3] != parts:
        what = "" if key is None else " beside the key"
        raise UserError(f"packed must be (batch, height, width, {parts}, heads, size){what}: got {tuple(packed.shape)}")
    projections = [packed] if key is None else [packed, key]
    if has_torch_function(projections):  # and this one as the same call
        query, key, value = unpack(projections)
        return regular_attention(
            query, key, value, window=window, border=border, bias=bias, scale=scale, backend=backend
        )
    return _attend(projections, window=window, border=border, bias=bias, scale=scale, backend=backend)


def _attend(
    projections: list[Tensor],
    *,
    window: int,
    border: str,
    bias: Tensor | None,
    scale: float | None,
    backend: str | None,
) -> Tensor:
    if bias is not None:
        _check_tensor("bias", bias)
    kind = projections[0].device.type
    if kind in AUTOCAST and torch.is_autocast_enabled(kind):
        lower = torch.get_autocast_dtype(kind)
        projections = [
            tensor.to(lower) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor
            for tensor in projections
        ]
        with torch.autocast(kind, enabled=False):
            return _attend(projections, window=window, border=border, bias=bias, scale=scale, backend=backend)
    query, key, value = unpack(projections)
    scale = max(query.shape[-1:].numel(), 1) ** -0.5 if scale is None else _scale(scale)
    _check(query, key, value, window=window, border=border, bias=bias, scale=scale, backend=backend)
    # `index` fixes the grid in a compiled graph (the batch stays free): tiles are cut for one grid.
    rows, columns = (Field(index(length), window, border) for length in query.shape[1:3])
    chosen = backend or _backend(query, window, scale)
    if chosen == "triton" and not tiled.transformed(query, key, value, bias):
        from spatially.nn.regular_attention import operations  # where there is no GPU, Triton is not needed

        return operations.attend(projections, rows=rows, bias=bias, scale=scale)
    # Where a transform is under way the tiled path stands in for the kernels, asked for or not: they would lose tangents.
    return ANYWHERE.get(chosen, tiled.attend)(query, key, value, rows=rows, columns=columns, bias=bias, scale=scale)


def _backend(query: Tensor, window: int, scale: float) -> str:
    """The fastest that can do what is asked."""
    if query.device.type == "meta":
        return "reference"
    served = TRITON and _kernels_take(query, window, scale)
    return "triton" if query.device.type == "cuda" and served else "tiled"


def _kernels_take(query: Tensor, window: int, scale: float) -> bool:
    fits = window <= LARGEST_WINDOW and query.shape[-1] <= LARGEST_SIZE
    return query.dtype in KERNEL_DTYPES and fits and scale > 0


def _scale(scale: object) -> float:
    if isinstance(scale, Tensor):
        raise UserError("scale must be a number: got a tensor; multiply the query by it, with scale=1")
    return number("scale", scale)


def _check_tensor(name: str, tensor: object) -> None:
    if not isinstance(tensor, Tensor):
        raise UserError(f"{name} must be a tensor: got {type(tensor).__name__}")


def _check(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    window: int,
    border: str,
    bias: Tensor | None,
    scale: float,
    backend: str | None,
) -> None:
    odd("window", window)
    if border not in BORDERS:
        raise UserError(f"border must be one of {', '.join(BORDERS)}: got {border!r}")
    if backend is not None and backend not in BACKENDS:
        raise UserError(f"backend must be one of {', '.join(BACKENDS)}: got {backend!r}")
    if backend == "triton" and not _kernels_take(query, window, scale):
        raise UserError(
            f"backend='triton' takes half and single precision, windows up to {LARGEST_WINDOW}, heads up to "
            f"{LARGEST_SIZE} and scales above 0: got {query.dtype}, window {window}, heads of {query.shape[-1]} and "
            f"scale {scale:g}"
        )
    if query.ndim != 5 or not query.shape[1:].numel():
        raise UserError(
            f"query must be (batch, height, width, heads, size), none of the last four 0: got {tuple(query.shape)}"
        )
    if not query.is_floating_point():
        raise UserError(f"query must be of a floating-point dtype: got {query.dtype}")
    for name, tensor in (("key", key), ("value", value)):
        if tensor.shape != query.shape:
            raise UserError(f"{name} must have the query's shape {tuple(query.shape)}: got {tuple(tensor.shape)}")
        if tensor.dtype != query.dtype:
            raise UserError(f"{name} must have the query's dtype {query.dtype}: got {tensor.dtype}")
        if tensor.device != query.device:
            raise UserError(f"{name} must be on the query's device {query.device}: got {tensor.device}")
    if bias is None:
        return
    heads = query.shape[3]
    if bias.shape != (heads, window, window):
        raise UserError(f"bias must be (heads, window, window) = {(heads, window, window)}: got {tuple(bias.shape)}")
    allowed = {query.dtype, torch.float32} if query.dtype in (torch.float16, torch.bfloat16) else {query.dtype}
    if bias.dtype not in allowed:
        raise UserError(f"bias must have dtype {' or '.join(sorted(map(str, allowed)))}: got {bias.dtype}")
    if bias.device != query.device:
        raise UserError(f"bias must be on the query's device {query.device}: got {bias.device}")


if TRITON and torch.cuda.is_available():  # before anything is compiled: an import ends a graph
    from spatially.nn.regular_attention import operations as _operations  # noqa: F401
