"""Robustness tests that bring their own images: ImageNet-A and the Backgrounds Challenge.

A test counts its files, opens them as a subject wants them, and measures some of them by number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from torch import Tensor

from spatially.data.backgrounds import NINE, Challenge, find_map, find_masks, open_challenge, read_map, whole
from spatially.data.open import open_images
from spatially.data.published import check_class_folders
from spatially.data.sources import digest_of, open_source
from spatially.errors import UserError
from spatially.perturb.background import replace_background
from spatially.perturb.pixels import as_float
from spatially.probes.base import Rows, check_numbers
from spatially.subject.classes import Alignment
from spatially.subject.imagenet_classes import IMAGENET_A, imagenet_places, imagenet_synsets

if TYPE_CHECKING:
    from collections.abc import Callable

    from spatially.data import Images
    from spatially.subject import Preprocessing, Subject

_TOGETHER = 64  # foregrounds on backgrounds in one forward pass, where the chunk itself is smaller


class PublishedTest(ABC):
    """A test with images of its own; ``dimension`` numbers them in results."""

    name: ClassVar[str]
    dimension: ClassVar[str]
    answers: ClassVar[int]

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._opened: dict[Preprocessing, Any] = {}
        self._count: int | None = None

    @property
    def count(self) -> int:
        """How many files are tested, readable or not."""
        if self._count is None:
            self._count = self.files()
        return self._count

    def opened(self, subject: Subject) -> Any:
        """The images for a subject, decoded when first asked for."""
        if subject.preprocessing not in self._opened:
            self._opened[subject.preprocessing] = self.open(subject)
        return self._opened[subject.preprocessing]

    def check(self, subject: Subject) -> None:
        """Look at the folder and the model anew, before anything is measured."""
        self._opened.clear()
        self._count = None
        self.opened(subject)

    @abstractmethod
    def files(self) -> int: ...

    @abstractmethod
    def open(self, subject: Subject) -> Any: ...

    @abstractmethod
    def measure(self, subject: Subject, numbers: Rows, *, seed: int) -> xr.Dataset:
        """Which of the files with these numbers are answered rightly."""

    @abstractmethod
    def facts(self, subject: Subject) -> dict[str, Any]:
        """What results say about the images."""

    def outcomes(self, numbers: Rows, labels: Rows, correct: np.ndarray) -> xr.Dataset:
        """The part of a result that this test makes up."""
        return xr.Dataset(
            {f"{self.name}_correct": (self.dimension, correct)},
            coords={self.dimension: numbers, f"{self.name}_label": (self.dimension, labels)},
        )


class ImageNetA(PublishedTest):
    """``FOLDER/n01498041/….jpg``: 200 folders named by their synsets, answered among those 200 classes alone."""

    name = "imagenet_a"
    dimension = "imagenet_a_image"
    answers = len(IMAGENET_A)

    def files(self) -> int:
        return len(open_source(self.folder, root=None, split=""))

    def open(self, subject: Subject) -> Images:
        self.view(subject)
        check_class_folders(self.folder, _adversarial_synsets(), what=self.name)
        return open_images(self.folder, subject, answers=False)

    def view(self, subject: Subject) -> Subject:
        """The subject answering among the 200 classes."""
        places = imagenet_places(subject, purpose=self.name)
        members = tuple((places[number],) for number in IMAGENET_A)
        return subject.answering(Alignment("synsets", _adversarial_synsets(), members))

    @torch.inference_mode()
    def measure(self, subject: Subject, numbers: Rows, *, seed: int) -> xr.Dataset:
        images: Images = self.opened(subject)
        rows = np.flatnonzero(np.isin(images.index, numbers))
        synsets = _adversarial_synsets()
        labels = np.array([synsets.index((images.classes or ())[label]) for label in images.labels[rows]], np.int64)
        correct = np.zeros(0, bool)
        if len(rows):
            answered = answers(self.view(subject), as_float(images.batch(rows, subject.device)[0]))
            correct = answered.cpu().numpy() == labels
        return self.outcomes(images.index[rows], labels, correct)

    def facts(self, subject: Subject) -> dict[str, Any]:
        return _facts(self.name, self.opened(subject))


class Backgrounds(PublishedTest):
    """A foreground is right only if it is right on every background of the set."""

    name = "backgrounds"
    dimension = "foreground"
    answers = len(NINE)

    def __init__(self, folder: str | Path, map: str | Path | None = None) -> None:
        super().__init__(folder)
        self.map = map

    def files(self) -> int:
        return len(find_masks(self.folder))

    def open(self, subject: Subject) -> Challenge:
        if subject.own().answers != len(NINE):
            imagenet_places(subject, purpose=self.name)
        find_masks(self.folder)
        self.naming(subject)
        return open_challenge(self.folder, subject)

    def naming(self, subject: Subject) -> Callable[[Tensor], Tensor]:
        """From images to one of the nine classes, or −1: by the map from ImageNet's, unless the model has just nine."""
        own = subject.own()
        if own.answers == len(NINE):
            return partial(answers, own)
        places = imagenet_places(subject, purpose=self.name)
        view = subject.answering(Alignment("synsets", imagenet_synsets(), tuple((place,) for place in places)))
        to_nine = torch.from_numpy(read_map(find_map(self.folder, self.map))).to(subject.device)
        return lambda images: to_nine[answers(view, images)]

    @torch.inference_mode()
    def measure(self, subject: Subject, numbers: Rows, *, seed: int) -> xr.Dataset:
        challenge: Challenge = self.opened(subject)
        numbers = challenge.readable(numbers)
        photographs, masks, labels = challenge.foregrounds(numbers, subject)
        foreground, mask = (as_float(torch.from_numpy(one).to(subject.device)) for one in (photographs, masks))
        label, name = torch.from_numpy(labels).to(subject.device), self.naming(subject)
        order = challenge.backgrounds.order(seed)
        standing = torch.arange(len(numbers), device=subject.device)
        first = 0
        while len(standing) and first < len(order):
            # The fewer are left, the more backgrounds each is tried on at once.
            rows = order[first : first + max(1, max(len(numbers), _TOGETHER) // len(standing))]
            background = as_float(challenge.backgrounds.batch(rows, subject.device)[0])
            shown = replace_background(foreground[standing], mask[standing], background)
            named = name(shown.flatten(0, 1)).unflatten(0, shown.shape[:2])
            standing = standing[(named == label[standing, None]).all(dim=1)]
            first += len(rows)
        correct = np.zeros(len(numbers), bool)
        correct[standing.cpu().numpy()] = True
        return self.outcomes(numbers, labels, correct)

    def facts(self, subject: Subject) -> dict[str, Any]:
        challenge: Challenge = self.opened(subject)
        facts = {
            **_facts(self.name, challenge.backgrounds),
            "backgrounds_fingerprint": challenge.fingerprint,
            "backgrounds_foregrounds": len(challenge.masks),
            "backgrounds_preprocessing": whole(subject).preprocessing.describe(),
        }
        if subject.own().answers != len(NINE):
            facts["backgrounds_map"] = digest_of(read_map(find_map(self.folder, self.map)).tolist())
        return facts


def answers(subject: Subject, images: Tensor) -> Tensor:
    """The class with the largest logit."""
    logits = subject(images)
    check_numbers(subject, logits.float().cpu().numpy())
    return logits.argmax(dim=1)


def _adversarial_synsets() -> tuple[str, ...]:
    return tuple(imagenet_synsets()[number] for number in IMAGENET_A)


def _facts(name: str, images: Images) -> dict[str, Any]:
    if not len(images):
        raise UserError(f"{name}: no image of {images.description} could be read")
    return {
        name: images.description,
        f"{name}_fingerprint": images.fingerprint,
        f"{name}_images": len(images),
        f"{name}_skipped": [f"{one.name}: {one.reason}" for one in images.skipped],
    }
