"""One forward pass of two images in which every tensor is followed, to learn what a model's attention layers are.

The calls that may be attention are numbered; later passes of the same size make the same calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from spatially.nn.regular_attention.field import Field
from spatially.nn.regular_attention.reference import slots
from spatially.observe import attention_calls as calls
from spatially.observe.attention_arrangement import Arrangement, Axis, NotPlaced, arrange, grid_positions
from spatially.observe.attention_layers import Layer
from spatially.observe.origin import Origin, Points
from spatially.observe.origin_rules import MOVES, MOVES_LIKE, PRODUCTS, assign, chooses, follow, name_of

CHANNELS = "mixes channels, not positions"
LOST = "cannot be followed back to the image"
ALIKE = "weighs positions by a softmax that is the same for all queries"
#: What multiplies maps as attention does, and what only hands weights on.
PAIRINGS = PRODUCTS | {"einsum", "tensordot", "inner", "cdist"}
_COPIES = "dropout feature_dropout to type type_as float half bfloat16 double contiguous clone nan_to_num"
HANDS_ON = MOVES | MOVES_LIKE | frozenset(_COPIES.split())


@dataclass(frozen=True)
class Call:
    """One call that may be attention over positions."""

    kind: str
    layer: Layer | None = None
    arrangement: Arrangement | None = None
    order: tuple[int, ...] = ()  # axes of a softmax: leading ones, queries, keys


@dataclass(frozen=True)
class Convolution:
    """A convolution over positions: its kernel, the grid it reads, and how many attention layers run before it."""

    name: str
    kernel: tuple[int, int]
    grid: tuple[int, int]
    before: int


@dataclass(frozen=True)
class Trace:
    """Everything one pass showed."""

    calls: tuple[Call, ...]
    convolutions: tuple[Convolution, ...]
    others: Mapping[str, str]  # attention that is none over positions: the module, and why
    products: tuple[str, ...] = ()  # where two maps are multiplied as matrices, as attention does in whatever form
    changed: tuple[str, ...] = ()  # layers whose weights are not those of the softmax when they meet the values

    @property
    def layers(self) -> list[Layer]:
        return [call.layer for call in self.calls if call.layer is not None]

    @property
    def unrecognised(self) -> list[str]:
        """Where maps are multiplied, and neither a layer nor another kind of attention explains it."""
        explained = [layer.name.partition("#")[0] for layer in self.layers] + list(self.others)
        return [one for one in dict.fromkeys(self.products) if not any(_within(one, other) for other in explained)]


def _within(one: str, other: str) -> bool:
    """Whether two modules are the same, or one is a part of the other."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")


@contextmanager
def names(model: nn.Module) -> Iterator[list[str]]:
    """The paths of the modules that run at the moment, outermost first."""
    stack: list[str] = []
    hooks = []
    for name, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(lambda *_, name=name: stack.append(name)))
        hooks.append(module.register_forward_hook(lambda *_: stack.pop() and None, always_call=True))
    try:
        yield stack
    finally:
        for hook in hooks:
            hook.remove()


