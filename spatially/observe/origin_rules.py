"""How origins pass through PyTorch's functions: one rule for each kind of function, found by the function's name.

Functions that move numbers about move their origins likewise. Functions that mix an axis (linear layers, products,
convolutions, pooling, sums) give the mean origin of what they mixed. All others work element by element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor
from typing import Any

import torch
from torch import Tensor

from spatially.observe.origin import Origin, Points, choose

Find = Callable[[Any], Origin | None]

_MOVES = (
    "adjoint broadcast_to channel_shuffle chunk diagonal dsplit expand flatten flip fliplr flipud gather __getitem__ hsplit "
    "index_select moveaxis movedim mT narrow permute pixel_shuffle pixel_unshuffle ravel repeat repeat_interleave reshape "
    "roll rot90 select split split_with_sizes squeeze swapaxes swapdims T t take_along_dim tensor_split tile transpose "
    "unbind unflatten unfold unsqueeze view vsplit"
)
MOVES = frozenset(_MOVES.split())
MOVES_LIKE = frozenset({"expand_as", "reshape_as", "view_as"})
JOINS = frozenset({"cat", "concat", "concatenate", "hstack", "vstack", "stack"})
SUMS = frozenset({"amax", "amin", "logsumexp", "max", "mean", "median", "min", "norm", "prod", "std", "sum", "var"})
CONVOLUTIONS = frozenset({"conv1d", "conv2d", "conv3d"})
POOLS = frozenset(
    f"{kind}_pool{rank}d" for kind in ("max", "avg", "lp", "adaptive_avg", "adaptive_max") for rank in (1, 2, 3)
) | {"interpolate", "upsample"}
PRODUCTS = frozenset({"matmul", "__matmul__", "bmm", "mm"})
SORTS = frozenset({"argsort", "kthvalue", "msort", "sort", "topk"})
CHOICES = frozenset({"__getitem__", "gather", "index_select", "masked_select", "take", "take_along_dim"})
CREATES = ("new_", "rand", "zeros", "ones", "full", "empty", "arange", "eye")  # names that begin so, or end on _like


def name_of(function: Any) -> str:
    """A function's own name; for a property, such as ``Tensor.mT``, the property's."""
    name = getattr(function, "__name__", "")
    return getattr(function.__self__, "__name__", name) if name == "__get__" else name


def chooses(function: Any, arguments: tuple[Any, ...], options: Mapping[str, Any], seen: Callable[[Any], bool]) -> bool:
    """Whether a call picks or orders elements by what is in the images, as a model does that drops tokens: then it cannot be
    told for all images where its result comes from."""
    name = name_of(function)
    if name in SORTS:
        return True
    chosen = [*arguments[1:], *options.values()] if name in CHOICES else []
    return any(seen(part) for one in chosen for part in (one if isinstance(one, (list, tuple)) else [one]))


def follow(function: Any, arguments: tuple[Any, ...], options: Mapping[str, Any], result: Any, find: Find) -> Any:
    """The origins of a function's results, in their structure: an Origin or None, or a list of such."""
    name = name_of(function)
    first = arguments[0] if arguments else next(iter(options.values()), None)
    known = find(first)
    if name.endswith("_like") or name.startswith(CREATES):
        return None
    if name in JOINS:
        return _join(function, arguments, options, find)
    if name in PRODUCTS:
        return _product(known, find(_second(arguments, options)), result.shape)
    if name == "einsum":
        return _einsum(arguments, result, find)
    if name == "linear":
        return _last(known, result.shape)
    if name in ("addmm", "baddbmm"):
        return _product(find(arguments[1]), find(arguments[2]), result.shape)
    if known is None:
        return _elementwise(arguments, options, result, find)
    if function is torch.nn.functional.unfold:
        return known.apply(lambda part: _unfolded(part, arguments, options))
    if name in MOVES:
        moved = Tensor.reshape if name == "view" else function
        return known.apply(lambda part: moved(part, *arguments[1:], **options))
    if name in MOVES_LIKE:
        return known.apply(
            lambda part: part.expand(result.shape) if name == "expand_as" else part.reshape(result.shape)
        )
    if name == "pad":
        return _pad(function, known, arguments, options, result)
    if name in CONVOLUTIONS:
        return _convolution(known, arguments, options, result)
    if name in POOLS:
        return _pool(known, name, arguments, options, result[0] if isinstance(result, tuple) else result)
    if name == "fold":
        return known.apply(lambda part: _folded(function, part, arguments, options))
    reduced = result[0] if isinstance(result, tuple) else result  # a maximum along an axis says where it is as well
    if name in SUMS and isinstance(reduced, Tensor) and reduced.shape != known.shape:
        return _sum(known, arguments, options, reduced)
    return _elementwise(arguments, options, result, find)


