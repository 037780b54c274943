"""What a model's way of computing depends on, as something that is quickly compared: it is asked before every pass."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from spatially.errors import NotApplicable

if TYPE_CHECKING:
    from spatially.subject import Subject


def walk(model: nn.Module) -> Iterator[nn.Module]:
    """Every module once, as `model.modules()`, several times as fast and in another order."""
    waiting, met = [model], {id(model)}
    while waiting:
        module = waiting.pop()
        yield module
        for part in () if isinstance(module, torch.jit.ScriptModule) else module._modules.values():
            if part is not None and id(part) not in met:
                met.add(id(part))
                waiting.append(part)


def check_python(subject: Subject) -> None:
    """Refuse a model that is, or holds, code that runs past every interception."""
    if any(isinstance(module, torch.jit.ScriptModule) for module in walk(subject.model)):
        raise NotApplicable(f"{subject.name} is TorchScript, which cannot be looked into; load it as a Python module")


def signature(model: nn.Module) -> tuple[Any, ...]:
    """The modules with the names of their parts and their plain settings: another tuple once one of them is another.

    >>> model = nn.Sequential(nn.Softmax(dim=-1), nn.ReLU())
    >>> before = signature(model)
    >>> model[0].dim = -2
    >>> signature(model) == before
    False
    """
    found: list[Any] = []
    waiting, met = [model], {id(model)}
    while waiting:
        module = waiting.pop()
        if isinstance(module, torch.jit.ScriptModule):  # whose parts are no Python objects
            found.append(id(module))
            continue
        own = module.__dict__
        parts = own["_modules"]
        found += (id(module), type(module), module.training)
        if parts:
            found += parts
            for part in parts.values():
                if part is not None and id(part) not in met:
                    met.add(id(part))
                    waiting.append(part)
        # What all modules have comes first, unless somebody was earlier: what is beyond was set on this one.
        common = _COMMON if next(islice(own, _COMMON - 1, None), None) == "_modules" else 0
        for name, value in islice(own.items(), common, None):
            kind = type(value)
            if kind in _SCALARS:
                found += (name, kind, value)  # 1, 1.0 and True are equal
            elif kind is tuple and _SCALARS.issuperset(kinds := tuple(map(type, value))):
                found += (name, kinds, value)
            elif _plain(value):
                found += (name, repr(value))
    return tuple(found)


_COMMON = len(vars(nn.Module()))
_SCALARS = frozenset({bool, int, float, str, type(None)})


def _plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(_plain(one) for one in value)
    return value is None or isinstance(value, (int, float, str))
