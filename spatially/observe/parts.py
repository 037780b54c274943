"""What a model's way of computing depends on, as something that is quickly compared: it is asked before every pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from torch import nn


def walk(model: nn.Module) -> Iterator[nn.Module]:
    """Every module once, as `model.modules()`, several times as fast and in another order."""
    waiting, met = [model], {id(model)}
    while waiting:
        module = waiting.pop()
        yield module
        for part in module._modules.values():
            if part is not None and id(part) not in met:
                met.add(id(part))
                waiting.append(part)


def signature(model: nn.Module) -> tuple[Any, ...]:
    """The modules with the names of their parts and their plain settings: another tuple once one of them is another.

    >>> model = nn.Sequential(nn.Softmax(dim=-1), nn.ReLU())
    >>> before = signature(model)
    >>> model[0].dim = -2
    >>> signature(model) == before
    False
    """
    found: list[Any] = []
    for module in walk(model):
        found += (id(module), type(module), module.training, *module._modules)
        for name, value in _settings(module):
            kind = type(value)
            if kind in _SCALARS:
                found += (name, kind, value)  # 1, 1.0 and True are equal
            elif _plain(value):
                found += (name, repr(value))
    return tuple(found)


def _settings(module: nn.Module) -> Iterable[tuple[str, Any]]:
    """What was set on a module beyond what all modules have, which comes first unless somebody was earlier."""
    own = vars(module)
    if tuple(islice(own, len(_COMMON))) != _COMMON:
        return own.items()
    return islice(own.items(), len(_COMMON), None)


_COMMON = tuple(vars(nn.Module()))
_SCALARS = frozenset({bool, int, float, str, type(None)})


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_plain(one) for one in value)
    return value is None or isinstance(value, (int, float, str))
