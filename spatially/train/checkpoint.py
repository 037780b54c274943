"""Checkpoints: a folder of safetensors and one JSON file, there as a whole or not at all, and checked when read.

.. code-block:: text

    OUT/checkpoints/step-00000120/  weights.safetensors  average.safetensors  optimiser.safetensors  random.safetensors
                                    state.json: position, history, the recipe, sizes and checksums of the other files

A folder is written under another name and renamed when all of it is on the disk. The one before is kept as well, for the
case that the disk lied.
"""

import json
import os
import re
import shutil
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from spatially.errors import UserError
from spatially.files import write_error

FORMAT = 1
KEPT = 2
STATE = "state.json"
_NAME = re.compile(r"step-(\d{8,})")

Tensors = Mapping[str, Tensor]


@dataclass(frozen=True)
class Checkpoint:
    """What was read: groups of tensors by name, and the plain facts beside them."""

    folder: Path
    tensors: Mapping[str, dict[str, Tensor]]
    facts: dict[str, Any]


def write_checkpoint(parent: Path, step: int, tensors: Mapping[str, Tensors], facts: Mapping[str, Any]) -> Path:
    """Write `parent/step-N`, then remove all but the newest ones."""
    target = parent / f"step-{step:08d}"
    draft = parent / f".{target.name}.{os.getpid()}.draft"
    try:
        _remove_drafts(parent)
        draft.mkdir(parents=True)
        files = {}
        for name, group in tensors.items():
            path = draft / f"{name}.safetensors"
            save_file({key: value.detach().to("cpu", copy=True).contiguous() for key, value in group.items()}, path)
            _to_disk(path)
            files[name] = {"bytes": path.stat().st_size, "crc32": _checksum(path)}
        state = draft / STATE
        state.write_text(json.dumps({"format": FORMAT, "files": files, **facts}, allow_nan=False), encoding="utf-8")
        _to_disk(state)
        if target.exists():  # the same step again: bytes of the same training
            shutil.rmtree(target)
        os.replace(draft, target)
        _to_disk(parent)
    except (SafetensorError, OSError) as error:
        shutil.rmtree(draft, ignore_errors=True)  # or half a checkpoint goes on filling the disk
        raise write_error(_as_os_error(error), target) from error
    for old in found(parent)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def read_checkpoint(folder: Path) -> Checkpoint:
    """A checkpoint whose every file is as it was written; anything else is a `UserError`."""
    try:
        facts = json.loads((folder / STATE).read_text(encoding="utf-8"))
        files = facts["files"]
        version = facts["format"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"resume: {folder} is no checkpoint of a training, or it is damaged") from error
    if version != FORMAT:
        raise UserError(f"resume: {folder} was written by another version of spatially (format {version})")
    tensors = {}
    for name, expected in files.items():
        path = folder / f"{name}.safetensors"
        if not path.is_file() or path.stat().st_size != expected["bytes"] or _checksum(path) != expected["crc32"]:
            raise UserError(f"resume: {path} is missing, damaged or was cut short")
        tensors[name] = load_file(path)
    return Checkpoint(folder, tensors, facts)


def newest(parent: Path) -> Checkpoint | None:
    """The newest checkpoint that is intact; None where there is none at all."""
    folders = found(parent)
    problem: UserError | None = None
    for folder in reversed(folders):
        try:
            return read_checkpoint(folder)
        except UserError as error:
            problem = problem or error
    if problem is not None:
        raise problem
    return None


def found(parent: Path) -> list[Path]:
    """The folders of checkpoints, oldest first."""
    if not parent.is_dir():
        return []
    named = [(int(match[1]), path) for path in parent.iterdir() if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(named)]


def last_good(parent: Path) -> str:
    """Where the newest one lies, in words."""
    folders = found(parent)
    return f"the last good checkpoint is {folders[-1]}" if folders else "there is no checkpoint before that"


def _as_os_error(error: Exception) -> OSError:
    """An error of the disk, whose number safetensors has in its words alone."""
    if isinstance(error, OSError):
        return error
    found = re.search(r"\(os error (\d+)\)", str(error))
    return OSError(int(found[1]), str(error)) if found else OSError(str(error))


def _remove_drafts(parent: Path) -> None:
    for draft in parent.glob(".step-*.draft"):
        shutil.rmtree(draft, ignore_errors=True)


def _to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some file systems cannot do it for folders
            raise
    finally:
        os.close(descriptor)


def _checksum(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            value = zlib.crc32(block, value)
    return value
