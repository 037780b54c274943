"""Robustness (Heo, section 4.3, table 5): how much accuracy is left when the images are harder.

* standard: the images as they are;
* occlusion: their centre half set to zero (``occlusion``, ``place``);
* FGSM: each pixel moved by ε against the model (``epsilons``);
* ImageNet-A: photographs that a ResNet-50 got wrong, answered among their 200 classes (``imagenet_a``);
* backgrounds: foregrounds that must be named rightly on every background of the set (``backgrounds``).

``accuracy(test)`` is the share of right answers. The first three are about the images that the probe is run on; the others
are folders in their published layouts, and tests without a folder are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from spatially.errors import UserError
from spatially.perturb.fgsm import check_epsilon, direction, step
from spatially.perturb.occlusion import CENTRE, Place, Size, check_place, check_size, occlude, rectangle
from spatially.perturb.pixels import as_float
from spatially.probes.base import Drawing, Probe, Rows, check_answers, cut, image_coordinates, several, short_path
from spatially.probes.intervals import wilson
from spatially.probes.published_tests import Backgrounds, ImageNetA, PublishedTest, answers
from spatially.subject.subject import HALF

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject

STANDARD, OCCLUSION = "standard", "occlusion"
_FOLDERS = ("imagenet_a", "backgrounds", "backgrounds_map")


@dataclass(frozen=True, kw_only=True)
class Robustness(Probe):
    """Accuracy under occlusion, FGSM, on ImageNet-A and in the Backgrounds Challenge, beside the standard one.

    ``occlusion`` is a share of the side or pixels, None to leave it out; ``place`` where its upper left pixel lies.
    ``epsilons`` may be written as "4/255"; an empty list leaves FGSM out. ``imagenet_a`` and ``backgrounds`` are folders;
    ``backgrounds_map`` is the file in_to_in9.json where it does not lie in ``backgrounds``.
    """

    name: ClassVar[str] = "robustness"
    title: ClassVar[str] = "Robustness"
    paper: ClassVar[str] = "Heo, Rethinking Spatial Dimensions of Vision Transformers, section 4.3, table 5"
    definition: ClassVar[str] = (
        "Share of images answered rightly: as they are; with a rectangle (by default the centre half) set to zero; moved by "
        "ε in the sign of the loss's gradient in pixels, cut to 0..1; of ImageNet-A among its 200 classes; and of the "
        "foregrounds of the Backgrounds Challenge that are right on every background."
    )

    occlusion: Size | None = 0.5
    place: Place = CENTRE
    epsilons: Sequence[float | str] = (1 / 255,)
    imagenet_a: str | None = None
    backgrounds: str | None = None
    backgrounds_map: str | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        self.settle()
        if self.occlusion is not None:
            check_size(self.occlusion)
        check_place(self.place)
        given = () if self.epsilons is None else several(self.epsilons)
        object.__setattr__(self, "epsilons", tuple(dict.fromkeys(check_epsilon(epsilon) for epsilon in given)))
        for name in _FOLDERS:
            value = getattr(self, name)
            if value is not None and not isinstance(value, (str, Path)):
                raise UserError(f"{name} must be a path, but came as {value!r}")
        tests: list[PublishedTest] = []
        if self.imagenet_a is not None:
            tests.append(ImageNetA(self.imagenet_a))
        if self.backgrounds is not None:
            tests.append(Backgrounds(self.backgrounds, self.backgrounds_map))
        object.__setattr__(self, "_tests", tuple(tests))

    @property
    def tests(self) -> tuple[PublishedTest, ...]:
        """The tests that have images of their own."""
        return self._tests  # type: ignore[attr-defined]

    @property
    def passes(self) -> int:
        # A backward pass costs about two forward ones.
        return 1 + (self.occlusion is not None) + (3 + len(self.epsilons) if self.epsilons else 0)

    def check(self, subject: Subject, images: Images) -> None:
        check_answers(subject)
        if self.occlusion is not None:
            rectangle(self.occlusion, self.place, images.size)
        if self.epsilons:
            pixels, label, _ = images.batch(np.arange(1), subject.device)
            direction(_accurate(subject), as_float(pixels), label)
        for test in self.tests:
            test.check(subject)

    def chunks(self, images: Images, *, batch: int) -> list[Rows]:
        """Chunks of the images, then of each folder's files, which are numbered on from the last image."""
        chunks = cut(images, batch=batch, seed=self.seed)
        first = len(images)
        for test in self.tests:
            numbers = np.arange(first, first + test.count)
            chunks += [numbers[start : start + batch] for start in range(0, len(numbers), batch)]
            first += len(numbers)
        return chunks

    def measure(
        self, subject: Subject, images: Images, rows: Rows, *, stopped: NDArray[np.bool_] | None = None
    ) -> xr.Dataset:
        first = len(images)
        if rows[0] < first:
            return self._measure_images(subject, images, rows)
        for test in self.tests:
            if rows[0] < first + test.count:
                return test.measure(subject, rows - first, seed=self.seed)
            first += test.count
        raise IndexError(f"there is no file {rows[0]}")

    def _measure_images(self, subject: Subject, images: Images, rows: Rows) -> xr.Dataset:
        pixels, label, _ = images.batch(rows, subject.device)
        shown = as_float(pixels)
        correct: dict[str, Tensor] = {}
        with torch.inference_mode():
            correct[STANDARD] = answers(subject, shown) == label
            if self.occlusion is not None:
                occluded = occlude(shown, size=self.occlusion, place=self.place)
                correct[OCCLUSION] = answers(subject, occluded) == label
        if self.epsilons:
            against = direction(_accurate(subject), shown, label)
            with torch.inference_mode():
                for epsilon in self.epsilons:
                    moved = step(shown, against, epsilon=float(epsilon))
                    correct[fgsm_name(float(epsilon))] = answers(subject, moved) == label
        return xr.Dataset(
            {"correct": (("image", "shown"), torch.stack(list(correct.values()), dim=1).cpu().numpy())},
            coords={**image_coordinates(images, rows), "shown": list(correct)},
        )

    def join(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """Each test's parts by its own dimension, side by side."""
        joined = []
        for dimension in ("image", *(test.dimension for test in self.tests)):
            found = [part for part in parts if dimension in part.dims]
            joined.append(xr.concat(found, dim=dimension).sortby(dimension))
        return xr.merge(joined)

    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        names = [str(name) for name in outcomes["shown"].values]
        correct = [outcomes["correct"].sel(shown=name).values for name in names]
        chances = [chance] * len(names)
        for test in self.tests:
            names.append(test.name)
            correct.append(outcomes[f"{test.name}_correct"].values)
            chances.append(1 / test.answers)
        right, count = (np.array([fold(one) for one in correct]) for fold in (np.sum, len))
        epsilons = {fgsm_name(float(epsilon)): float(epsilon) for epsilon in self.epsilons}
        low, high = wilson(right, count)
        with np.errstate(invalid="ignore"):
            accuracy = right / count
        return outcomes.assign(
            accuracy=("test", accuracy), accuracy_low=("test", low), accuracy_high=("test", high), count=("test", count)
        ).assign_coords(
            test=names,
            epsilon=("test", [epsilons.get(name, np.nan) for name in names]),
            test_chance=("test", chances),
        )

    def facts(self, subject: Subject, images: Images) -> dict[str, Any]:
        return {name: value for test in self.tests for name, value in test.facts(subject).items()}

    def options(self) -> dict[str, Any]:
        """The options by name; of folders the last two names, so that results do not carry the layout of a disk."""
        shortened = {
            name: short_path(value)
            for name, value in super().options().items()
            if name in _FOLDERS and value is not None
        }
        return super().options() | shortened

    @classmethod
    def drawing(cls) -> Drawing:
        from spatially.probes import robustness_figures

        return robustness_figures


def _accurate(subject: Subject) -> Subject:
    """The subject in which the gradient is computed: never in half precision."""
    return subject.computing_in(torch.float32) if subject.dtype in HALF else subject


def fgsm_name(epsilon: float) -> str:
    """What the FGSM test with an ε is called.

    >>> fgsm_name(4 / 255), fgsm_name(0.1)
    ('fgsm 4/255', 'fgsm 0.1')
    """
    levels = epsilon * 255
    whole = abs(levels - round(levels)) < 1e-6 and levels < 254.5
    return f"fgsm {round(levels)}/255" if whole and epsilon else f"fgsm {epsilon:.6g}"