def assign(target: Tensor, known: Origin | None, index: Any, value: Origin | None) -> Origin | None:
    """The origin of `target` after ``target[index] = value``."""
    if value is None:
        return known
    if known is None:
        known = Origin(Points.nowhere(target, padding=target.ndim > 3))
    if known.key is not None or value.key is not None:
        return known if known.key is not None else None
    part = target[index].shape

    def put(whole: Tensor, piece: Tensor) -> Tensor:
        whole = whole.clone(memory_format=torch.contiguous_format)
        whole[index] = piece.expand(part)
        return whole

    return Origin(Points(put(known.points.row, value.points.row), put(known.points.column, value.points.column)))


def _elementwise(arguments: Sequence[Any], options: Mapping[str, Any], result: Any, find: Find) -> Origin | None:
    """The result has the shape that its arguments broadcast to; anything else is not followed."""
    if not isinstance(result, Tensor):
        return None
    known = [origin for argument in [*arguments, *options.values()] if (origin := find(argument)) is not None]
    fitting = [origin for origin in known if _broadcasts(origin.shape, result.shape)]
    return choose(fitting, result.shape) if fitting else None


def _broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    if len(shape) > len(target):
        return False
    return all(one in (1, other) for one, other in zip(reversed(shape), reversed(target), strict=False))


