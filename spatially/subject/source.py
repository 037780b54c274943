"""What every source of models is asked for, and what it hands back."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from spatially.errors import UserError
from spatially.subject.classes import ClassNames
from spatially.subject.preprocessing import Preprocessing


@dataclass(frozen=True)
class Request:
    """What the user wants of a model, whatever its source."""

    pretrained: bool = True
    num_classes: int | None = None
    input_size: tuple[int, int] | None = None
    model_options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0


@dataclass(frozen=True)
class Built:
    """A model and what its source knows about it. `answers` is None when only a forward pass can tell."""

    model: nn.Module
    name: str
    source: str
    preprocessing: Preprocessing
    answers: int | None = None
    classes: ClassNames = field(default_factory=ClassNames)


@contextmanager
def construction(name: str, seed: int) -> Iterator[None]:
    """Random weights drawn from `seed` alone, and an option the model does not know told as the user's mistake.

    Models are built on the CPU, so only its generator is set, and put back afterwards.
    """
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            yield
        except TypeError as error:
            if "keyword argument" not in str(error):
                raise
            raise UserError(f"model_options: {name} does not take these ({error})") from error


def no_weights(name: str) -> UserError:
    return UserError(
        f"no weights for {name} here (none exist, or they could not be downloaded): give checkpoint=FILE or "
        "pretrained=False (on the command line: --checkpoint FILE or --no-pretrained)"
    )


def model_answers(model: nn.Module) -> int | None:
    """How many classes a model says it has."""
    number = getattr(model, "num_classes", None)
    return number if isinstance(number, int) else None