class Follower(TorchFunctionMode):
    """Follows the origins of all tensors, and notes each call that may be attention."""

    def __init__(self, model: nn.Module, images: Tensor, stack: list[str]) -> None:
        super().__init__()
        self._model = model
        self._stack = stack
        self._origins: Any = WeakTensorKeyDictionary()
        self._origins[images] = Origin(Points.of_images(images))
        self._computed: Any = WeakTensorKeyDictionary()  # from the images, whether or not it is known where they show
        self._computed[images] = True
        self.calls: list[Call] = []
        self.convolutions: list[Convolution] = []
        self.others: dict[str, str] = {}
        self.products: list[str] = []
        self._weights: Any = WeakTensorKeyDictionary()  # what a softmax gave, and whose layer's it is
        self._applied: set[str] = set()

    def find(self, thing: Any) -> Origin | None:
        return self._origins.get(thing) if isinstance(thing, Tensor) else None

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        options = kwargs or {}
        result = function(*args, **options)
        if name_of(function) == "__setitem__":
            self._keep(args[0], assign(args[0], self.find(args[0]), args[1], self.find(args[2])))
        elif (kind := calls.kind_of(function)) is not None:
            self._attend(kind, args, options, result)
        elif isinstance(result, (Tensor, list, tuple)):
            self._convolve(function, args, options)
            self._multiply(function, args, options, result)
            self._apply(function, args, options, result)
            if not chooses(function, args, options, self._is_computed):
                self._keep(result, follow(function, args, options, result, self.find))
        if any(self._is_computed(one) for one in _given(args, options)):
            for one in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(one, Tensor):
                    self._computed[one] = True
        return result

    def _is_computed(self, thing: Any) -> bool:
        return isinstance(thing, Tensor) and thing in self._computed

    def _keep(self, result: Any, origin: Any) -> None:
        if isinstance(origin, list):
            for one, its in zip(result, origin, strict=True):
                self._keep(one, its)
        elif isinstance(result, tuple) and isinstance(origin, Origin):
            self._keep(result[0], origin)
        elif isinstance(result, Tensor) and origin is not None and origin.shape == result.shape:
            self._origins[result] = origin

    def _convolve(self, function: Any, arguments: tuple[Any, ...], options: Mapping[str, Any]) -> None:
        if name_of(function) != "conv2d" or self.find(arguments[0]) is None:
            return
        weight = arguments[1] if len(arguments) > 1 else options["weight"]
        height, width = arguments[0].shape[-2:]
        before = sum(call.layer is not None for call in self.calls)
        name = _unique(self._name(), {one.name for one in self.convolutions})
        self.convolutions.append(Convolution(name, tuple(weight.shape[2:]), (height, width), before))

    def _multiply(self, function: Any, arguments: tuple[Any, ...], options: Mapping[str, Any], result: Any) -> None:
        """Note a product of two maps. One with a single column weighs a map for its mean, which convolutional nets do too."""
        if name_of(function) not in PAIRINGS or min(result.shape[-2:], default=0) < 2:
            return
        given = [(self.find(one), self._is_computed(one)) for one in _given(arguments, options)]
        if sum(computed if origin is None else origin.points.spread() > 0 for origin, computed in given) > 1:
            self.products.append(self._name())

    def _apply(self, function: Any, arguments: tuple[Any, ...], options: Mapping[str, Any], result: Any) -> None:
        """Follow a layer's weights from the softmax to the values that they are multiplied with."""
        given = _given(arguments, options)
        layers = [layer for one in given if isinstance(one, Tensor) and (layer := self._weights.get(one)) is not None]
        if not layers:
            return
        if name_of(function) in HANDS_ON:
            for one in result if isinstance(result, (list, tuple)) else [result]:
                self._weights[one] = layers[0]
        elif any((origin := self.find(one)) is not None and origin.key is None for one in given):
            self._applied.update(layers)

    @property
    def changed(self) -> tuple[str, ...]:
        """Layers whose weights were not seen to be multiplied with values as they came from the softmax."""
        written = [call.layer.name for call in self.calls if call.layer is not None and call.kind == calls.SOFTMAX]
        return tuple(name for name in written if name not in self._applied)

    def _attend(self, kind: str, arguments: tuple[Any, ...], options: Mapping[str, Any], result: Any) -> None:
        readers: dict[str, Callable[..., tuple[Call, Origin | None]]] = {
            calls.FUSED: self._fused,
            calls.SOFTMAX: self._softmax,
            calls.MULTI_HEAD: self._multi_head,
            calls.REGULAR: self._regular,
        }
        name = self._name()
        call = Call(kind)
        try:
            call, origin = readers[kind](call, arguments, options, result)
            self._keep(result, origin)
        except NotPlaced as reason:
            self.others[name] = str(reason)
        if call.arrangement is not None:
            call = replace(call, layer=self._layer(name, call))
            if kind == calls.SOFTMAX and call.layer is not None:
                self._weights[result] = call.layer.name
        self.calls.append(call)

    def _layer(self, name: str, call: Call) -> Layer:
        arrangement = call.arrangement
        assert arrangement is not None
        taken = {one.layer.name for one in self.calls if one.layer is not None}
        queries, keys = arrangement.queries, arrangement.keys
        if not queries.grid[0]:
            kind = "class"
        elif call.kind == calls.REGULAR:
            kind = "neighbourhood"
        else:
            kind = "global" if arrangement.windows == 1 else "window"
        return Layer(
            index=len(taken),
            name=_unique(name, taken),
            kind=kind,
            heads=arrangement.heads,
            grid=queries.grid,
            key_grid=keys.grid,
            prefix=queries.prefix,
            key_prefix=keys.prefix,
            reach=arrangement.reach,
        )

    def _fused(self, call: Call, arguments: Any, options: Any, result: Tensor) -> tuple[Call, Origin | None]:
        given = calls.fused_arguments(arguments, options)
        raw = arguments[1] if len(arguments) > 1 else options["key"]
        query, key, value = self.find(given["query"]), self.find(raw), self.find(given["value"])
        if key is None:
            self._lost(raw)
            return call, None
        queries = Points.nowhere(given["query"], padding=False) if query is None else query.points
        keys: Points = key.points.apply(lambda part: calls.grouped(part, given))
        if queries.varies(-1) or keys.varies(-1):
            self.others[self._name()] = CHANNELS
            return call, None if value is None else value.map(lambda one: one.mean(-2).expand(result.shape))
        origin = Origin(queries.mean(-1).expand(result.shape))
        return self._arranged(call, queries.mean(-1), keys.mean(-1)), origin

    def _lost(self, key: Tensor) -> None:
        if self._is_computed(key):
            self.others[self._name()] = LOST

    def _softmax(self, call: Call, arguments: Any, options: Any, result: Tensor) -> tuple[Call, Origin | None]:
        origin = self.find(arguments[0] if arguments else options.get("input"))
        axis = calls.softmax_axis(arguments, options, result.ndim)
        if origin is not None and origin.key is None and axis is not None and origin.points.varies(axis):
            self.others.setdefault(self._name(), ALIKE)
        if origin is None or origin.key is None or axis is None or result.ndim < 2:
            return call, origin
        queries, keys = origin.points, origin.key
        if not keys.varies(axis) and queries.varies(axis):  # written as keys by queries
            queries, keys = keys, queries
        origin = Origin(queries, keys)
        if not keys.varies(axis) and result.shape[axis] > 1:
            self.others[self._name()] = CHANNELS
            return call, origin
        others = [one for one in range(result.ndim) if one != axis]
        asking = [one for one in others if queries.varies(one) and not keys.varies(one)]
        if len(asking) > 1:
            self._keep(result, origin)
            raise NotPlaced("its queries lie on several axes")
        query_axis = asking[0] if asking else (axis - 1 if axis else 1)
        order = (*(one for one in others if one != query_axis), query_axis, axis)
        queries, keys = (
            side.mean(mixed).apply(lambda part: part.permute(order))
            for side, mixed in ((queries, axis), (keys, query_axis))
        )
        self._keep(result, origin)
        keys = keys.apply(lambda part: part.transpose(-1, -2))
        return replace(self._arranged(call, queries, keys), order=order), origin

    def _multi_head(self, call: Call, arguments: Any, options: Any, result: Any) -> tuple[Call, Any]:
        given = calls.multi_head_arguments(arguments, options)
        query, key = self.find(given["query"]), self.find(given["key"])
        if key is None:
            self._lost(given["key"])
            return call, None
        if given["query"].ndim != 3 or given.get("bias_k") is not None or given.get("add_zero_attn"):
            raise NotPlaced("it adds keys of its own, or its input has no batch")
        queries = Points.nowhere(given["query"], padding=False) if query is None else query.points
        heads = given["num_heads"]

        def lay(points: Points) -> Points:
            mixed = points.mean(-1)
            moved: Points = mixed.apply(lambda part: part.permute(1, 2, 0).expand(-1, heads, -1).unsqueeze(-1))
            return moved

        origin = Origin(queries.mean(-1).expand(given["query"].shape[:-1] + result[0].shape[-1:]))
        self._keep(result[0], origin)
        return self._arranged(call, lay(queries), lay(key.points)), None

    def _regular(self, call: Call, arguments: Any, options: Any, result: Any) -> tuple[Call, Any]:
        given = calls.regular_arguments(arguments, options)
        out = result[0] if isinstance(result, tuple) else result
        source = options.get("query") if not arguments else arguments[0]
        origin = self.find(source[0] if isinstance(source, (list, tuple)) else source)
        if origin is None:
            return call, None
        points = origin.points
        if len(points.shape) == 6:
            points = points.mean(3).apply(lambda part: part.squeeze(3))
        self._keep(out, Origin(points.mean(-1).expand(out.shape)))
        position, grid = grid_positions(points.mean(3, 4).apply(lambda part: part.flatten(1)))
        (rows, columns), heads = fields(given), given["query"].shape[3]
        down, across = slots(rows, columns, position.device)
        within = (down >= 0) & (down < rows.length) & (across >= 0) & (across < columns.length)
        padding = given["border"] == "zero"
        number = (down.clamp(0, rows.length - 1) * columns.length + across.clamp(0, columns.length - 1)).flatten(0, 1)
        keys = torch.where(within.flatten(0, 1), position[number] + padding, 0)
        arrangement = Arrangement(
            reach=int(within.flatten(2).sum(2).max()),
            lead=position.new_zeros(1, len(position), heads),
            axis=0,
            step=1,
            queries=Axis(position[:, None], grid, 0, False),
            keys=Axis(keys, grid, 0, padding),
        )
        return replace(call, arrangement=arrangement), None

    def _arranged(self, call: Call, queries: Points, keys: Points) -> Call:
        """Queries and keys with a last axis of length 1."""
        if not keys.varies(-2) and keys.shape[-2] > 1:
            self.others[self._name()] = CHANNELS
            return call
        if bool(keys.row.isnan().all()):
            return call
        sides = (side.apply(lambda part: part.squeeze(-1)) for side in (queries, keys))
        return replace(call, arrangement=arrange(*sides))

    def _name(self) -> str:
        """The module that the call belongs to: the innermost that has parameters or parts of its own."""
        for name in reversed(self._stack):
            module = self._model.get_submodule(name)
            if next(module.parameters(), None) is not None or next(module.children(), None) is not None:
                return name or "model"
        return "model"


def _given(arguments: tuple[Any, ...], options: Mapping[str, Any]) -> list[Any]:
    """The arguments, those in lists one by one."""
    return [
        part for one in (*arguments, *options.values()) for part in (one if isinstance(one, (list, tuple)) else [one])
    ]


def _unique(name: str, taken: set[str]) -> str:
    """The name, numbered where one module does something several times."""
    unique, number = name, 2
    while unique in taken:
        unique, number = f"{name}#{number}", number + 1
    return unique


def fields(given: Mapping[str, Any]) -> tuple[Field, Field]:
    """Rows and columns of a `regular_attention`."""
    height, width = given["query"].shape[1:3]
    return Field(height, given["window"], given["border"]), Field(width, given["window"], given["border"])


def trace(model: nn.Module, images: Tensor) -> Trace:
    """Run the model on two images, uncompiled, and follow everything."""
    eager = torch.compiler.set_stance("force_eager")
    with eager, names(model) as stack, Follower(model, images, stack) as follower:
        model(images)
    return Trace(
        tuple(follower.calls), tuple(follower.convolutions), follower.others, tuple(follower.products), follower.changed
    )