def _second(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Any:
    return arguments[1] if len(arguments) > 1 else options.get("other", options.get("mat2"))


def _last(known: Origin | None, shape: torch.Size) -> Origin | None:
    return None if known is None else known.map(lambda points: points.mean(-1).expand(shape))


def _product(left: Origin | None, right: Origin | None, shape: torch.Size) -> Origin | None:
    """out[…, i, j] = Σ left[…, i, k] right[…, k, j]: queries by keys, weights by values, or one of them a parameter."""
    if len(shape) < 2 or any(side is not None and len(side.shape) < 2 for side in (left, right)):
        return None
    rows = None if left is None else left.map(lambda points: points.mean(-1).expand(shape))
    columns = None if right is None else right.map(lambda points: points.mean(-2).expand(shape))
    if rows is None or columns is None:
        only = rows or columns
        return None if only is None else Origin(only.points)
    if rows.key is None and columns.key is None:
        return _pair(rows.points, columns.points)
    weights, values = (rows, columns) if rows.key is not None else (columns, rows)
    # Weights of a class token come from nowhere and those between channels from everywhere; the latter leave places alone.
    further = values.points.spread() > weights.points.spread() + 1e-3
    return Origin(values.points if further and not weights.points.row.isnan().all() else weights.points)


def _pair(rows: Points, columns: Points) -> Origin:
    """Queries by keys, or channels by channels; where only one side has places, the other is a matrix applied to it."""
    asking, asked = rows.varies(-2), columns.varies(-1)
    if asking and not asked and columns.shape[-1] > 1:
        return Origin(rows)
    if asked and not asking and rows.shape[-2] > 1 and not bool(rows.row.isnan().all()):
        return Origin(columns)
    if not asking and not asked and (rows.shape[-2] == 1) != (columns.shape[-1] == 1):  # each place's vector and matrix
        return Origin(rows, columns).alone
    return Origin(rows, columns)


def _einsum(arguments: Sequence[Any], result: Tensor, find: Find) -> Origin | None:
    equation, *operands = arguments
    operands = list(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not isinstance(equation, str) or "..." in equation or "->" not in equation or len(operands) > 2:
        return None
    inputs, output = equation.replace(" ", "").split("->")
    found = [
        _spread_out(origin, letters, output, result.shape)
        for letters, operand in zip(inputs.split(","), operands, strict=True)
        if (origin := find(operand)) is not None
    ]
    if len(found) < 2:
        return Origin(found[0].points) if found else None
    one, other = found
    if one.key is None and other.key is None:
        return Origin(one.points, other.points)
    return Origin((one if one.key is not None else other).points)


def _spread_out(origin: Origin, letters: str, output: str, shape: torch.Size) -> Origin:
    """An operand's origins on the axes of an einsum's output."""
    mixed = [axis for axis, letter in enumerate(letters) if letter not in output]
    kept = [letter for letter in letters if letter in output]
    order = [kept.index(letter) for letter in output if letter in kept]
    sizes = [shape[axis] if letter in kept else 1 for axis, letter in enumerate(output)]

    def lay(points: Points) -> Points:
        points = points.mean(*mixed) if mixed else points
        moved: Points = points.apply(lambda part: part.squeeze(mixed).permute(order).reshape(sizes))
        return moved.expand(shape)

    return origin.map(lay)


def _join(function: Any, arguments: tuple[Any, ...], options: Mapping[str, Any], find: Find) -> Origin | None:
    """What is put beside places without having one is a token in a list of tokens, and padding in a map."""
    tensors = arguments[0] if arguments else options["tensors"]
    known = [find(tensor) for tensor in tensors]
    if not any(known):
        return None
    count = 2 if all(origin is None or origin.key is not None for origin in known) else 1
    parts = []
    for tensor, origin in zip(tensors, known, strict=True):
        nowhere = Points.nowhere(tensor, padding=tensor.ndim > 3)
        parts.append([nowhere] * count if origin is None else origin.sides[:count])
    rest = {name: value for name, value in options.items() if name != "tensors"}
    joined = [
        Points(
            function([one[side].row for one in parts], *arguments[1:], **rest),
            function([one[side].column for one in parts], *arguments[1:], **rest),
        )
        for side in range(count)
    ]
    if count == 1 and (middle := _in_the_middle(joined[0], [one[0] for one in parts])) is not None:
        return Origin(middle)
    return Origin(*joined)


def _in_the_middle(joined: Points, parts: Sequence[Points]) -> Points | None:
    """Maps (B, C, H, W) put beside each other by channel that lie less than a position apart are one, in their middle."""
    if any(len(one.shape) != 4 for one in (joined, *parts)) or not joined.varies(1):
        return None
    if not all(one.varies(2) and one.varies(3) and not one.varies(1) for one in parts):
        return None
    for coordinate, axis in (("row", 2), ("column", 3)):
        part = getattr(joined, coordinate)
        if not bool((part.amax(1) - part.amin(1)).max() < part.diff(dim=axis).abs().min()):
            return None
    return joined.mean(1).expand(joined.shape)


def _pad(
    function: Any, known: Origin, arguments: tuple[Any, ...], options: Mapping[str, Any], result: Tensor
) -> Origin:
    amounts = arguments[1] if len(arguments) > 1 else options["pad"]
    mode = arguments[2] if len(arguments) > 2 else options.get("mode", "constant")
    if mode == "constant":
        return known.apply(lambda part: torch.nn.functional.pad(part, amounts, value=torch.nan))
    return known.apply(lambda part: function(part, *arguments[1:], **options))


def _convolution(known: Origin, arguments: tuple[Any, ...], options: Mapping[str, Any], result: Tensor) -> Origin:
    """All channels of a group in the middle of the kernel's window."""
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    given = dict(zip(names, arguments, strict=False)) | dict(options)
    kernel = tuple(given["weight"].shape[2:])
    return _mix_channels(known, _middles(known, result, given, kernel), result, groups=given.get("groups", 1))


def _pool(
    known: Origin, name: str, arguments: tuple[Any, ...], options: Mapping[str, Any], result: Tensor
) -> Origin | None:
    """The middle of the window, channel by channel; of adaptive pooling and of resizing, of equal parts."""
    rank = result.ndim - 2
    if rank < 1 or len(known.shape) != result.ndim:
        return None
    if not name.startswith(("max_pool", "avg_pool")):
        sources = [_centres(known.shape[axis], result.shape[axis]) for axis in range(-rank, 0)]
        return _mix_channels(known, sources, result, groups=None)
    names = ("input", "kernel_size", "stride", "padding", *(["dilation"] if name.startswith("max") else []))
    given = dict(zip(names, arguments, strict=False)) | dict(options)
    kernel = _each(given["kernel_size"], rank)
    given["stride"] = given.get("stride") or kernel
    return _mix_channels(known, _middles(known, result, given, kernel), result, groups=None)


def _middles(known: Origin, result: Tensor, given: Mapping[str, Any], kernel: Sequence[int]) -> list[list[float]]:
    """Along each axis, output o comes from input o·stride − padding + dilation·(kernel − 1)/2."""
    rank = len(kernel)
    stride, padding, dilation = (
        _each(given.get(name, default), rank) for name, default in (("stride", 1), ("padding", 0), ("dilation", 1))
    )
    sources = []
    for axis in range(rank):
        length, target = known.shape[axis - rank], result.shape[axis - rank]
        middles = _centres(length, target)
        if not isinstance(padding, str) and length != target:
            first = dilation[axis] * (kernel[axis] - 1) / 2 - padding[axis]
            exact = [number * stride[axis] + first for number in range(target)]
            middles = exact if exact[0] >= 0 and exact[-1] <= length - 1 else middles
        sources.append(middles)
    return sources


def _each(value: Any, rank: int) -> Any:
    if isinstance(value, (int, str)):
        return value if isinstance(value, str) else (value,) * rank
    return tuple(value) * (rank if len(value) == 1 else 1)


def _centres(length: int, target: int) -> list[float]:
    """Where the middles of `target` equal parts of an axis lie among its `length` points."""
    return [(number + 0.5) * length / target - 0.5 for number in range(target)]


def _mix_channels(known: Origin, sources: Sequence[Sequence[float]], result: Tensor, *, groups: int | None) -> Origin:
    """The origins at these sources, mixed within each of the groups of channels; with None, channel by channel."""
    rank = len(sources)

    def lay(points: Points) -> Points:
        points = points if groups is None else _mix_groups(points, -rank - 1, groups, result.shape[-rank - 1])
        for axis, source in enumerate(sources, start=-rank):
            points = _between(points, axis, source)
        return points.expand(result.shape)

    return known.map(lay)


def _mix_groups(points: Points, axis: int, groups: int, channels: int) -> Points:
    """Groups lie apart where they belong to several images, as in convolutions with kernels of each image's own."""
    if groups == 1 or not points.varies(axis):
        return points.mean(axis)
    mixed = points.apply(lambda part: part.unflatten(axis, (groups, -1))).mean(axis)
    spread: Points = mixed.apply(lambda part: part.repeat_interleave(channels // groups, axis).flatten(axis - 1, axis))
    return spread


def _between(points: Points, axis: int, source: Sequence[float]) -> Points:
    """The points at these places of an axis, which may lie between two."""
    length = points.shape[axis]
    source = [min(max(place, 0.0), length - 1.0) for place in source]
    if list(source) == list(range(length)):
        return points
    device = points.row.device
    low = points.apply(lambda part: part.index_select(axis, torch.tensor([floor(s) for s in source], device=device)))
    if all(place == int(place) for place in source):
        return low
    high = points.apply(lambda part: part.index_select(axis, torch.tensor([ceil(s) for s in source], device=device)))
    share = torch.tensor([place - floor(place) for place in source], device=device, dtype=torch.float64)
    share = share.view(-1, *[1] * (-axis - 1))
    row = torch.where(
        low.row.isnan(), high.row, torch.where(high.row.isnan(), low.row, torch.lerp(low.row, high.row, share))
    )
    column = torch.where(
        low.row.isnan(),
        high.column,
        torch.where(high.row.isnan(), low.column, torch.lerp(low.column, high.column, share)),
    )
    return Points(row, column)


def _sum(known: Origin, arguments: tuple[Any, ...], options: Mapping[str, Any], result: Tensor) -> Origin | None:
    dimension = options.get("dim", options.get("axis", arguments[1] if len(arguments) > 1 else None))
    if dimension is None or isinstance(dimension, (Tensor, bool)):
        return None
    axes = [dimension] if isinstance(dimension, int) else list(dimension)
    axes = [axis % len(known.shape) for axis in axes]

    def lay(points: Points) -> Points:
        if points.spread() and not points.mean(*axes).spread():  # a summary of the whole image has no place in it
            return Points.nowhere(result, padding=False)
        mixed: Points = points.mean(*axes).apply(lambda part: part.reshape(_reduced(part.shape, axes, result.ndim)))
        return mixed.expand(result.shape)

    return known.map(lay)


def _unfolded(part: Tensor, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor:
    """What is padded with zeros is padded with nowhere."""
    given = dict(zip(("input", "kernel_size", "dilation", "padding", "stride"), arguments, strict=False)) | dict(
        options
    )
    down, across = _each(given.get("padding", 0), 2)
    padded = torch.nn.functional.pad(part, (across, across, down, down), value=torch.nan)
    return torch.nn.functional.unfold(**{**given, "input": padded, "padding": 0})


def _folded(function: Any, part: Tensor, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> Tensor:
    """The mean of what falls on one place; nothing where nothing does."""
    rest = {name: value for name, value in options.items() if name != "input"}
    summed, count = (function(one, *arguments[1:], **rest) for one in (part, torch.ones_like(part)))
    return summed / count


def _reduced(shape: torch.Size, axes: Sequence[int], rank: int) -> list[int]:
    return list(shape) if rank == len(shape) else [size for axis, size in enumerate(shape) if axis not in axes]
