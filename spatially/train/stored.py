"""Images decoded once, at one size, for training from memory: uint8 (N, 3, S, T) with each original's height and width.

For crops of random size the whole picture is kept, stretched to one size for all: the median of the set's heights and widths,
at most twice the model's. A crop is drawn in the original's pixels and found again at the same place of the stretched image, so
its share and its proportions are those of the original. For other crops the middle is kept, as validation sees it.

Decoded pictures are kept in the cache of `spatially.data` and opened from there next time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.progress import track

from spatially.data.cache import Entry, Rows, cache_folder, read_entry, write_entry
from spatially.data.decode import BrokenImage, decode
from spatially.data.images import Skipped
from spatially.data.sources import Stream, digest_of
from spatially.errors import UserError
from spatially.files import write_whole
from spatially.subject.preprocessing import Preprocessing
from spatially.train.sources import Part, Pictures

_WINDOW = 256
_SAMPLE = 64
_LARGEST = 2  # times the model's size

Bring = Callable[[Image.Image], NDArray[np.uint8]]


@dataclass(frozen=True, eq=False)
class Stored:
    """Decoded images of one size; ``original`` ``(N, 2)`` are their heights and widths before."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    original: NDArray[np.int64]
    skipped: tuple[Skipped, ...] = ()

    def __len__(self) -> int:
        return len(self.labels)


def usual_size(part: Part) -> tuple[int, int]:
    """The median height and width of some of a part's images; a stream, which cannot be tried, has none."""
    if isinstance(part.source, Pictures):
        return part.source.pixels.shape[2], part.source.pixels.shape[3]
    if isinstance(part.source, Stream):
        return (1 << 30, 1 << 30)
    tried = part.numbers[np.linspace(0, len(part.numbers) - 1, min(_SAMPLE, len(part.numbers))).astype(int)]
    sizes = []
    for number in tried.tolist():
        try:
            encoded, _ = part.source.read(number)
            with encoded, encoded if isinstance(encoded, Image.Image) else Image.open(encoded) as image:
                sizes.append((image.height, image.width))
        except OSError:
            continue  # whoever decodes it will say what is wrong
    if not sizes:
        raise UserError(f"no image of {part.source.description} could be read")
    return tuple(int(side) for side in np.median(sizes, axis=0))  # type: ignore[return-value]  # two sides


def stored_size(usual: tuple[int, int], size: tuple[int, int], crop: str) -> tuple[int, int]:
    """How large images are kept."""
    if crop != "resized":
        return size
    return min(usual[0], _LARGEST * size[0]), min(usual[1], _LARGEST * size[1])


def stretch(size: tuple[int, int]) -> Bring:
    """The whole picture at this size."""

    def bring(image: Image.Image) -> NDArray[np.uint8]:
        if image.size != size[::-1]:
            image = image.resize(size[::-1], Image.Resampling.BICUBIC)
        return np.ascontiguousarray(np.asarray(image).transpose(2, 0, 1))

    return bring


def store(
    part: Part,
    size: tuple[int, int],
    preprocessing: Preprocessing | None,
    *,
    workers: int | None = None,
    progress: bool | None = None,
    cache: str | Path | None = None,
) -> Stored:
    """A part's images at ``size``: cropped by ``preprocessing``, or whole and stretched where there is none."""
    bring = stretch(size) if preprocessing is None else preprocessing.crop
    source = part.source
    if isinstance(source, Pictures):
        return _from_pictures(source, part.numbers, size, bring)
    crop = None if preprocessing is None else {**preprocessing.describe(), "mean": 0, "std": 0}
    key = digest_of("training 1", source.key, size, crop, part.numbers.tobytes())
    folder = cache_folder(cache) / "training" / key
    sizes = folder.with_name(f"{key}.sizes")
    entry = read_entry(folder, size)
    if entry is None or not sizes.exists():
        entry = write_entry(folder, size, _decode(part, bring, size, sizes, workers, progress))
    if not len(entry.labels):
        named = "; ".join(f"{one.name} ({one.reason})" for one in entry.skipped[:3])
        raise UserError(f"no image of {source.description} could be read" + (f": {named}" if named else ""))
    return _stored(entry, np.frombuffer(sizes.read_bytes(), np.int64).reshape(-1, 2))


def _stored(entry: Entry, original: NDArray[np.int64]) -> Stored:
    return Stored(entry.pixels, entry.labels, original, entry.skipped)


def _from_pictures(source: Pictures, numbers: NDArray[np.int64], size: tuple[int, int], bring: Bring) -> Stored:
    pixels = source.pixels[numbers]
    original = np.tile(np.array(pixels.shape[2:], np.int64), (len(pixels), 1))
    if pixels.shape[2:] != size:
        pixels = np.stack([bring(source.picture(number)) for number in numbers.tolist()])
    return Stored(pixels, source.targets[numbers], original)


def _decode(
    part: Part, bring: Bring, size: tuple[int, int], sizes: Path, workers: int | None, progress: bool | None
) -> Iterator[Rows]:
    """Decode in threads (Pillow lets go of the interpreter), in order; the originals' sizes are written at the end."""
    source = part.source

    def one(number: int) -> tuple[NDArray[np.uint8], int, tuple[int, int]] | Skipped:
        try:
            encoded, label = source.read(number)
            try:
                image = decode(encoded)
                return bring(image), label, (image.height, image.width)
            finally:
                encoded.close()
        except (BrokenImage, OSError) as error:
            return Skipped(source.name(number), str(error))

    threads = 1 if isinstance(source, Stream) else max(1, workers if workers is not None else os.cpu_count() or 1)
    windows = [part.numbers[first : first + _WINDOW] for first in range(0, len(part.numbers), _WINDOW)]
    console = Console(stderr=True)
    shown = console.is_terminal if progress is None else progress
    seen: list[tuple[int, int]] = []
    with ThreadPoolExecutor(threads) as pool:
        for window in track(windows, description=f"decoding {source.description}", console=console, disable=not shown):
            outcomes: list[Any] = list(pool.map(one, window.tolist()))
            read = [outcome for outcome in outcomes if isinstance(outcome, tuple)]
            seen += [original for *_, original in read]
            yield Rows(
                pixels=np.stack([pixels for pixels, *_ in read]) if read else np.zeros((0, 3, *size), np.uint8),
                labels=[label for _, label, _ in read],
                index=[int(number) for number, out in zip(window, outcomes, strict=True) if isinstance(out, tuple)],
                skipped=[outcome for outcome in outcomes if isinstance(outcome, Skipped)],
            )
    # Before the entry gets its name, so that an entry that is there has its sizes.
    write_whole(sizes, np.array(seen, np.int64).reshape(-1, 2).tobytes())
