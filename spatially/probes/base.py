"""What every probe has in common: it measures chunks of images, and joins and sums up what the chunks gave.

A probe is a frozen dataclass whose fields are its options. It says

* ``check(subject, images)``: whether it can run, before anything does; ``NotApplicable`` where the model has no such thing;
* ``measure(subject, images, rows)``: the outcomes of some images, a Dataset with ``image`` as its first dimension;
* ``summarise(outcomes, chance)``: the numbers, added to the joined outcomes.

``run`` does it all in one process; :mod:`spatially.study` does it over many, and keeps every chunk.
"""

from __future__ import annotations

import dataclasses
import json
import platform
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from rich.progress import track

from spatially.errors import UserError
from spatially.memory import trim
from spatially.probes.ahead import Outcomes, in_turn, settled
from spatially.probes.stopping import Stopping
from spatially.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from pandas import DataFrame

    from spatially.data import Images
    from spatially.subject import Subject

Rows = NDArray[np.int64]
_PACKAGES = ("torch", "torchvision", "timm", "numpy", "xarray")


class Measurer(Protocol):
    """Measures one chunk of a task; on a GPU it may only begin to, and return what waits for the outcomes."""

    def __call__(self, rows: Rows, *, stopped: NDArray[np.bool_] | None = None) -> Outcomes: ...


class Drawing(Protocol):
    """How a probe's results are drawn: figures and tables by name, the captions and alternative texts of the figures."""

    def figures(self, results: Mapping[str, xr.Dataset]) -> dict[str, Figure]: ...
    def tables(self, results: Mapping[str, xr.Dataset]) -> dict[str, DataFrame]: ...
    def captions(self, results: Mapping[str, xr.Dataset]) -> dict[str, str]: ...
    def descriptions(self, results: Mapping[str, xr.Dataset]) -> dict[str, str]: ...


class Probe(ABC):
    """One measurement. Subclasses are frozen dataclasses; their fields are the options."""

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    definition: ClassVar[str]
    #: Whether the answers count, which must then be in the data's classes. What looks inside takes any images.
    answers: ClassVar[bool] = True
    #: Whether it takes many times longer than the others, so that ``all`` has it only where it is named as well.
    lengthy: ClassVar[bool] = False
    seed: int

    @abstractmethod
    def check(self, subject: Subject, images: Images) -> None:
        """Raise a ``UserError`` if these options do not fit this subject and these images."""

    def view(self, subject: Subject, images: Images) -> Subject:
        """The subject as it is measured: answering in the data's classes where the answers count."""
        return subject.align(images.classes, images.labels) if self.answers else subject

    def chunks(self, images: Images, *, batch: int) -> list[Rows]:
        """The rows of the images that are measured, in the parts in which they are."""
        return cut(images, batch=batch, seed=self.seed)

    @property
    @abstractmethod
    def passes(self) -> int:
        """Forward passes for each image, at the most."""

    @abstractmethod
    def measure(
        self, subject: Subject, images: Images, rows: Rows, *, stopped: NDArray[np.bool_] | None = None
    ) -> Outcomes:
        """The outcomes of the images in ``rows``, without the points that ``stopped`` marks; or, where a GPU has them yet to
        compute, what waits for them (:mod:`spatially.probes.ahead`)."""

    def measurer(self, subject: Subject, images: Images, *, batch: int) -> Measurer:
        """What measures the chunks of one task: made once, so it may keep what all of them need."""
        return partial(self.measure, subject, images)

    @abstractmethod
    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        """The measured numbers with their intervals, beside the outcomes they come from."""

    @classmethod
    @abstractmethod
    def drawing(cls) -> Drawing:
        """The module that draws several models' results."""

    @property
    def interval(self) -> str:
        """Which kind of interval the numbers carry."""
        return "95 % Wilson score intervals over images"

    def stopping(self) -> Stopping | None:
        """What decides that a point needs no more images; nothing by default."""
        return None

    def outcomes(self, part: xr.Dataset) -> NDArray[np.float64]:
        """What ``stopping`` looks at in a part."""
        raise TypeError(f"{self.name} does not stop early")

    def join(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """The chunks' outcomes as one Dataset, in the order of the images' numbers."""
        return xr.concat(parts, dim="image").sortby("image")

    def facts(self, subject: Subject, images: Images) -> dict[str, Any]:
        """What a result has to say beyond model, images and options, such as the fingerprints of other images."""
        return {}

    def settle(self) -> None:
        """Make the options plain, and check the seed: anything but a whole number would be hashed as well, and 1 and 1.0
        would draw differently."""
        for name, value in Probe.options(self).items():
            object.__setattr__(self, name, as_python(value))
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise UserError(f"seed must be a whole number, but came as {self.seed!r}")

    def options(self) -> dict[str, Any]:
        """The options by name."""
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}  # type: ignore[arg-type]

    def run(self, subject: Subject, images: Images, *, batch: int = 64, progress: bool = False) -> xr.Dataset:
        """Measure ``subject`` on ``images`` in this process."""
        check_run(subject, images)
        view = self.view(subject, images)
        self.check(view, images)
        chunks = self.chunks(images, batch=batch)
        measure = self.measurer(view, images, batch=batch)
        found = in_turn(measure, chunks) if self.stopping() is None else self._until_stopped(measure, chunks)
        parts = []
        for part in track(found, description=self.title, total=len(chunks), disable=not progress):
            parts.append(part)
            trim()
        return self.finish(parts, view, images, batch=batch)

    def _until_stopped(self, measure: Measurer, chunks: Sequence[Rows]) -> Iterator[xr.Dataset]:
        """The outcomes of the chunks that are needed; which points are depends on those before."""
        stopping = self.stopping()
        assert stopping is not None
        for rows in chunks:
            if stopping.stopped.all():
                return
            part = settled(measure(rows, stopped=stopping.stopped))
            stopping.update(self.outcomes(part))
            yield part

    def finish(self, parts: Sequence[xr.Dataset], view: Subject, images: Images, *, batch: int) -> xr.Dataset:
        """Join the parts (in the order of their chunks), sum up, and say what was measured."""
        result = self.summarise(self.join(parts), chance=chance_of(view))
        result.attrs = describe(self, view, images, batch=batch)
        return result


