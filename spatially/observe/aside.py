"""What runs while this lasts is an observer, or a pass that it learns from, and no observer looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

_aside = ContextVar("aside", default=False)


def is_aside() -> bool:
    """Whether what runs is not the model under observation."""
    return _aside.get()


@contextmanager
def step_aside() -> Iterator[None]:
    token = _aside.set(True)
    try:
        yield
    finally:
        _aside.reset(token)


@contextmanager
def unnoticed(device: torch.device) -> Iterator[None]:
    """A pass that nobody sees, and that takes no random numbers from those to come."""
    devices = [device] if device.type == "cuda" else []
    with step_aside(), torch.random.fork_rng(devices=devices):
        yield
