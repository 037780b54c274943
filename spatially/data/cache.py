"""Decoded crops on disk, memory-mapped, checked when opened.

An entry is a folder of two files: ``pixels`` (raw bytes, N×3×H×W) and ``entry.json`` (labels, numbers, what was skipped,
and the digest of it all). It is written under another name and renamed when whole, so an entry is either complete or
absent; a damaged one is removed and made again.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from tempfile import mkdtemp

import numpy as np
from numpy.typing import NDArray

from spatially.data.images import Skipped
from spatially.files import write_error

_READ = 1 << 24


@dataclass
class Rows:
    """A run of decoded images, as a source yields them."""

    pixels: NDArray[np.uint8]
    labels: list[int]
    index: list[int]
    skipped: list[Skipped] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Entry:
    """A complete set of crops, memory-mapped from the cache or in memory."""

    pixels: NDArray[np.uint8]
    labels: NDArray[np.int64]
    index: NDArray[np.int64]
    skipped: tuple[Skipped, ...]
    fingerprint: str


def cache_folder(given: str | Path | None = None) -> Path:
    """``given``, else ``$SPATIALLY_CACHE``, else ``spatially`` in the user's cache folder."""
    if given is not None:
        return Path(given)
    if "SPATIALLY_CACHE" in os.environ:
        return Path(os.environ["SPATIALLY_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "spatially"


def read_entry(folder: Path, size: tuple[int, int]) -> Entry | None:
    """The entry if it is there and whole; a damaged one is removed."""
    try:
        facts = json.loads((folder / "entry.json").read_text())
        labels, index = np.array(facts["labels"], np.int64), np.array(facts["index"], np.int64)
        skipped = tuple(Skipped(**one) for one in facts["skipped"])
        shape = (len(labels), 3, *size)
        if (folder / "pixels").stat().st_size != np.prod(shape):
            raise ValueError("pixels were cut short")
        if len(labels) and _digest_file(folder / "pixels", labels, index) != facts["fingerprint"]:
            raise ValueError("pixels do not match their digest")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError):
        shutil.rmtree(folder, ignore_errors=True)
        return None
    empty = np.zeros(shape, np.uint8)
    pixels = np.memmap(folder / "pixels", np.uint8, "r", shape=shape) if len(labels) else empty
    return Entry(pixels, labels, index, skipped, facts["fingerprint"])


def write_entry(folder: Path, size: tuple[int, int], runs: Iterator[Rows]) -> Entry:
    """Write what ``runs`` yields, run by run, and open it."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        draft = Path(mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    except OSError as error:
        raise write_error(error, folder) from error
    try:
        labels: list[int] = []
        index: list[int] = []
        skipped: list[Skipped] = []
        with open(draft / "pixels", "wb") as file:
            for rows in runs:
                file.write(rows.pixels.tobytes())
                labels += rows.labels
                index += rows.index
                skipped += rows.skipped
            file.flush()
            os.fsync(file.fileno())
        fingerprint = _digest_file(draft / "pixels", np.array(labels, np.int64), np.array(index, np.int64))
        facts = {
            "labels": labels,
            "index": index,
            "skipped": [vars(one) for one in skipped],
            "fingerprint": fingerprint,
        }
        (draft / "entry.json").write_text(json.dumps(facts))
        try:
            os.rename(draft, folder)
        except OSError:
            # Another process finished the same entry first; what it holds is the same.
            if read_entry(folder, size) is None:
                raise
    except OSError as error:
        raise write_error(error, folder) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    entry = read_entry(folder, size)
    if entry is None:
        raise OSError(f"the cache entry {folder} could not be read back")
    return entry


def collect(runs: Iterator[Rows], size: tuple[int, int]) -> Entry:
    """What ``runs`` yields, in memory."""
    every = list(runs)
    pixels = np.ascontiguousarray(
        np.concatenate([rows.pixels for rows in every] or [np.zeros((0, 3, *size), np.uint8)])
    )
    labels = np.array([label for rows in every for label in rows.labels], np.int64)
    index = np.array([number for rows in every for number in rows.index], np.int64)
    digest = _digest_start(labels, index)
    digest.update(pixels.data)
    skipped = tuple(one for rows in every for one in rows.skipped)
    return Entry(pixels, labels, index, skipped, digest.hexdigest())


def _digest_file(path: Path, labels: NDArray[np.int64], index: NDArray[np.int64]) -> str:
    digest = _digest_start(labels, index)
    with open(path, "rb") as file:
        while block := file.read(_READ):
            digest.update(block)
    return digest.hexdigest()


def _digest_start(labels: NDArray[np.int64], index: NDArray[np.int64]) -> blake2b:
    digest = blake2b(digest_size=16)
    digest.update(labels.astype("<i8").tobytes() + index.astype("<i8").tobytes())
    return digest