def check_run(subject: Any, images: Any) -> None:
    """A name instead of a model, or a tensor instead of images, is told what makes one of it."""
    from spatially.data import Images
    from spatially.subject import Subject

    if not isinstance(subject, Subject):
        raise UserError(
            f"subject must be what spatially.load(…) gives, but came as {type(subject).__name__}: run(subject, images)"
        )
    if not isinstance(images, Images):
        raise UserError(
            f"images must be what spatially.open_images(…, subject) gives, which takes folders as well as arrays with"
            f" labels, but came as {type(images).__name__}"
        )


def cut(images: Images, *, batch: int, seed: int) -> list[Rows]:
    """The images' rows in chunks of ``batch``, in the order that the seed draws."""
    if batch < 1:
        raise UserError(f"batch must be at least 1, but came as {batch}")
    if not len(images):
        raise UserError("images: at least one is needed, but none came")
    order = images.order(seed)
    return [order[first : first + batch] for first in range(0, len(order), batch)]


def as_python(value: Any) -> Any:
    """NumPy's numbers and arrays as Python's, paths as text, wherever they lie: options are compared, and written down.

    >>> as_python({"size": (np.int64(4), np.float64(0.5)), "blocks": np.arange(2), "file": Path("weights.pt")})
    {'size': (4, 0.5), 'blocks': (0, 1), 'file': 'weights.pt'}
    """
    if isinstance(value, (np.ndarray, np.generic)):
        value = value.tolist()
        return tuple(value) if isinstance(value, list) else value
    if isinstance(value, Path):
        return str(value)
    if type(value) is dict:
        return {name: as_python(one) for name, one in value.items()}
    return type(value)(map(as_python, value)) if type(value) in (list, tuple) else value


def short_path(path: str | Path) -> str:
    """The last two names of a path: results do not carry the layout of a disk.

    >>> short_path("/home/someone/data/imagenet-a")
    'data/imagenet-a'
    """
    return "/".join(Path(path).resolve().parts[-2:])


def check_switch(name: str, value: bool) -> None:
    """True or false: a word such as "never" would count as true."""
    if not isinstance(value, bool):
        raise UserError(f"{name} must be true or false, but came as {value!r}")


def several(values: Any) -> list[Any]:
    """One value or many, as a list.

    >>> several(8), several("mask"), several((8, 16))
    ([8], ['mask'], [8, 16])
    """
    return list(values) if isinstance(values, Iterable) and not isinstance(values, str) else [values]


def chance_of(subject: Subject) -> float:
    """The accuracy of guessing; NaN for a model that gives no answers."""
    return 1 / subject.answers if subject.answers else float("nan")


def check_answers(subject: Subject) -> None:
    """A model that can give one answer only is always right."""
    if subject.answers < 2:
        raise UserError(f"{subject.name} answers among {subject.answers} class here; it takes images of at least two")


def check_numbers(subject: Subject, probability: NDArray[np.floating[Any]]) -> None:
    """A model that answers with NaN has no answer, whatever the largest of them is."""
    if np.isnan(probability).any():
        advice = "try --dtype float32" if subject.dtype in (torch.bfloat16, torch.float16) else "look at its weights"
        raise UserError(f"{subject.name} answers with NaN to {np.isnan(probability).sum()} images of a chunk; {advice}")


def image_coordinates(images: Images, rows: Rows) -> dict[str, tuple[str, NDArray[np.int64]]]:
    """The coordinates that every probe's outcomes carry."""
    return {"image": ("image", images.index[rows]), "label": ("image", images.labels[rows])}


def describe(probe: Probe, view: Subject, images: Images, *, batch: int) -> dict[str, Any]:
    """The attributes that say exactly what was measured. Nothing in them depends on when or by how many processes."""
    facts = {
        "probe": probe.name,
        "definition": probe.definition,
        "paper": probe.paper,
        "options": json.dumps(probe.options(), sort_keys=True),
        "interval": probe.interval,
        "seed": probe.seed,
        **view.describe(),
        **images.describe(),
        **probe.facts(view, images),
        "classes": view.answers,
        "chance": chance_of(view),
        "batch": batch,
        "device": device_name(view.device),
        "versions": json.dumps(_versions()),
    }
    return {name: _plain(value) for name, value in facts.items()}


def _versions() -> dict[str, str]:
    own = {"python": platform.python_version(), "spatially": __version__}
    return own | {name: version(name) for name in _PACKAGES}


def _plain(value: Any) -> Any:
    """Strings and numbers as they are; the rest as JSON, so that netCDF keeps it."""
    return value if isinstance(value, (str, int, float)) and not isinstance(value, bool) else json.dumps(value)


def device_name(device: torch.device) -> str:
    """The chip's name where torch knows it."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
