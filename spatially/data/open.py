"""``open_images``: any source of labelled images, cropped as the subject wants them, decoded once."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.progress import track
from torch import Tensor

from spatially import randomness
from spatially.data.cache import Rows, cache_folder, collect, read_entry, write_entry
from spatially.data.decode import BrokenImage, decode
from spatially.data.images import Images, Skipped
from spatially.data.shapes import Shapes
from spatially.data.sources import Folder, Source, Stream, open_source
from spatially.errors import UserError

if TYPE_CHECKING:
    from spatially.subject import Subject

GENERATED = 1200  # images of the generated set when no limit is given: a hundred of each class
_WINDOW = 256
_IN_MEMORY = 1 << 28  # bytes of generated images up to which no file is made


def open_images(
    source: str | Path | Shapes | NDArray[Any] | Tensor | tuple[Any, Any],
    subject: Subject,
    limit: int | None = None,
    *,
    labels: Sequence[int] | NDArray[np.integer] | Tensor | None = None,
    classes: Sequence[str] | None = None,
    split: str = "validation",
    root: str | Path | None = None,
    seed: int = 0,
    workers: int | None = None,
    strict: bool = False,
    cache: str | Path | None = None,
    progress: bool | None = None,
    answers: bool = True,
) -> Images:
    """Open labelled images as crops for ``subject``.

    ``source`` is ``"shapes"`` (the generated set) or a :class:`Shapes`, a folder with one folder of images a class, one of
    timm's reader names (``torch/cifar100``, ``hfds/…``, ``wds/…`` with ``root`` and ``split``), or arrays in memory:
    uint8 ``(N, H, W, 3)`` or ``(N, 3, H, W)``, or floats in 0..1, with ``labels``.

    ``limit`` draws so many images by ``seed``, fairly from the whole; of a set that can only be read from front to back
    (``wds/…``) it takes the first. Decoded crops are kept in ``cache`` and opened from
    there next time. An image that cannot be read is skipped and named in the result; ``strict`` stops at it.

    The labels must fit the classes that ``subject`` answers in, unless ``answers`` is False: what looks inside a model takes
    any images.
    """
    if limit is not None and (not isinstance(limit, int) or limit < 1):
        raise UserError(f"limit must be a whole number of at least 1, but came as {limit!r}")
    if isinstance(source, str) and source == "shapes":
        source = Shapes(size=subject.preprocessing.input_size)
    if isinstance(source, Shapes):
        images = _open_shapes(source, subject, limit or GENERATED, cache_folder(cache))
    elif isinstance(source, (str, Path)):
        opened = open_source(source, root=root, split=split)
        images = _open_encoded(opened, subject, limit, seed, workers, strict, cache_folder(cache), progress)
    else:
        pixels, targets = source if isinstance(source, tuple) and len(source) == 2 else (source, labels)
        images = _open_arrays(pixels, targets, classes, subject, limit, seed)
    if len(images) == 0:
        named = "; ".join(f"{one.name} ({one.reason})" for one in images.skipped[:3])
        raise UserError(f"no image of {images.description} could be read" + (f": {named}" if named else ""))
    if answers:
        subject.align(images.classes, images.labels)
    return images


def _draw(count: int, limit: int | None, seed: int) -> NDArray[np.int64]:
    """All numbers, or ``limit`` of them drawn without replacement, in rising order."""
    numbers = np.arange(count)
    if limit is None or limit >= count:
        return numbers
    bits = randomness.image_bits(randomness.stream(seed, "limit"), torch.from_numpy(numbers))
    return np.sort(bits.argsort(stable=True)[:limit].numpy())


def _open_shapes(shapes: Shapes, subject: Subject, count: int, cache: Path) -> Images:
    size = subject.preprocessing.input_size
    if (shapes.height, shapes.width) != tuple(size):
        made = f"{shapes.height}×{shapes.width}"
        raise UserError(f"{subject.name} takes {size[0]}×{size[1]} pixels, but the generated set makes {made}")
    runs = _generate(shapes, count)
    if count * 3 * size[0] * size[1] <= _IN_MEMORY:
        entry = collect(runs, size)
    else:
        folder = cache / "images" / _key("shapes 1", shapes.describe(), count)
        entry = read_entry(folder, size) or write_entry(folder, size, runs)
    return Images(
        pixels=entry.pixels,
        labels=entry.labels,
        index=entry.index,
        description=_describe_shapes(shapes),
        fingerprint=entry.fingerprint,
        # A model with other classes than these can still be measured: labels are then its class numbers.
        classes=shapes.classes if subject.answers == len(shapes.classes) else None,
        bag_accuracy=shapes.best_accuracy("bag"),
    )


def _generate(shapes: Shapes, count: int) -> Iterator[Rows]:
    for first in range(0, count, _WINDOW):
        index = torch.arange(first, min(first + _WINDOW, count))
        pixels, labels = shapes.images(index)
        yield Rows(pixels.numpy(), labels.tolist(), index.tolist())


def _key(*identity: Any) -> str:
    """The name of a cache entry, from everything that decides its bytes."""
    return blake2b(json.dumps(identity, sort_keys=True).encode(), digest_size=12).hexdigest()


def _describe_shapes(shapes: Shapes) -> str:
    words = f"generated shapes, {len(shapes.family_names)} families of parts × {shapes.arrangements} arrangements"
    options = {"mixing": shapes.mixing, "jitter": shapes.jitter, "seed": shapes.seed}
    return words + "".join(f", {name} {value:g}" for name, value in options.items() if value)


def _open_arrays(
    pixels: Any, labels: Any, classes: Sequence[str] | None, subject: Subject, limit: int | None, seed: int
) -> Images:
    if labels is None:
        raise UserError("images in memory need labels: open_images(pixels, subject, labels=labels)")
    array, targets = _as_uint8(pixels), np.asarray(labels)
    if targets.shape != (len(array),) or not np.issubdtype(targets.dtype, np.integer):
        raise UserError(
            f"labels must be {len(array)} whole numbers, one an image, but came as {targets.dtype} {targets.shape}"
        )
    index = _draw(len(array), limit, seed)
    array, targets = array[index], targets[index].astype(np.int64)
    if len(array) and array.shape[2:] != tuple(subject.preprocessing.input_size):
        pictures = (Image.fromarray(np.ascontiguousarray(one.transpose(1, 2, 0))) for one in array)
        array = np.stack([subject.preprocessing.crop(picture) for picture in pictures])
    entry = collect(iter([Rows(array, targets.tolist(), index.tolist())]), subject.preprocessing.input_size)
    return Images(
        pixels=entry.pixels,
        labels=entry.labels,
        index=entry.index,
        description=f"{len(entry.labels)} images in memory",
        fingerprint=entry.fingerprint,
        classes=None if classes is None else tuple(classes),
    )


def _as_uint8(pixels: Any) -> NDArray[np.uint8]:
    """Arrays of bytes or of floats in 0..1, channels first or last, as uint8 ``(N, 3, H, W)``."""
    array = pixels.numpy(force=True) if isinstance(pixels, Tensor) else np.asarray(pixels)
    if array.ndim != 4 or 3 not in (array.shape[1], array.shape[3]):
        raise UserError(f"images must be (N, 3, H, W) or (N, H, W, 3), but came as {array.shape}")
    if array.shape[1] != 3:
        array = array.transpose(0, 3, 1, 2)
    if np.issubdtype(array.dtype, np.floating):
        if array.size and not (array.min() >= 0 and array.max() <= 1):
            raise UserError(f"float images must lie in 0..1, but reach from {array.min():.3g} to {array.max():.3g}")
        array = np.rint(array * 255).astype(np.uint8)
    if array.dtype != np.uint8:
        raise UserError(f"images must be uint8, or floats in 0..1, but came as {array.dtype}")
    return array


def _open_encoded(
    source: Source,
    subject: Subject,
    limit: int | None,
    seed: int,
    workers: int | None,
    strict: bool,
    cache: Path,
    progress: bool | None,
) -> Images:
    preprocessing = subject.preprocessing
    # What decides the crop's bytes; mean and std do not.
    crop = {
        name: value for name, value in preprocessing.describe().items() if name not in ("mean", "std", "normalisation")
    }
    folder = cache / "images" / _key("crops 1", source.key, crop, limit, seed if limit else None)
    size = preprocessing.input_size
    entry = read_entry(folder, size)
    if entry is None:
        numbers = np.arange(min(limit or len(source), len(source)))
        if not isinstance(source, Stream):
            numbers = _draw(len(source), limit, seed)
        runs = _decode_all(source, subject, numbers, workers=workers, strict=strict, progress=progress)
        entry = write_entry(folder, size, runs)
    elif strict and entry.skipped:
        raise _broken(entry.skipped[0])
    return Images(
        pixels=entry.pixels,
        labels=entry.labels,
        index=entry.index,
        description=source.description + (f", the first {limit:,}" if limit and isinstance(source, Stream) else ""),
        fingerprint=entry.fingerprint,
        classes=source.classes,
        skipped=entry.skipped,
        naming=source.name if isinstance(source, Folder) else None,
    )


def _decode_all(
    source: Source,
    subject: Subject,
    numbers: NDArray[np.int64],
    *,
    workers: int | None,
    strict: bool,
    progress: bool | None,
) -> Iterator[Rows]:
    """Decode in threads (Pillow lets go of the interpreter), a window at a time, in order."""
    crop = subject.preprocessing.crop

    def one(number: int) -> tuple[NDArray[np.uint8], int] | Skipped:
        try:
            encoded, label = source.read(number)
            try:
                return crop(decode(encoded)), label
            finally:
                encoded.close()
        except (BrokenImage, OSError) as error:
            return Skipped(source.name(number), str(error))

    threads = 1 if isinstance(source, Stream) else max(1, workers if workers is not None else os.cpu_count() or 1)
    windows = [numbers[first : first + _WINDOW] for first in range(0, len(numbers), _WINDOW)]
    console = Console(stderr=True)
    shown = console.is_terminal if progress is None else progress
    with ThreadPoolExecutor(threads) as pool:
        for window in track(windows, description=f"decoding {source.description}", console=console, disable=not shown):
            outcomes = list(pool.map(one, window.tolist()))
            rows = _rows(window, outcomes, subject.preprocessing.input_size)
            if strict and rows.skipped:
                raise _broken(rows.skipped[0])
            yield rows


def _rows(window: NDArray[np.int64], outcomes: list[Any], size: tuple[int, int]) -> Rows:
    read = [
        (int(number), *outcome) for number, outcome in zip(window, outcomes, strict=True) if isinstance(outcome, tuple)
    ]
    return Rows(
        pixels=np.stack([pixels for _, pixels, _ in read]) if read else np.zeros((0, 3, *size), np.uint8),
        labels=[int(label) for *_, label in read],
        index=[number for number, *_ in read],
        skipped=[outcome for outcome in outcomes if isinstance(outcome, Skipped)],
    )


def _broken(image: Skipped) -> UserError:
    return UserError(
        f"{image.name} cannot be read: {image.reason}; mend or remove it, or run without --strict to skip it"
    )
