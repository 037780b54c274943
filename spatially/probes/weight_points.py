"""Points of a path of weights: measured one by one, so that a grid runs over processes and goes on where it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from math import isfinite, isnan
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from spatially.errors import UserError
from spatially.observe.finite import first_not_finite
from spatially.probes.ahead import Outcomes, read
from spatially.probes.base import Rows
from spatially.probes.intervals import student, wilson
from spatially.probes.weight_losses import Batch, Batches, Losses, penalty
from spatially.subject.subject import HALF

if TYPE_CHECKING:
    from spatially.subject import Subject


class Path(Protocol):
    """What `spatially.probes.weight_paths` offers."""

    weights: dict[str, Tensor]

    def move(self, *place: float) -> None: ...
    def squared_norms(self, *place: float) -> Tensor: ...


class Measuring:
    """Measures points of one model's path, by their numbers; the path is made when the first is asked for."""

    def __init__(
        self,
        subject: Subject,
        batches: Batches,
        *,
        path: Callable[[], Any],
        places: Sequence[tuple[float, ...]],
        weight_decay: float,
        style: str = "filter",
    ) -> None:
        self._subject, self._batches, self._losses = subject, batches, Losses(subject)
        self._make, self._places = path, places
        self._weight_decay, self._style = weight_decay, style

    @cached_property
    def _path(self) -> Path:
        return self._make()

    def __call__(self, rows: Rows, *, stopped: NDArray[np.bool_] | None = None) -> Outcomes:
        places = [self._places[int(number)] for number in rows]
        sums = [self._sums(place) for place in places]
        l2 = [penalty(self._path.squared_norms(*place), self._weight_decay, style=self._style) for place in places]

        def finish(found: NDArray[np.float64]) -> xr.Dataset:
            for place, (total, *_) in zip(places, found, strict=True):
                if not any(place):
                    check_origin(self._subject, self._batches, total)
            each = [outcome(*one, self._batches.count) for one in zip(found.tolist(), l2, strict=True)]
            return xr.Dataset(
                {name: ("point", [one[name] for one in each]) for name in each[0]}, coords={"point": rows}
            )

        return read(torch.stack(sums), finish)

    def _sums(self, place: tuple[float, ...]) -> Tensor:
        """What is left on the device of a point."""
        self._path.move(*place)
        return self._losses.at(self._path.weights, self._batches)


def outcome(sums: Sequence[float], l2: float, count: int) -> dict[str, Any]:
    """One point's numbers from its sums over ``count`` images."""
    total, squares, right = sums
    nll = total / count
    # Rounding may leave a variance of nothing a hair below 0.
    deviation = (max(squares - total * nll, 0.0) / (count - 1)) ** 0.5 if count > 1 and isfinite(squares) else np.nan
    accuracy = np.nan if isnan(total) else right / count
    return {"nll": nll, "nll_deviation": deviation, "l2": l2, "accuracy": accuracy, "measured": count}


def with_intervals(outcomes: xr.Dataset) -> xr.Dataset:
    """The loss, and the ends of the intervals of NLL and accuracy, wherever they were measured."""
    result = outcomes.copy()
    for start in ("", "origin_"):
        if f"{start}nll" not in result:
            continue
        nll, accuracy, count = (result[start + name] for name in ("nll", "accuracy", "measured"))
        result[f"{start}loss"] = nll + result[f"{start}l2"]
        spread = student(nll.values, result[f"{start}nll_deviation"].values, count.values, within=(0.0, np.inf))
        shares = wilson(accuracy.values * count.values, count.values)
        for end, nlls, accuracies in zip(("_low", "_high"), spread, shares, strict=True):
            result[f"{start}nll{end}"] = (nll.dims, nlls)
            result[f"{start}accuracy{end}"] = (nll.dims, accuracies)
    return result


def check_origin(subject: Subject, batches: Iterable[Batch], total: float) -> None:
    """A model whose own loss is no number has no landscape."""
    if not isfinite(total):
        layer = next((found for images, _ in batches if (found := first_not_finite(subject, images))), None)
        where = f": the output of {layer} is not finite" if layer else ""
        advice = "try --dtype float32" if subject.dtype in HALF else "look at its weights and the images"
        raise UserError(f"the loss of {subject.name} at its own weights is {total}{where}; {advice}")


def check_weight_decay(value: float) -> float:
    """A weight decay of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < np.inf:
        raise UserError(f"weight_decay must be a number of at least 0, but came as {value!r}")
    return float(value)


def even(low: float, high: float, count: int) -> tuple[float, ...]:
    """``count`` values from ``low`` to ``high``, without the crumbs of binary fractions.

    >>> even(-1, 1, 5), even(0, 0.3, 4)
    ((-1.0, -0.5, 0.0, 0.5, 1.0), (0.0, 0.1, 0.2, 0.3))
    """
    return tuple(round(float(value), 12) + 0.0 for value in np.linspace(low, high, count))


def check_range(value: Any) -> tuple[float, float]:
    try:
        low, high = (float(end) for end in value)
    except (TypeError, ValueError):
        raise UserError(f"extent must hold two numbers for an axis, but came as {value!r}") from None
    if not (isfinite(low) and isfinite(high) and low < high):
        raise UserError(f"extent must go from a lower to a higher number, but came as {value!r}")
    return low, high
