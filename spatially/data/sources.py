"""Where encoded images come from: a folder, or any of timm's data set readers.

A source counts its images, names them, reads one by its number, and has a key that changes when its content does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import IO, Any, Protocol

from PIL import Image

from spatially.errors import UserError, first_line

IMAGES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")  # how their names end
READERS = ("torch/", "hfds/", "hfids/", "tfds/", "wds/")
_PACKAGES = {"hfds": "datasets", "hfids": "datasets", "wds": "webdataset", "tfds": "tensorflow_datasets"}


class Source(Protocol):
    """Numbered, labelled, still encoded images."""

    description: str
    classes: tuple[str, ...] | None
    key: str

    def __len__(self) -> int: ...
    def name(self, number: int) -> str: ...
    def read(self, number: int) -> tuple[IO[bytes] | Image.Image, int]: ...


def open_source(source: str | Path, *, root: str | Path | None, split: str) -> Source:
    """A folder by its path, or a reader by timm's name for it (``torch/cifar100``, ``hfds/…``, ``wds/…``)."""
    text = str(source)
    if text.startswith(READERS):
        return _open_reader(text, root=root, split=split)
    if text.endswith(".parquet"):
        from spatially.data.parquet import Shards

        return Shards(text)
    path = Path(text.removeprefix("folder/") if text.startswith("folder/") and not Path(text).exists() else text)
    if not path.exists():
        raise UserError(
            f"there is no folder {path}; give a folder of class folders, 'shapes', or {', '.join(READERS)}…"
        )
    if not path.is_dir():
        raise UserError(f"{path} is a file; give the folder that holds one folder of images a class")
    return Folder(path)


def file_state(path: str | Path) -> tuple[int, int]:
    """What changes when a file does: its size and its time. A link that leads nowhere has neither."""
    try:
        status = os.stat(path)
    except OSError:
        return 0, 0
    return status.st_size, status.st_mtime_ns


def digest_of(*parts: Any) -> str:
    """A short name for what is given."""
    digest = blake2b(digest_size=16)
    for part in parts:
        digest.update(repr(part).encode(errors="surrogateescape") + b"\n")
    return digest.hexdigest()


def files_below(root: str | Path | None) -> list[tuple[str, tuple[int, int]]]:
    """Every file below a folder with its state."""
    if root is None or not Path(root).is_dir():
        return []
    return [(str(path.relative_to(root)), file_state(path)) for path in sorted(Path(root).rglob("*")) if path.is_file()]


class Folder:
    """``root/class/image.jpg``, read by timm's folder reader: classes in natural order of their names.

    Left to itself, the reader takes PNG and JPEG alone, and passes over a class of others without a word.
    What is hidden counts for nothing: timm takes ``._cat.jpg`` for an image and ``.ipynb_checkpoints`` for a class.
    """

    def __init__(self, root: Path) -> None:
        from timm.data.readers.reader_image_folder import ReaderImageFolder

        self.root = root
        try:
            self._reader = ReaderImageFolder(str(root), input_key=";".join(IMAGES))
        except RuntimeError:
            raise UserError(f"{root} holds no images; give a folder with one folder of images a class") from None
        names = tuple(self._reader.class_to_idx)
        if names == ("",):
            raise UserError(f"the images of {root} lie in no class folders; move them to {root}/CLASS/")
        seen = [(path, names[label]) for path, label in self._reader.samples if not _is_hidden(path, root)]
        stray = [path for path, name in seen if not name]
        if stray:
            listed = ", ".join(os.path.basename(path) for path in stray[:3]) + (" …" if len(stray) > 3 else "")
            raise UserError(
                f"images of {root} lie in no class folder: {listed}; move them to {root}/CLASS/, or elsewhere"
            )
        if not seen:
            raise UserError(
                f"{root} holds no images that are not hidden; give a folder with one folder of images a class"
            )
        held = {name for _, name in seen}
        self.classes: tuple[str, ...] | None = tuple(name for name in names if name in held)
        number = {name: label for label, name in enumerate(self.classes)}
        self._reader.samples = [(path, number[name]) for path, name in seen]
        # Results must not carry the layout of somebody's disk: the last two names say enough.
        self.description = "folder " + "/".join(root.resolve().parts[-2:])
        self.key = self._key()

    def _key(self) -> str:
        names = ((os.path.relpath(path, self.root), label) for path, label in self._reader.samples)
        states = (file_state(path) for path, _ in self._reader.samples)
        return digest_of(*zip(names, states, strict=True))

    def __len__(self) -> int:
        return len(self._reader)

    def labels(self) -> list[int]:
        """Every image's class, from its folder."""
        return [label for _, label in self._reader.samples]

    def name(self, number: int) -> str:
        return str(self._reader.filename(number))

    def read(self, number: int) -> tuple[IO[bytes], int]:
        return self._reader[number]


