"""What stops a training before its end: a signal, after which it is saved, or a loss that is no number any more."""

import math
import signal
import threading
from collections.abc import Sequence
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import nn

from spatially.errors import UserError
from spatially.train.recipe import Recipe

# A model that guesses has a loss of ln(classes). One that is ten times beyond this, and what it began with, for so many
# steps has lost everything it knew.
EXPLODED = 10.0
PATIENCE = 20


class Diverged(UserError):
    """The loss became NaN, infinite or far larger than at the beginning."""


class Stopped(SystemExit):
    """The training was asked to stop and is saved: code 0 after SIGTERM, 130 after Ctrl-C."""


class Signals:
    """Remembers SIGTERM and Ctrl-C while inside; a second Ctrl-C interrupts at once. Only the main thread hears them."""

    def __init__(self) -> None:
        self.received = 0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Signals":
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number


def exit_code(number: int) -> int:
    """Of a process that saved its work after a signal: SIGTERM is how machines ask, and no failure."""
    return 0 if number == signal.SIGTERM else 128 + number


def highest(first: float, *, classes: int) -> float:
    """The loss beyond which a training that began with `first` has exploded."""
    return EXPLODED * max(first, math.log(classes))


def check_losses(losses: Sequence[float], *, first_step: int, limit: float, above: int, kept: str) -> int:
    """Raise :class:`Diverged` if one of the losses of consecutive steps is not finite, or too many lie above `limit`.

    `above` is how many of the steps just before did, and the answer how many of the last ones do now.

    >>> check_losses([0.7, 9.0, 9.5], first_step=0, limit=7, above=5, kept="")
    2
    """
    for step, loss in enumerate(losses, start=first_step):
        if not math.isfinite(loss):
            raise diverged(f"the loss is {loss} at step {step}", kept)
        above = above + 1 if loss > limit else 0
        if above == PATIENCE:
            raise diverged(f"the loss was above {limit:.3g} for {PATIENCE} steps, up to step {step}", kept)
    return above


def diverged(what: str, kept: str) -> Diverged:
    """The error, with what to do."""
    return Diverged(
        f"training diverged: {what}; {kept}. A smaller optimiser.lr, a longer schedule.warmup_epochs or a "
        "regularisation.clip may help; change them with --set and another --out"
    )


@torch.no_grad()
def weights_finite(model: nn.Module) -> bool:
    """Whether every weight is a number; one question to the device."""
    weights = [parameter.detach() for parameter in model.parameters()]
    if not weights:
        return True
    return bool(torch.isfinite(torch.stack(torch._foreach_norm(weights))).all())


def memory_error(recipe: Recipe) -> UserError:
    """For a batch that does not fit."""
    more = 2 * recipe.run.accumulation
    return UserError(
        f"the device has too little memory for a batch of {recipe.batch}: give --set run.accumulation={more} (the same "
        "training in smaller parts), --set run.checkpointing=true, or a smaller --set batch=…"
    )
