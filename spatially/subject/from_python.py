"""Models of one's own: an `nn.Module`, or `package.module:callable` that makes one."""

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from torch import nn

from spatially.errors import UserError, unknown
from spatially.subject.from_timm import class_names
from spatially.subject.preprocessing import from_timm, plain
from spatially.subject.source import Built, Request, construction


def build_module(model: nn.Module, request: Request, *, name: str | None = None, source: str = "module") -> Built:
    """A module as it is. One with timm's `pretrained_cfg` says its preprocessing; any other needs `input_size`."""
    plain_model = uncompiled(model)
    name = name or type(plain_model).__name__
    if source == "module" and request.model_options:
        raise UserError(f"model_options: are for models made by name, got them with a finished {name}")
    if getattr(plain_model, "pretrained_cfg", None) or getattr(plain_model, "default_cfg", None):
        preprocessing = from_timm(plain_model, request.input_size, name)
        return Built(model, name, source, preprocessing, classes=class_names(plain_model))
    return Built(model, name, source, plain(request.input_size, name))


def uncompiled(model: nn.Module) -> nn.Module:
    """The module that `torch.compile` was given; one that it did not wrap is returned as it is.

    >>> module = nn.Linear(2, 2)
    >>> uncompiled(module) is module
    True
    """
    inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, nn.Module) else model


def build_callable(name: str, request: Request) -> Built:
    """Call `package.module:callable` with `model_options`, and with `num_classes` if it takes that."""
    module_name, _, attribute = name.partition(":")
    with _current_directory():
        try:
            module = import_module(module_name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
                raise  # it was found, and one of its own imports was not
            raise UserError(f"model {name!r}: there is no module {module_name} here or installed") from error
        make = getattr(module, attribute, None)
        if not callable(make):
            raise unknown(f"callable in {module_name}", attribute, _callables(module))
        options = dict(request.model_options)
        if request.num_classes is not None and "num_classes" in inspect.signature(make).parameters:
            options["num_classes"] = request.num_classes
        with construction(name, request.seed):
            model = make(**options)
    if not isinstance(model, nn.Module):
        raise UserError(f"model {name!r}: must return a torch.nn.Module, got {type(model).__name__}")
    return build_module(model, request, name=name, source="callable")


def _callables(module: object) -> list[str]:
    return [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]


@contextmanager
def _current_directory() -> Iterator[None]:
    """The current directory importable, as it is for a script in it."""
    here = os.getcwd()
    sys.path.insert(0, here)
    try:
        yield
    finally:
        sys.path.remove(here)
