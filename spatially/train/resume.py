"""Where a training starts: anew, or from a checkpoint of the same training."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spatially.errors import UserError
from spatially.files import write_error
from spatially.train import checkpoint as files
from spatially.train.log import flat

# What may differ between a run and its continuation, because weights do not depend on it.
FREE = {"run.compile", "run.checkpointing"}
# What tells one training from another, and the word for it.
FACTS = {
    "model": "model",
    "input_size": "input size",
    "arguments": "model",
    "classes": "data",
    "steps_per_epoch": "data",
    "data": "data",
}


def starting_point(out: Path, resume: str | Path | None) -> files.Checkpoint | None:
    """The checkpoint to go on from; None to begin.

    What `out` holds itself goes before another folder's: it is that one's continuation, or a training to be left alone.
    """
    own = out / "checkpoints"
    if resume == "auto":
        return files.newest(own)
    if resume is None:
        if files.found(own):
            raise UserError(
                f"out: {out} holds a training already; give another folder, or resume=auto to go on with it"
            )
        return None
    given = Path(resume)
    if files.found(own) and given.resolve().parent != own.resolve():
        return files.newest(own)
    if (given / files.STATE).is_file():
        return files.read_checkpoint(given)
    found = files.newest(given / "checkpoints")
    if found is None:
        raise UserError(f"resume: {given} holds no checkpoint")
    return found


def check_same(start: files.Checkpoint, facts: Mapping[str, Any]) -> None:
    """A `UserError` where a checkpoint is of another model, other data or another recipe."""
    saved = start.facts
    for key, what in FACTS.items():
        before, now = saved.get(key, ""), facts[key]
        # Older checkpoints lack some facts, and data that a caller made may have no fingerprint.
        if before != now and "" not in (before, now):
            raise UserError(
                f"resume: {start.folder} is a training of another {what} ({key} {_short(before)}, now "
                f"{_short(now)}); give another --out"
            )
    old, new = flat(saved["recipe"]), flat(facts["recipe"])
    changed = [key for key in new | old if key not in FREE and old.get(key) != new.get(key)]
    if changed:
        listed = ", ".join(f"{key} {old.get(key)!r}, now {new.get(key)!r}" for key in changed[:4])
        raise UserError(f"resume: {start.folder} was trained with another recipe ({listed}); give another --out")


def has_best(start: files.Checkpoint) -> bool:
    """Whether the run that a checkpoint is of holds its best weights."""
    return (_best_beside(start) / "model.safetensors").is_file()


def bring_best(start: files.Checkpoint, out: Path) -> None:
    """Copy the best weights of another run that `out` goes on with."""
    source, target = _best_beside(start), out / "best"
    if source.resolve() == target.resolve():
        return
    try:
        shutil.copytree(source, target, dirs_exist_ok=True)
    except OSError as error:
        raise write_error(error, target) from error


def _best_beside(start: files.Checkpoint) -> Path:
    """RUN/best, for RUN/checkpoints/step-N."""
    return start.folder.resolve().parent.parent / "best"


def _short(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], str):
        return f"of {len(value)} names"
    return value if isinstance(value, str) else repr(value)
