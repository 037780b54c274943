"""What was measured, from the attributes of the results: everything needed to repeat it."""

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xarray as xr

from spatially.drawing.values import Results, percent, thousands

# In reading order; attributes that are not named here follow in their own order.
LABELS = {
    "definition": "Definition",
    "paper": "Paper",
    "options": "Options",
    "data": "Data",
    "data_fingerprint": "Data fingerprint",
    "images": "Images",
    "skipped": "Skipped images",
    "skipped_names": "Skipped by name",
    "classes": "Classes",
    "chance": "Chance",
    "bag_accuracy": "Best bag of patches",
    "parameters": "Parameters",
    "patch": "Patch side (pixels)",
    "source": "From",
    "weights": "Weights",
    "weights_fingerprint": "Weights' fingerprint",
    "preprocessing": "Preprocessing",
    "seed": "Seed",
    "precision": "Asked precision",
    "interval": "Intervals",
    "device": "Device",
    "dtype": "Number format",
    "class_mapping": "Class mapping",
    "batch": "Batch",
    "versions": "Versions",
    "command": "Command",
}
COUNTS = {"images", "skipped", "classes", "parameters", "batch"}
SHARES = {"chance", "bag_accuracy"}
HIDDEN = {"probe", "model", "class_names", "key", "position", "answers"}
OF_A_MODEL = {
    "parameters",
    "patch",
    "weights",
    "weights_fingerprint",
    "preprocessing",
}  # shown beside the model even when all are alike


OF_A_PROBE = {"definition", "paper", "options"}  # shown with the probe even when there is only one


@dataclass(frozen=True)
class Provenance:
    """Facts that all models share, those that differ, and the commands that repeat the measurement."""

    shared: Mapping[str, str]
    columns: list[str]
    models: Mapping[str, list[str]]
    commands: list[str]


def of_the_study(results: Mapping[str, Results]) -> tuple[Provenance, dict[str, Provenance]]:
    """What holds for every probe, said once, and what is left to say about each."""
    every = [dataset for models in results.values() for dataset in models.values()]
    present = {key for dataset in every for key in map(str, dataset.attrs)} - HIDDEN - OF_A_PROBE - {"command"}
    names = dict.fromkeys(name for models in results.values() for name in models)
    of = {name: [models[name] for models in results.values() if name in models] for name in names}
    settled = {key for key in present if all(_one_value(datasets, key) for datasets in of.values())}
    general = provenance({name: datasets[0] for name, datasets in of.items()}, only=settled)
    commands = list(dict.fromkeys(str(one.attrs["command"]) for one in every if "command" in one.attrs))
    general = replace(general, commands=commands if len(commands) == 1 else [])
    probes = {probe: provenance(models, without=settled) for probe, models in results.items()}
    if len(commands) == 1:
        probes = {probe: replace(one, commands=[]) for probe, one in probes.items()}
    return general, probes


def _one_value(datasets: Sequence[xr.Dataset], key: str) -> bool:
    return len({shown_value(dataset, key) for dataset in datasets}) == 1


def provenance(
    results: Results, *, only: Collection[str] | None = None, without: Collection[str] = frozenset()
) -> Provenance:
    present = {key for dataset in results.values() for key in map(str, dataset.attrs)} - HIDDEN - {"command"}
    present = {key for key in present if key not in without and (only is None or key in only)}
    keys = [key for key in LABELS if key in present]
    keys += sorted(present - LABELS.keys())
    shown = {name: {key: shown_value(dataset, key) for key in keys} for name, dataset in results.items()}
    alike = [key for key in keys if key not in OF_A_MODEL and len({values[key] for values in shown.values()}) == 1]
    columns = [key for key in keys if key not in alike]
    first = next(iter(shown.values()))
    commands = dict.fromkeys(
        str(dataset.attrs["command"]) for dataset in results.values() if "command" in dataset.attrs
    )
    return Provenance(
        shared={label(key): first[key] for key in alike},
        columns=[label(key) for key in columns],
        models={name: [values[key] for key in columns] for name, values in shown.items()},
        commands=list(commands),
    )


def label(key: str) -> str:
    return LABELS.get(key, key.replace("_", " ").capitalize())


def shown_value(dataset: xr.Dataset, key: str) -> str:
    """An attribute as a person reads it."""
    value = dataset.attrs.get(key)
    if value is None or value == "":
        return "–"
    if key in COUNTS and _is_number(value):
        return thousands(float(value))
    if key in SHARES and _is_number(value):
        return percent(float(value))
    return _spelled(_parsed(value))


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (TypeError, ValueError):
        return False
    return True


def _parsed(value: Any) -> Any:
    """JSON where it is JSON with something inside it; numpy's values (netCDF gives them) as Python's."""
    if isinstance(value, np.generic | np.ndarray):
        return value.tolist()
    if isinstance(value, str) and value[:1] in "[{":
        try:
            return json.loads(value)
        except json.JSONDecodeError:
            return value
    return value


def _spelled(value: Any) -> str:
    """Nested values as words: ``{"crop": 224, "mean": [0.5]}`` becomes "crop 224; mean 0.5"."""
    if isinstance(value, Mapping):
        return "; ".join(f"{key} {_spelled(inner)}" for key, inner in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ", ".join(_spelled(inner) for inner in value) or "none"
    if isinstance(value, bool) or value is None:
        return {None: "none", True: "yes", False: "no"}[value]
    return f"{value:g}" if isinstance(value, float) else str(value)
