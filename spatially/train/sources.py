"""What a user names as training data, as the parts it has: training, validation and, where there is one, test images.

A folder with ``train`` and ``val`` (or ``validation``, ``valid``, ``test``) inside, timm's readers and Parquet shards bring
their own validation images. A plain folder of class folders or arrays are cut by shares within every class.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from spatially import randomness
from spatially.data.parquet import Shards, is_parquet, splits_beside
from spatially.data.shapes import Shapes
from spatially.data.sources import READERS, Folder, Source, Stream, open_source
from spatially.errors import UserError
from spatially.train.split import split_rows

VALIDATION = ("val", "validation", "valid")
GENERATED, HELD_OUT = (
    12_000,
    1_200,
)  # images of the generated set when no limit is given: a thousand and a hundred a class
TRAINING_SEED = 1  # of the generated set: the probes look at images of seed 0


class Pictures:
    """Images that are in memory already, uint8 ``(N, 3, H, W)``."""

    def __init__(
        self, pixels: NDArray[np.uint8], labels: NDArray[np.int64], classes: tuple[str, ...], name: str
    ) -> None:
        self.pixels, self.targets = pixels, labels
        self.classes: tuple[str, ...] | None = classes
        self.description = self.key = name

    def __len__(self) -> int:
        return len(self.targets)

    def name(self, number: int) -> str:
        return f"image {number}"

    def picture(self, number: int) -> Image.Image:
        """One of them as Pillow holds it."""
        return Image.fromarray(np.ascontiguousarray(self.pixels[number].transpose(1, 2, 0)))

    def read(self, number: int) -> tuple[Image.Image, int]:
        return self.picture(number), int(self.targets[number])


@dataclass(frozen=True, eq=False)
class Part:
    """Some images of a source, by their numbers in it."""

    source: Source
    numbers: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.numbers)


@dataclass(frozen=True, eq=False)
class Parts:
    """What training needs of a data set; a stream does not know its classes before it is read."""

    train: Part
    validation: Part
    test: Part | None
    classes: tuple[str, ...] | None


def open_parts(
    source: Any,
    *,
    size: tuple[int, int],
    split: tuple[float, float, float],
    seed: int,
    root: str | Path | None = None,
    limit: int | None = None,
) -> Parts:
    """The parts of a data set, whatever it is; ``limit`` draws so many training images by ``seed``."""
    if limit is not None and limit < 1:
        raise UserError(f"limit must be a whole number of at least 1, but came as {limit}")
    if isinstance(source, str) and source == "shapes":
        source = Shapes(size=size, seed=TRAINING_SEED)
    if isinstance(source, Shapes):
        return _shapes(source, limit or GENERATED)
    opened: Sequence[Source | None]
    opened = _named(str(source), root) if isinstance(source, str | Path) else _arrays(source)
    train, validation, test = opened
    assert train is not None
    classes = train.classes
    if classes is None and not isinstance(train, Stream):
        classes = _numbered(train, validation, test)
    for other in (validation, test):
        if other is not None and None not in (classes, other.classes) and other.classes != classes:
            raise UserError(_differ(classes or (), other))
    if validation is None:
        numbers = split_rows(labels_of(train), split, seed)
        parts = [Part(train, one) if len(one) else None for one in numbers]
    else:
        parts = [Part(one, np.arange(len(one))) if one is not None else None for one in opened]
    if parts[0] is None or parts[1] is None:
        raise UserError(
            f"no class of {train.description} has two images, which a cut into training and validation images needs: add "
            "images, or give validation images of their own (a folder with train/ and val/ inside)"
        )
    return Parts(_limited(parts[0], limit, seed), parts[1], parts[2], classes)


def _limited(part: Part, limit: int | None, seed: int) -> Part:
    if limit is None or limit >= len(part):
        return part
    if isinstance(part.source, Stream):
        return Part(part.source, part.numbers[:limit])
    bits = randomness.image_bits(randomness.stream(seed, "limit"), torch.from_numpy(part.numbers))
    return Part(part.source, part.numbers[np.sort(bits.argsort(stable=True)[:limit].numpy())])


def labels_of(source: Source) -> NDArray[np.int64]:
    """Every image's label, without decoding where the source knows them."""
    if isinstance(source, Pictures):
        return source.targets
    if isinstance(source, Folder | Shards):
        return np.array(source.labels(), np.int64)
    if isinstance(source, Stream):
        raise UserError(
            f"{source.description} can only be read from front to back and has no validation images; "
            "give a set with a validation split"
        )
    return np.array([source.read(number)[1] for number in range(len(source))], np.int64)


