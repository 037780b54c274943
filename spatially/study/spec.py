"""What a study is made of, as one YAML file or one command line.

.. code-block:: yaml

    models: [resnet50.a1_in1k, {model: swin_tiny_patch4_window7_224, checkpoint: swin.safetensors}]
    data: {source: imagenet/val, limit: 5000}
    probes: {sensitivity: {blocks: [8, 16]}, paste: {}}
    batch: 64

``probes: all`` is every probe that has something to measure in a model; ``probes: {all: {}, paste: {block: 8}}`` with options
for one of them. Lengthy ones (``hessian``, ``landscape``) are named beside it: ``probes: [all, landscape]``.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from spatially.data import open_images
from spatially.errors import UserError, unknown
from spatially.probes import PROBES, Probe, probe_class
from spatially.probes.base import as_python
from spatially.subject import load

ALL = "all"
_HOW = ("workers", "cache", "strict")
_SAID_IN_WORDS = {
    "pretrained",
    "checkpoint",
    "num_classes",
    "input_size",
    "resize",
    "crop_mode",
    "mean",
    "std",
    "interpolation",
    "dtype",
    "class_map",
    "compile",
    "channels_last",
}
_SET_BY_THE_RUN = ("device", "progress", "subject", "labels", "classes", "answers")


def _option_names(function: Any) -> list[str]:
    return [name for name in inspect.signature(function).parameters if name not in _SET_BY_THE_RUN]


@dataclass(frozen=True, kw_only=True)
class Study:
    """Models (each the options of :func:`spatially.load`), data (those of ``open_images``), probes (name → options)."""

    models: list[dict[str, Any]]
    data: dict[str, Any]
    probes: dict[str, dict[str, Any]] = field(default_factory=lambda: {"sensitivity": {}})
    batch: int = 64

    def __post_init__(self) -> None:
        for name in ("models", "data", "probes", "batch"):
            object.__setattr__(self, name, as_python(getattr(self, name)))
        if not self.models:
            raise UserError("a study needs at least one model")
        if "source" not in self.data:
            raise UserError("a study's data needs a source: a folder, 'shapes', or a reader's name")
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise UserError(f"batch must be a whole number of at least 1, but came as {self.batch!r}")
        for options in self.models:
            _check_names("option of a model", options, _option_names(load))
        _check_names("option of data", self.data, _option_names(open_images))
        self.make_probes()

    @property
    def everything(self) -> bool:
        """Whether all probes are asked for, as far as they apply."""
        return ALL in self.probes

    @property
    def left_out(self) -> list[str]:
        """The probes that ``all`` does not mean, since they take long, unless they are named beside it."""
        named = {name.lower() for name in self.probes}
        return [name for name, kind in PROBES.items() if self.everything and kind.lengthy and name not in named]

    def options_of(self, probe: str) -> Mapping[str, Any]:
        """The options that were given for one probe itself."""
        return next((options for name, options in self.probes.items() if name.lower() == probe), {})

    def make_probes(self) -> list[Probe]:
        """The probes, their options checked."""
        made = []
        _check_names(f"option of {ALL}", self.probes.get(ALL, {}), ["seed"])
        own = {name: options for name, options in self.probes.items() if name != ALL}
        for name in own:
            probe_class(name)
        if self.everything:
            own = {name: {**self.probes[ALL], **self.options_of(name)} for name in PROBES if name not in self.left_out}
        for name, options in own.items():
            kind = probe_class(name)
            _check_names(f"option of {kind.name}", options, [one.name for one in dataclasses.fields(kind)])  # type: ignore[arg-type]
            if not isinstance(options.get("seed", 0), int):
                raise UserError(f"seed of {kind.name} must be a whole number, but came as {options['seed']!r}")
            made.append(kind(**options))
        return made

    def describe(self) -> dict[str, Any]:
        """The study as plain data, for YAML."""
        return {"models": self.models, "data": self.data, "probes": self.probes, "batch": self.batch}

    def command(self) -> str:
        """The study as one line for the shell. How it was run (workers, cache, device) does not belong to it."""
        shared = [{name: value for name, value in one.items() if name != "model"} for one in self.models]
        if any(options != shared[0] for options in shared) or not shared[0].keys() <= _SAID_IN_WORDS:
            return "spatially probe --study study.yaml --out runs/again"
        words = ["spatially", "probe", *(str(one["model"]) for one in self.models)]
        data = {name: value for name, value in self.data.items() if name not in _HOW}
        words += ["--data", str(data.pop("source")), "--probes", ",".join(self.probes), "--batch", str(self.batch)]
        for name, value in [*data.items(), *shared[0].items()]:
            words += _words({"root": "data_dir"}.get(name, name), value)
        for probe, options in self.probes.items():
            for name, value in options.items():
                words += ["--set", f"{probe}.{name}={json.dumps(value)}"]
        return shlex.join([*words, "--out", "runs/again"])


def _words(name: str, value: Any) -> list[str]:
    """An option as the command line spells it."""
    flag = name.replace("_", "-")
    if value is None:
        return []
    if isinstance(value, bool):
        return [f"--{flag}"] if value else ["--no-pretrained"] if name == "pretrained" else []
    if name == "input_size" and not isinstance(value, int):
        return [f"--{flag}", "x".join(map(str, value))]
    return [f"--{flag}", ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)]


def _check_names(what: str, options: Mapping[str, Any], allowed: list[str]) -> None:
    if not isinstance(options, Mapping):
        raise UserError(f"each {what} must be given as name: value, but came as {options!r}")
    for name in options:
        if name not in allowed:
            raise unknown(what, str(name), allowed)


def read_study(path: str | Path) -> Study:
    """A study from a YAML file."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except FileNotFoundError:
        raise UserError(f"there is no study {path}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise UserError(f"{path} must hold models, data and probes by name")
    _check_names(f"key in {path}", content, [one.name for one in dataclasses.fields(Study)])
    for required in ("models", "data"):
        if required not in content:
            raise UserError(f"{path} lacks {required!r}")
    return make_study(**content)


def make_study(*, models: Any, data: Any, probes: Any = None, batch: int = 64) -> Study:
    """A study from loosely written parts: names where no options are given."""
    models = [models] if not isinstance(models, list) else models
    named = [{"model": one} if isinstance(one, str) else one for one in models]
    for one in named:
        if not isinstance(one, dict) or "model" not in one:
            raise UserError(f"a model must be a name, or options with 'model: NAME', but came as {one!r}")
    if probes is None:
        probes = {"sensitivity": {}}
    elif not isinstance(probes, dict):
        probes = {str(name): {} for name in (probes if isinstance(probes, list) else [probes])}
    if not isinstance(data, (str, dict)):
        raise UserError(f"data must be a source, or options with 'source: …', but came as {data!r}")
    source = {"source": data} if isinstance(data, str) else data
    return Study(
        models=named, data=source, probes={name: options or {} for name, options in probes.items()}, batch=batch
    )
