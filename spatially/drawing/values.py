"""Reading results: one number with its interval, in words when there is none."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import isfinite, nan
from typing import Any

import numpy as np
import xarray as xr

Results = Mapping[str, xr.Dataset]

KINDS = ("shuffle", "mask")
DONE = {"shuffle": "shuffled", "mask": "masked"}

NARROW_SPACE = "\u202f"  # no line ends between a number and its unit


@dataclass(frozen=True)
class Estimate:
    """A value and its interval; all NaN when undefined."""

    value: float
    low: float
    high: float

    @property
    def defined(self) -> bool:
        return isfinite(self.value)

    @property
    def bounded(self) -> bool:
        return isfinite(self.low) and isfinite(self.high)


def position(labels: Any, label: Any) -> int | None:
    """Where ``label`` stands among a coordinate's values; ratios are compared as numbers, not as bits."""
    values = np.asarray(labels)
    same = np.isclose(values, label, atol=1e-9) if values.dtype.kind == "f" else values == label
    found = np.flatnonzero(same)
    return int(found[0]) if found.size else None


def number(dataset: xr.Dataset, name: str, **labels: Any) -> float:
    """One number of a result; NaN when it was not measured."""
    if name not in dataset:
        return nan
    array = dataset[name]
    for dimension, label in labels.items():
        if dimension in array.dims:
            place = position(array[dimension].values, label)
            if place is None:
                return nan
            array = array.isel({dimension: place})
    return float(array) if array.ndim == 0 else nan


def estimate(dataset: xr.Dataset, name: str, **labels: Any) -> Estimate:
    """One number with its interval."""
    value, low, high = (number(dataset, name + end, **labels) for end in ("", "_low", "_high"))
    return Estimate(value, low, high)


def kinds(dataset: xr.Dataset) -> list[str]:
    return [str(kind) for kind in dataset["kind"].values] if "kind" in dataset.coords else []


def blocks(results: Results) -> list[int]:
    """Every block size that any model was measured with, small to large."""
    return sorted({int(block) for dataset in results.values() for block in np.atleast_1d(dataset["block"].values)})


def ratios(results: Results) -> list[float]:
    """Every ratio that any model was measured with, small to large."""
    return sorted({float(ratio) for dataset in results.values() for ratio in np.atleast_1d(dataset["ratio"].values)})


def clean_accuracy(dataset: xr.Dataset) -> Estimate:
    """Accuracy at ratio 0, which is the same for every kind and block: the identity."""
    for kind in kinds(dataset):
        for block in dataset["block"].values:
            found = estimate(dataset, "accuracy", kind=kind, block=block, ratio=0.0)
            if found.defined:
                return found
    return Estimate(nan, nan, nan)


def attribute(dataset: xr.Dataset, name: str) -> float:
    """A number among the attributes; NaN when it is missing or says "none"."""
    try:
        return float(dataset.attrs.get(name, nan))
    except (TypeError, ValueError):
        return nan


def square(block: int) -> str:
    return f"{block}×{block}"


def percent(value: float, *, unit: bool = True) -> str:
    """A share in per cent, with a decimal only where rounding would claim "none" or "all".

    >>> percent(0.961, unit=False), percent(0.0016, unit=False), percent(float("nan"))
    ('96', '0.16', '–')
    """
    if not isfinite(value):
        return "–"
    shown = 100 * value
    near = min(abs(shown), abs(100 - shown))
    digits = 0 if near >= 0.95 or near < 1e-9 else 1 if near >= 0.195 else 2
    return f"{shown:.{digits}f}" + (f"{NARROW_SPACE}%" if unit else "")


def with_interval(found: Estimate) -> str:
    """For example "96 % [94, 98]"."""
    interval = f" [{percent(found.low, unit=False)}, {percent(found.high, unit=False)}]" if found.bounded else ""
    return percent(found.value) + interval


def thousands(count: float) -> str:
    return f"{int(count):,}" if isfinite(count) else "–"


def listing(words: Iterable[str]) -> str:
    """
    >>> listing(["a", "b", "c"])
    'a, b and c'
    """
    *first, last = words
    return f"{', '.join(first)} and {last}" if first else last


def undefined_because(dataset: xr.Dataset, *, kind: str, block: int) -> str:
    """Why a summary of the sensitivity probe is NaN."""
    action = {"shuffle": "shuffling", "mask": "masking"}.get(kind, kind)
    if kind not in kinds(dataset):
        return f"{action} was not measured"
    if position(np.atleast_1d(dataset["block"].values), block) is None:
        return f"{square(block)} blocks were not measured"
    clean, chance = clean_accuracy(dataset).value, attribute(dataset, "chance")
    if not isfinite(clean):
        return "clean images (α = 0) were not measured"
    if clean <= chance:
        return f"its accuracy on clean images ({percent(clean)}) is not above chance ({percent(chance)})"
    if not isfinite(number(dataset, "accuracy", kind=kind, block=block, ratio=1.0)):
        return f"α = 1 was not measured for {action}"
    return "the measurement gave no value"


def covered(results: Results, block: int) -> str:
    """Which share of the image whole blocks cover, where that is not all of it, and the same for all models."""
    found = [number(dataset, "covered", block=block) for dataset in results.values()]
    partly = sorted({round(value, 3) for value in found if isfinite(value) and value < 0.9995})
    return percent(partly[0]) if len(partly) == 1 else ""


def covered_note(results: Results) -> str:
    """What to know of block sizes that leave a strip of the image as it is; empty where none does."""
    shares = {square(block): covered(results, block) for block in blocks(results)}
    partly = [f"{size} blocks cover {share}" for size, share in shares.items() if share]
    return f"{listing(partly)} of the image; the rest stays as it is." if partly else ""