def _numbered(*sources: Source | None) -> tuple[str, ...]:
    """Class names for sources that only number them."""
    most = max(int(labels_of(one).max()) for one in sources if one is not None)
    return tuple(str(number) for number in range(most + 1))


def _differ(classes: tuple[str, ...], other: Source) -> str:
    lacking = sorted(set(classes) ^ set(other.classes or ()))
    named = ", ".join(lacking[:3]) + (" …" if len(lacking) > 3 else "")
    return f"{other.description} must hold the {len(classes)} classes of the training images, but differs in {named}"


def _named(text: str, root: str | Path | None) -> tuple[Source, Source | None, Source | None]:
    if is_parquet(text):
        return splits_beside(text)
    if text.startswith(READERS):
        return open_source(text, root=root, split="train"), _held_out_of_reader(text, root), None
    path = Path(text)
    if not (path / "train").is_dir():
        return open_source(path, root=None, split="train"), None, None
    inside = {name: path / name for name in ("train", *VALIDATION, "test") if (path / name).is_dir()}
    held_out = next((inside[name] for name in VALIDATION if name in inside), None)
    test = inside.get("test")
    train = Folder(inside["train"])
    if held_out is None:
        # A set with two parts: what it calls test is what everybody validates on.
        return train, Folder(test) if test else None, None
    return train, Folder(held_out), Folder(test) if test else None


def _held_out_of_reader(name: str, root: str | Path | None) -> Source | None:
    """What a reader calls validation or else test; it opened its training images, so a failure means there is none."""
    for split in ("validation", "test"):
        try:
            return open_source(name, root=root, split=split)
        except UserError:
            continue
    return None


def _arrays(source: Any) -> tuple[Source, Source | None, Source | None]:
    """``(pixels, labels)``, or a mapping of ``train``, ``validation`` and ``test`` to such pairs; ``classes`` names them."""
    named = dict(source) if isinstance(source, Mapping) else {"train": source}
    classes = named.pop("classes", None)
    unknown = set(named) - {"train", "validation", "test"}
    if unknown or "train" not in named:
        raise UserError(f"arrays must be (pixels, labels), or named train, validation, test: got {sorted(named)}")
    pairs = {name: _pair(name, value) for name, value in named.items() if value is not None}
    if classes is None:
        classes = tuple(str(number) for number in range(1 + max(int(labels.max()) for _, labels in pairs.values())))
    opened = {name: Pictures(*pair, tuple(classes), f"{name} arrays") for name, pair in pairs.items()}
    return opened["train"], opened.get("validation"), opened.get("test")


def _pair(name: str, value: Any) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise UserError(f"{name} must be a pair of pixels and labels, but came as {type(value).__name__}")
    pixels, labels = (np.asarray(one) for one in value)
    if pixels.dtype != np.uint8 or pixels.ndim != 4 or 3 not in (pixels.shape[1], pixels.shape[3]):
        raise UserError(
            f"{name} pixels must be uint8 (N, 3, H, W) or (N, H, W, 3), but came as {pixels.dtype} {pixels.shape}"
        )
    if labels.shape != (len(pixels),) or not np.issubdtype(labels.dtype, np.integer) or not len(labels):
        raise UserError(f"{name} labels must be {len(pixels)} whole numbers, but came as {labels.dtype} {labels.shape}")
    if labels.min() < 0:
        raise UserError(f"{name} labels must be 0 or more, but reach down to {labels.min()}")
    if pixels.shape[1] != 3:
        pixels = np.ascontiguousarray(pixels.transpose(0, 3, 1, 2))
    return pixels, labels.astype(np.int64)


def _shapes(shapes: Shapes, count: int) -> Parts:
    """Training images 0 … count − 1, and validation images after them."""
    pixels = np.concatenate(list(_generate(shapes, count + HELD_OUT)))
    labels = np.arange(len(pixels)) % len(shapes.classes)
    source = Pictures(pixels, labels, shapes.classes, "generated shapes")
    numbers = np.arange(len(pixels))
    return Parts(Part(source, numbers[:count]), Part(source, numbers[count:]), None, shapes.classes)


def _generate(shapes: Shapes, count: int) -> Iterator[NDArray[np.uint8]]:
    for first in range(0, count, 256):
        yield shapes.images(torch.arange(first, min(first + 256, count)))[0].numpy()
