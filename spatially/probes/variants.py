"""A model as it came, untrained, and with its positions forgotten, for the figures that show them side by side (Kim, 2 and 4).

``given`` is the model itself. ``untrained`` is the same architecture with fresh weights. ``reset`` is the model with its
position embeddings and biases drawn anew, or set to zero as the authors' code does; nothing else changes in it.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from weakref import WeakKeyDictionary

import torch
from torch import nn

from spatially.errors import NotApplicable, UserError
from spatially.subject import Subject, load
from spatially.surgery import reset_positions
from spatially.surgery.hosts import find

GIVEN, UNTRAINED, RESET = "given", "untrained", "reset"
VARIANTS = (GIVEN, UNTRAINED, RESET)
NAMED = ("timm", "torchvision", "huggingface")  # sources whose models can be made again by their name

_FRESH: WeakKeyDictionary[nn.Module, dict[int, Subject]] = WeakKeyDictionary()


def check_variant(subject: Subject, name: str) -> None:
    """Raise if the model has no such variant."""
    if name == RESET and not _has_positions(subject.model):
        raise NotApplicable(f"{subject.name} has no positions that can be re-initialised (variant {RESET!r})")


@contextmanager
def variant(subject: Subject, name: str, *, seed: int, zero: bool = False) -> Iterator[Subject]:
    """The variant while this lasts; afterwards the subject is what it was, bit for bit."""
    if name == RESET:
        with reset_positions(subject, absolute="zero" if zero else True, seed=seed):
            yield subject
    elif name == UNTRAINED:
        yield untrained(subject, seed=seed)
    else:
        yield subject


def untrained(subject: Subject, *, seed: int) -> Subject:
    """The same architecture with fresh weights: made again by its library, or else with every layer's own initialiser."""
    known = _FRESH.setdefault(subject.model, {})
    if seed not in known:
        model = _made_again(subject, seed) or _drawn_again(subject.model, seed)
        known[seed] = Subject(
            model,
            subject.preprocessing,
            name=f"{subject.name} (untrained)",
            answers=subject.answers,
            device=subject.device,
            dtype=subject.dtype,
        )
    return known[seed]


def _made_again(subject: Subject, seed: int) -> nn.Module | None:
    facts = subject.describe()
    if facts.get("source") not in NAMED:
        return None
    try:
        model = load(
            subject.name,
            pretrained=False,
            input_size=subject.preprocessing.input_size,
            device=subject.device,
            dtype=subject.dtype,
            model_options=facts.get("model_options"),
            seed=seed,
        ).model
    except (UserError, OSError):  # it goes by another name here, or its configuration is out of reach
        return None
    return model if _shapes(model) == _shapes(subject.model) else None


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Without the classifier, whose number of classes is a choice of its own."""
    parameters = list(model.named_parameters())
    return {name: parameter.shape for name, parameter in parameters[:-2]}


def _drawn_again(model: nn.Module, seed: int) -> nn.Module:
    """A copy whose layers are all drawn anew. Parameters that belong to no layer, such as class tokens, keep their values."""
    fresh = copy.deepcopy(model)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in fresh.modules():
            if callable(reset := getattr(module, "reset_parameters", None)):
                reset()
    if _has_positions(fresh):
        reset_positions(fresh, seed=seed)
    return fresh


def _has_positions(model: nn.Module) -> bool:
    """Whether there are positions that surgery knows how to draw."""
    try:
        return any(host.positions() for host in find(model))
    except UserError:  # a relative of a network that can be changed, such as torchvision's Swin V2
        return False
