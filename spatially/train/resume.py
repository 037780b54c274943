"""Where a training starts: anew, or from a checkpoint of the same training."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from spatially.errors import UserError
from spatially.files import write_error
from spatially.train import checkpoint as files
from spatially.train.batch import TrainingData
from spatially.train.card import Identity
from spatially.train.log import flat
from spatially.train.recipe import Recipe

# What may differ between a run and its continuation, because weights do not depend on it.
FREE = {"run.compile", "run.checkpointing"}
# What tells one training from another, and the word for it.
FACTS = {
    "model": "model",
    "input_size": "input size",
    "arguments": "model",
    "classes": "data set",
    "steps_per_epoch": "data set",
    "data": "data set",
}
# How images are brought, which decides what is drawn for them.
BROUGHT = {True: "kept in memory (--resident)", False: "read again each epoch (--loader)"}


def facts_of(recipe: Recipe, identity: Identity, training: TrainingData) -> dict[str, Any]:
    """What tells a training from others, as it stands in its checkpoints."""
    return {
        "recipe": recipe.describe(),
        "model": identity.name,
        "arguments": json.loads(json.dumps(dict(identity.options), default=str)),
        "input_size": list(training.size),
        "classes": list(training.classes),
        "steps_per_epoch": training.steps_per_epoch,
        "data": training.fingerprint,
        "resident": getattr(training, "resident", None),  # data that a caller made need not tell
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


def before(out: Path, resume: str | Path | None) -> files.Checkpoint | None:
    """What a training goes on from, without its tensors."""
    start = starting_point(out, resume)
    return None if start is None else replace(start, tensors={})


def check_same(start: files.Checkpoint, facts: Mapping[str, Any]) -> None:
    """A `UserError` where a checkpoint is of another model, other data or another recipe."""
    saved = start.facts
    for key, what in FACTS.items():
        old, new = saved.get(key, ""), facts[key]
        # Older checkpoints lack some facts, and data that a caller made may have no fingerprint.
        if old != new and "" not in (old, new):
            raise UserError(
                f"resume: {start.folder} is a training of another {what} ({_change(key, old, new)}); give another --out"
            )
    held, holds = saved.get("resident"), facts["resident"]
    if held is not None and holds is not None and held != holds:
        raise UserError(
            f"resume: in the training of {start.folder} images are {BROUGHT[held]}, and now they would be "
            f"{BROUGHT[holds]}, which draws other crops of them; leave that option out, or give another --out"
        )
    _check_recipe(start, flat(saved["recipe"]), flat(facts["recipe"]))


def _check_recipe(start: files.Checkpoint, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    changed = [key for key in {**new, **old} if key not in FREE and old.get(key) != new.get(key)]
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


def _change(key: str, old: Any, new: Any) -> str:
    """What a fact was and is; of the classes, the first that is another."""
    if key == "classes":
        names = next(pair for pair in zip_longest(old, new) if pair[0] != pair[1])
        first, second = ("none" if name is None else repr(name) for name in names)
        return f"{len(old)} classes, now {len(new)}; the first that differs was {first}, now {second}"
    first, second = (value if isinstance(value, str) else repr(value) for value in (old, new))
    return f"{key} {first}, now {second}"
