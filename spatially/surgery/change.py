"""What an operation did to a model, and how to take it back.

`Edits` writes down every change as it is made: a class, a submodule, a parameter, a value, a hook. `Change` is what the
user gets: the names of what changed, and `undo`, after which the model has the same modules, the same parameters and the
same bits in the same order as before.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType, TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.subject import Subject

_ABSENT = object()


class Edits:
    """Changes in the order they were made; `revert` takes them back in the opposite order.

    In a `with` block an error takes back what was done before it: an operation is done as a whole or not at all.
    """

    def __init__(self) -> None:
        self._reverts: list[Callable[[], None]] = []
        self._checks: list[Callable[[], None]] = []

    def __enter__(self) -> "Edits":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.revert()

    def set_class(self, module: nn.Module, kind: type[nn.Module]) -> None:
        """Give the very same module another `forward`: its weights, hooks and place stay what they are."""
        before = type(module)
        module.__class__ = kind
        self._reverts.append(lambda: setattr(module, "__class__", before))

    def set_attribute(self, owner: object, name: str, value: Any) -> None:
        """A plain attribute of the instance, no module and no parameter."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._reverts.append(lambda: delattr(owner, name) if before is _ABSENT else setattr(owner, name, before))

    def set_module(self, owner: nn.Module, name: str, module: nn.Module) -> None:
        """Put a submodule in, or in another's place."""
        self._set_slot(owner, owner._modules, name, module.train(owner.training), beside=owner)

    def drop_parameter(self, owner: nn.Module, name: str, *, beside: nn.Module) -> None:
        """Take a parameter out; the attribute reads None. It comes back to the device and dtype that `beside` has then."""
        self._set_slot(owner, owner._parameters, name, None, beside=beside)

    def set_values(self, owner: nn.Module, name: str, values: Tensor) -> None:
        """New numbers in the same parameter; the old ones return to the one of that name then."""
        before = owner.get_parameter(name).detach().clone()
        _write(owner.get_parameter(name), values)
        self._reverts.append(lambda: _write(owner.get_parameter(name), before))

        def check() -> None:
            now = owner._parameters.get(name)
            if now is None or now.shape != before.shape:
                came = "taken out" if now is None else f"resized to {tuple(now.shape)}"
                raise UserError(
                    f"{name} of {type(owner).__name__} was {came} after the change: "
                    f"give it back its shape {tuple(before.shape)} first, as timm's set_input_size does"
                )

        self.add_check(check)

    def add_check(self, check: Callable[[], None]) -> None:
        """Call `check` before the user takes the changes back; it raises where the model would not be itself again."""
        self._checks.append(check)

    def check(self) -> None:
        """Raise if the changes cannot be taken back now; nothing changes."""
        for check in self._checks:
            check()

    def add_hook(self, module: nn.Module, hook: Callable[..., Any]) -> None:
        """Call `hook(module, arguments, output)` after every forward of the module."""
        self._reverts.append(module.register_forward_hook(hook).remove)

    def revert(self) -> None:
        """Take everything back."""
        while self._reverts:
            self._reverts.pop()()

    def _set_slot(self, owner: nn.Module, slots: dict[str, Any], name: str, value: Any, *, beside: nn.Module) -> None:
        before = slots.get(name, _ABSENT)
        plain = vars(owner).pop(name, _ABSENT)  # `self.name = None` in a constructor hides what is registered later
        slots[name] = value  # a name that is there keeps its place in the order

        def revert() -> None:
            if plain is not _ABSENT:
                vars(owner)[name] = plain
            if before is _ABSENT:
                del slots[name]
            else:
                slots[name] = before
                _follow(before, beside)

        self._reverts.append(revert)


def _write(parameter: Tensor, values: Tensor) -> None:
    with torch.no_grad():
        parameter.copy_(values)


def _follow(part: Any, beside: nn.Module) -> None:
    """A part that was out of the model joins it where the model is now; nothing to do if the model has not moved."""
    own = {id(tensor) for tensor in (part.parameters() if isinstance(part, nn.Module) else [part])}
    like = next((tensor for tensor in beside.parameters() if id(tensor) not in own), None)
    if isinstance(part, nn.Module):
        part.train(beside.training)
        if like is not None:
            part.to(device=like.device, dtype=like.dtype)
    elif isinstance(part, Tensor) and like is not None:
        part.data = part.data.to(device=like.device, dtype=like.dtype)


# Which changes of a network are in force, oldest first. The tokens know nothing of the network, so it can be collected.
_IN_FORCE: WeakKeyDictionary[nn.Module, list["_Token"]] = WeakKeyDictionary()


class _Token:
    def __init__(self, operation: str, options: Mapping[str, Any]) -> None:
        self.operation = operation
        self.options = options


def options_in_force(module: nn.Module, operation: str) -> list[Mapping[str, Any]]:
    """The `options` of every change of that kind in force on a network that has the module, oldest first."""
    return [token.options for token in _IN_FORCE.get(module, ()) if token.operation == operation]


class Change:
    """A change in force. As a context manager it is undone at the end.

    Attributes:
        model: the changed model, the very one that was given (the module, for a `Subject`).
        operation: what was done.
        changed: names of the modules or parameters that changed, as `model` calls them; empty if it was so already.
    """

    def __init__(
        self,
        given: nn.Module | Subject,
        operation: str,
        *,
        edits: Edits,
        changed: Sequence[str],
        trunks: Iterable[nn.Module],
        options: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.model = module_of(given)
        self.operation = operation
        self.changed = tuple(changed)
        self._given = given
        self._edits: Edits | None = edits
        self._token = _Token(operation, options)
        # All modules are told: a stage of this network may be given alone next time.
        self._modules = [module for trunk in trunks for module in trunk.modules()] if self.changed else []
        for module in self._modules:
            _IN_FORCE.setdefault(module, []).append(self._token)
        _tell(given)

    def undo(self) -> None:
        """Give the model back its own modules, parameters and values, bit for bit. Twice is once.

        Changes of one network are undone last first: anything else is a `UserError`, as is a network that was resized
        after the change so that what was there does not fit. Nothing is undone then.
        """
        if self._edits is None:
            return
        for module in self._modules:
            last = _IN_FORCE[module][-1]
            if last is not self._token:
                raise UserError(
                    f"{self.operation} cannot be undone yet: undo {last.operation}, which came later, first"
                )
        self._edits.check()
        self._edits.revert()
        self._edits = None
        for module in self._modules:
            _IN_FORCE[module].pop()
        _tell(self._given)

    def __enter__(self) -> "Change":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.undo()

    def __repr__(self) -> str:
        state = "undone" if self._edits is None else f"{len(self.changed)} changed"
        return f"Change({self.operation}, {type(self.model).__name__}, {state})"


def module_of(given: nn.Module | Subject) -> nn.Module:
    """The network in what the user gave."""
    if isinstance(given, Subject):
        return given.model
    if isinstance(given, nn.Module):
        return given
    raise UserError(f"model must be a torch module or a Subject: got {type(given).__name__}")


def _tell(given: nn.Module | Subject) -> None:
    if isinstance(given, Subject):
        given.weights_changed()
