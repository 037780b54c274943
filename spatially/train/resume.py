"""Where a training starts: anew, or from a checkpoint of the same training."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from spatially.errors import UserError
from spatially.train import checkpoint as files
from spatially.train.log import flat

# What may differ between a run and its continuation, because weights do not depend on it.
FREE = {"run.compile", "run.checkpointing"}


def starting_point(out: Path, resume: str | Path | None) -> files.Checkpoint | None:
    """The checkpoint to go on from; None to begin."""
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
    if (given / files.STATE).is_file():
        return files.read_checkpoint(given)
    found = files.newest(given / "checkpoints")
    if found is None:
        raise UserError(f"resume: {given} holds no checkpoint")
    return found


def check_same(start: files.Checkpoint, facts: Mapping[str, Any]) -> None:
    """A `UserError` where a checkpoint is of another model, other data or another recipe."""
    saved = start.facts
    for key, what in (("model", "model"), ("classes", "data"), ("steps_per_epoch", "data")):
        if saved[key] != facts[key]:
            raise UserError(
                f"resume: {start.folder} is a training of another {what} ({key} {_short(saved[key])}, now "
                f"{_short(facts[key])}); give another --out"
            )
    before, now = flat(saved["recipe"]), flat(facts["recipe"])
    changed = [key for key in now | before if key not in FREE and before.get(key) != now.get(key)]
    if changed:
        listed = ", ".join(f"{key} {before.get(key)!r}, now {now.get(key)!r}" for key in changed[:4])
        raise UserError(f"resume: {start.folder} was trained with another recipe ({listed}); give another --out")


def _short(value: Any) -> str:
    return f"of {len(value)} names" if isinstance(value, list) else repr(value)