def _is_hidden(path: str, root: Path) -> bool:
    """Whether an image or a folder around it, below ``root``, has a name that begins with a dot."""
    return f"{os.sep}." in path[len(str(root)) :]


def _open_reader(name: str, *, root: str | Path | None, split: str) -> Source:
    from timm.data import create_dataset

    kind = name.split("/", 1)[0]
    folder = None if root is None else str(root)
    try:
        if kind == "hfds":
            # timm's factory would write the name, which may be a path, in small letters.
            from timm.data.readers.reader_hfds import ReaderHfds

            data = ReaderHfds(name.removeprefix("hfds/"), root=folder, split=split)
        else:
            data = create_dataset(name, root=folder, split=split)
    except ModuleNotFoundError as error:
        package = _PACKAGES.get(kind, error.name)
        raise UserError(f'{name} needs the package {package}: pip install "{package}"') from None
    except (AssertionError, FileNotFoundError, RuntimeError, OSError, ValueError, KeyError) as error:
        where = f" in {root}" if root else "; say where it lies with --data-dir"
        raise UserError(f"could not open {name}, split {split!r}{where}: {first_line(error)}") from error
    shared: dict[str, Any] = {"description": f"{name}, split {split}", "root": root}
    return (
        Reader(data, **shared)
        if hasattr(data, "__getitem__") and kind not in ("wds", "tfds", "hfids")
        else Stream(data, **shared)
    )


class Reader:
    """A data set of timm's that is read by number: torchvision's, or Hugging Face's on disk."""

    def __init__(self, data: Any, *, description: str, root: str | Path | None) -> None:
        self._data = data
        # timm's data set replaces an image that it cannot open by the next one; its reader does not.
        self._reader = getattr(data, "reader", data)
        self.description = description
        names = getattr(self._reader, "classes", None) or getattr(self._reader, "class_to_idx", None)
        self.classes = tuple(map(str, names)) if names else None
        inner = getattr(self._reader, "dataset", None)
        self.key = digest_of(description, len(self), getattr(inner, "_fingerprint", None) or files_below(root))

    def __len__(self) -> int:
        return len(self._reader)

    def name(self, number: int) -> str:
        return f"image {number}"

    def read(self, number: int) -> tuple[IO[bytes] | Image.Image, int]:
        image, label, *_ = self._reader[number]
        return image, int(label)


class Stream:
    """A data set of timm's that can only be read from front to back (WebDataset, TFDS, Hugging Face streaming)."""

    classes: tuple[str, ...] | None = None

    def __init__(self, data: Any, *, description: str, root: str | Path | None) -> None:
        self._iterator: Iterator[tuple[Image.Image, int]] = iter(data)
        self._next = 0
        self._count = len(data)
        self.description = description
        self.key = digest_of(description, files_below(root))

    def __len__(self) -> int:
        return self._count

    def name(self, number: int) -> str:
        return f"image {number}"

    def read(self, number: int) -> tuple[Image.Image, int]:
        if number != self._next:
            raise UserError(
                f"{self.description} is read from front to back; image {number} was asked for at {self._next}"
            )
        self._next += 1
        image, label = next(self._iterator)
        return image, int(label)
