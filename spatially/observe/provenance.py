"""What each tensor of a forward pass was computed from, by which operations, in which module: a graph of the pass.

A :class:`Recorder` runs while a model does. Every call of a PyTorch function on something computed from the images becomes
a :class:`Step` whose parents are the steps of its arguments. No tensor is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from spatially.observe.origin import Origin, Points
from spatially.observe.origin_rules import (
    CONVOLUTIONS,
    MOVES,
    MOVES_LIKE,
    POOLS,
    PRODUCTS,
    assign,
    chooses,
    follow,
    name_of,
)

ADDITIONS = frozenset({"add", "add_", "__add__", "__radd__", "__iadd__", "addcmul", "addcmul_"})
#: What mixes values of different places or channels; everything else leaves a representation what it is.
MIXING = frozenset({"attention", "convolution", "pooling", "linear"})


@dataclass(frozen=True, eq=False)
class Step:
    """One call.

    Attributes:
        number: its place in the pass.
        kind: one of `MIXING`, "addition", "movement" or "pointwise".
        parents: the steps that its arguments come from; of an addition, one for each side.
        module: the path of the module in which it happened.
        function: what was called; None where the call could not be seen.
        call: the number of calls before it.
        output: which of several results this one is.
        shape: of the result.
        points: where its elements come from in the image, where that is known.
    """

    number: int
    kind: str
    parents: tuple[int, ...]
    module: str
    name: str
    function: Any
    call: int
    output: int
    shape: torch.Size
    points: Points | None


@dataclass
class Record:
    """The steps of a pass, every call in order as (function, shapes of its results), and the modules that ran."""

    steps: list[Step] = field(default_factory=list)
    modules: set[str] = field(default_factory=set)
    calls: list[tuple[Any, tuple[torch.Size, ...]]] = field(default_factory=list)


class Recorder(TorchFunctionMode):
    """Follows what is computed from ``images`` through a model's forward pass."""

    def __init__(self, images: Tensor, names: Mapping[int, str]) -> None:
        super().__init__()
        self.record = Record()
        self._names = names
        self._modules = [""]
        self._known: Any = WeakTensorKeyDictionary()
        self._origins: dict[int, Origin | None] = {}
        self._add(images, "pointwise", (), None, 0, Origin(Points.of_images(images)))

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        before = [(step, self._origins[step]) for step in self._steps_in((args, kwargs))]
        result = function(*args, **kwargs)
        outputs = _tensors(result)
        if outputs:
            self.record.calls.append((function, tuple(tensor.shape for tensor in outputs)))
        if before:
            self._follow(function, args, kwargs, result, outputs)
        return result

    @contextmanager
    def modules(self) -> Iterator[None]:
        """While this lasts, it is known which module is running; what a module computes out of sight is noticed."""

        def enter(module: nn.Module, _: Any) -> None:
            self._modules.append(self._names.get(id(module), self._modules[-1]))
            self.record.modules.add(self._modules[-1])

        def leave(module: nn.Module, inputs: Any, output: Any) -> None:
            parents = self._steps_in(inputs)
            for tensor in _tensors(output):
                if parents and tensor not in self._known:
                    origin = next((o for s in parents if (o := self._origins[s]) and o.shape == tensor.shape), None)
                    self._add(tensor, _kind_of_module(module), parents, None, 0, origin)
            self._modules.pop()

        handles = [register_module_forward_pre_hook(enter), register_module_forward_hook(leave)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _follow(self, function: Any, args: Any, kwargs: Any, result: Any, outputs: list[Tensor]) -> None:
        name = name_of(function)
        if name == "__setitem__":
            self._assign(function, args)
            return
        if not outputs:
            return
        origins = self._origins_of(function, args, kwargs, result, len(outputs))
        kind = _kind(name, args, kwargs, self._number)
        parents = self._sides(name, args, kwargs) if kind == "addition" else self._steps_in((args, kwargs))
        for place, (tensor, origin) in enumerate(zip(outputs, origins, strict=True)):
            self._add(tensor, kind, parents, function, place, origin)

    def _origins_of(self, function: Any, args: Any, kwargs: Any, result: Any, count: int) -> list[Origin | None]:
        if chooses(function, args, kwargs, lambda one: self._number(one) is not None):
            return [None] * count
        try:
            found = follow(function, args, kwargs, result, self._origin)
        except (RuntimeError, TypeError, IndexError, ValueError, KeyError, AttributeError):
            found = None  # a function that has no rule: its result lies nowhere known
        found = list(found) if isinstance(found, (list, tuple)) else [found]
        return found if len(found) == count else [*found[:1], *[None] * (count - 1)]

    def _assign(self, function: Any, args: Any) -> None:
        target, index, value = args
        try:
            origin = assign(target, self._origin(target), index, self._origin(value))
        except (RuntimeError, TypeError, IndexError, ValueError):
            origin = self._origin(target)
        self._add(target, "movement", self._steps_in((target, value)), function, 0, origin)

    def _sides(self, name: str, args: Any, kwargs: Any) -> tuple[int, ...]:
        """The two sides of an addition; a product that is added counts as one, by its later factor."""
        sides = [self._steps_in(args[:1]), self._steps_in((args[1:], kwargs))]
        return tuple(max(side) for side in sides if side)

    def _origin(self, value: Any) -> Origin | None:
        number = self._number(value)
        return None if number is None else self._origins[number]

    def _number(self, value: Any) -> int | None:
        return self._known.get(value) if isinstance(value, Tensor) else None

    def _steps_in(self, value: Any) -> tuple[int, ...]:
        found = (self._number(tensor) for tensor in _tensors(value))
        return tuple(dict.fromkeys(number for number in found if number is not None))

    def _add(
        self, tensor: Tensor, kind: str, parents: tuple[int, ...], function: Any, output: int, origin: Origin | None
    ) -> None:
        number = len(self.record.steps)
        if origin is not None and origin.shape != tensor.shape:
            origin = None
        self.record.steps.append(
            Step(
                number=number,
                kind=kind,
                parents=parents,
                module=self._modules[-1],
                name=name_of(function) if function is not None else "",
                function=function,
                call=len(self.record.calls) - 1,
                output=output,
                shape=tensor.shape,
                points=None if origin is None or origin.key is not None else origin.points,
            )
        )
        self._origins[number] = origin
        self._known[tensor] = number


def record(model: nn.Module, images: Tensor) -> Record:
    """The steps of ``model(images)``, uncompiled: compiled code would run past the interception."""
    names = {id(module): name for name, module in model.named_modules()}
    recorder = Recorder(images, names)
    with torch.compiler.set_stance("force_eager"), recorder.modules(), recorder:
        model(images)
    return recorder.record


def _tensors(value: Any) -> list[Tensor]:
    """The tensors in nested arguments, in order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, (list, tuple)):
        return []
    return [tensor for part in value for tensor in _tensors(part)]


def _kind(name: str, args: Any, kwargs: Any, number: Callable[[Any], int | None]) -> str:
    """What a call does to a representation."""
    if "attention" in name or "multi_head" in name:
        return "attention"
    if name in PRODUCTS or name in ("einsum", "addmm", "baddbmm"):
        factors = [tensor for tensor in _tensors((args, kwargs)) if number(tensor) is not None]
        return "attention" if len(factors) > 1 else "linear"
    if name == "linear":
        return "linear"
    if name in CONVOLUTIONS or name.startswith("conv_transpose"):
        weight = args[1] if len(args) > 1 else kwargs["weight"]
        return "convolution" if max(weight.shape[2:]) > 1 else "linear"
    if name in POOLS:
        return "pooling"
    if name in ADDITIONS:
        return "addition"
    return "movement" if name in MOVES or name in MOVES_LIKE else "pointwise"


def _kind_of_module(module: nn.Module) -> str:
    """What a module does whose calls are out of sight, as far as its weights tell."""
    if "attention" in type(module).__name__.lower():
        return "attention"
    weights = [parameter for parameter in module.parameters() if parameter.ndim > 1]
    if any(max(weight.shape[2:], default=1) > 1 for weight in weights):
        return "convolution"
    return "linear" if weights else "pointwise"
