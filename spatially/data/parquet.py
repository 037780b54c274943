"""Parquet shards in the layout of the Hugging Face hub: a column ``image`` of ``{bytes, path}`` and a column ``label``.

Shards are named by a pattern (``data/train-*.parquet``), or by the folder that holds them. The still encoded images of all
shards stay in memory. Class names are those that the shards carry, or stand in ``NAME-classes.json`` beside
``NAME-train-….parquet``; without either they are numbers.
"""

from __future__ import annotations

import io
import json
import os
import re
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from spatially.data.sources import digest_of, file_state
from spatially.errors import UserError, first_line

_LABELS = ("label", "fine_label", "labels")
_HELD_OUT = ("val", "validation", "valid", "test")
_SHARE = 0.5  # of the free memory that encoded images may take


def is_parquet(text: str) -> bool:
    """Whether this names Parquet shards: a pattern or a file, or a folder of them."""
    return text.endswith(".parquet") or (Path(text).is_dir() and bool(list(Path(text).glob("*.parquet"))))


def splits_beside(text: str) -> tuple[Shards, Shards | None, Shards | None]:
    """Training, validation and test shards: the latter two named as the training shards are, but for that word."""
    pattern = text
    if not text.endswith(".parquet"):
        pattern = str(Path(text) / "*train*.parquet")
        if not glob(pattern):
            pattern = str(Path(text) / "*.parquet")
        sets = sorted({_set_name(os.path.basename(path)) for path in glob(pattern)})
        if len(sets) > 1:
            raise UserError(f"{text} holds shards of {', '.join(sets)}; name one: {text}/{sets[0]}-train-*.parquet")
    folder, name = os.path.split(pattern)
    found = {}
    for word in _HELD_OUT:
        # The number of shards differs from part to part: numbers become stars.
        # The part's name is the last such word: a set may have it in its own.
        other, changed = re.subn(r"(.*)(?<![a-z])train(?![a-z])", rf"\g<1>{word}", re.sub(r"\d{5}", "*", name))
        beside = os.path.join(folder, other)
        if changed and glob(beside):
            found[word] = beside
    test = found.pop("test", None)
    held_out = next(iter(found.values()), None)
    if held_out is None:
        held_out, test = test, None
    return Shards(pattern), Shards(held_out) if held_out else None, Shards(test) if test else None


class Shards:
    """The images of some shards, in the order of the shards' names."""

    def __init__(self, pattern: str) -> None:
        self.paths = sorted(glob(pattern)) if has_magic(pattern) else [pattern]
        if not self.paths or not os.path.exists(self.paths[0]):
            raise UserError(f"there are no Parquet shards {pattern}; check the path")
        held = sum(os.path.getsize(path) for path in self.paths)
        free = _free_memory()
        if held > _SHARE * free:
            raise UserError(
                f"{pattern} holds {held / 1e9:.1f} GB, too much for {free / 1e9:.1f} GB of free memory; "
                "unpack it to a folder of class folders"
            )
        self.description = "Parquet " + "/".join(Path(pattern).resolve().parts[-2:])
        self.key = digest_of(*((os.path.basename(path), file_state(path)) for path in self.paths))
        self._images, self._names, self._labels, features = _columns(self.paths)
        self.classes = _classes(self.paths[0], features)
        if self.classes and max(self._labels, default=0) >= len(self.classes):
            raise UserError(f"{pattern} has label {max(self._labels)}, but only {len(self.classes)} class names")

    def __len__(self) -> int:
        return len(self._labels)

    def labels(self) -> list[int]:
        """Every image's class."""
        return self._labels

    def name(self, number: int) -> str:
        return self._names[number] or f"image {number}"

    def read(self, number: int) -> tuple[io.BytesIO, int]:
        content = self._images[number].as_py()
        if content is None:
            raise OSError("the shard holds no bytes for it")
        return io.BytesIO(content), self._labels[number]


def _set_name(name: str) -> str:
    """What stands before the part's name and the shard's numbers."""
    part = re.match(rf"(.*)(?<![a-z])(?:train|{'|'.join(_HELD_OUT)})(?![a-z])", name)
    return part[1].rstrip("-") if part else re.split(r"-\d", Path(name).stem)[0]


def _free_memory() -> int:
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return 1 << 62  # not told on this system


def _columns(paths: list[str]) -> tuple[Any, list[str | None], list[int], dict[str, Any]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError:
        raise UserError('Parquet shards need the package pyarrow: pip install "pyarrow"') from None
    try:
        schema = parquet.read_schema(paths[0])
        label = next((name for name in _LABELS if name in schema.names), None)
        if "image" not in schema.names or label is None:
            raise UserError(f"{paths[0]} must have the columns image and label, but has {', '.join(schema.names)}")
        tables = [parquet.read_table(path, columns=["image", label]) for path in paths]
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"could not read {paths[0]}: {first_line(error)}") from error
    table = pyarrow.concat_tables(tables)
    image = table["image"]
    if not pyarrow.types.is_struct(image.type) or image.type.get_field_index("bytes") < 0:
        raise UserError(f"the column image of {paths[0]} must hold {{bytes, path}}, but is {image.type}")
    image = image.combine_chunks()
    chunks = image.chunks if isinstance(image, pyarrow.ChunkedArray) else [image]
    content = pyarrow.chunked_array([chunk.field("bytes") for chunk in chunks])
    has_path = image.type.get_field_index("path") >= 0
    names = [path for chunk in chunks for path in chunk.field("path").to_pylist()] if has_path else [None] * len(table)
    features = json.loads((schema.metadata or {}).get(b"huggingface", b"{}")).get("info", {}).get("features", {})
    return content, names, table[label].to_pylist(), features.get(label, {})


def _classes(path: str, features: dict[str, Any]) -> tuple[str, ...] | None:
    if features.get("names"):
        return tuple(features["names"])
    folder, name = os.path.split(path)
    beside = Path(folder) / f"{_set_name(name)}-classes.json"
    if not beside.exists():
        return None
    return tuple(str(one) for one in json.loads(beside.read_text()))
