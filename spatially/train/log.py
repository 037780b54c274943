"""What a training says while it runs: log.csv (a row an epoch), log.jsonl (also steps), accelerate's trackers, a progress bar.

After an interruption the files are cut back to the checkpoint that the training goes on from, so that nothing stands twice.
"""

import csv
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from spatially.files import write_error, write_whole
from spatially.train.recipe import Recipe

Row = dict[str, Any]

# The last so many seconds say how long the rest will take: a step on a CPU may last minutes, and an evaluation too.
SPEED_SECONDS = 600.0


class Log:
    """The files and the display of one training; silent in all processes but the main one."""

    def __init__(self, out: Path, accelerator: Accelerator, recipe: Recipe, *, console: Console) -> None:
        self.out = out
        self.accelerator = accelerator
        self.active = bool(accelerator.is_main_process)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[words]}"),
            TimeRemainingColumn(),
            console=console,
            speed_estimate_period=SPEED_SECONDS,
            disable=not self.active,
        )
        self._task = self._progress.add_task(recipe.name, total=None, words="")
        self._epochs = recipe.total_epochs
        if accelerator.log_with:
            accelerator.init_trackers("spatially", config=flat(recipe.describe()))

    def __enter__(self) -> "Log":
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, step: int, steps: int, rows: Sequence[Row]) -> None:
        """At `step` of `steps`, with these epochs behind: forget what was written after it.

        A checkpoint may stand between an epoch's last step and its evaluation, whose line then comes again.
        """
        if not self.active:
            return
        epochs = {row["epoch"] for row in rows}
        kept = [
            record
            for record in self._records()
            if record["step"] <= step and (record["kind"] != "epoch" or record["epoch"] in epochs)
        ]
        write_whole(self.out / "log.jsonl", "".join(json.dumps(record) + "\n" for record in kept))
        self._write_rows(rows)
        self._progress.update(self._task, completed=step, total=steps)

    def steps(self, records: Sequence[Row], *, epoch: int, done: int, speed: float) -> None:
        """Append the records of some steps and show where the training is; `speed` is in images a second."""
        if self.active:
            self._append(records)
            loss = f"loss {records[-1]['train_loss']:.4f}, " if records else ""
            words = f"epoch {epoch + 1}/{self._epochs}, {loss}{speed:,.0f} images/s, {memory() / 2**30:.1f} GiB"
            self._progress.update(self._task, completed=done, words=words)
        for record in records:
            self._track(record)

    def epoch(self, rows: Sequence[Row]) -> None:
        """Write the epoch that the last row tells of."""
        if self.active:
            self._append([{"kind": "epoch", **rows[-1]}])
            self._write_rows(rows)
            self._progress.console.print(sentence(rows[-1]), highlight=False)
        self._track(rows[-1])

    def finish(self, words: str = "") -> None:
        """Close the trackers, with some last words."""
        if self.active and words:
            self._progress.console.print(words, highlight=False, markup=False)
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _track(self, values: Mapping[str, Any]) -> None:
        if self.accelerator.log_with:
            numbers = {name: value for name, value in values.items() if isinstance(value, int | float)}
            self.accelerator.log(numbers, step=int(values["step"]))

    def _append(self, records: Sequence[Row]) -> None:
        path = self.out / "log.jsonl"
        try:
            if records:
                with path.open("a", encoding="utf-8") as file:
                    file.write("".join(json.dumps(record) + "\n" for record in records))
        except OSError as error:
            raise write_error(error, path) from error

    def _write_rows(self, rows: Sequence[Row]) -> None:
        if not rows:
            (self.out / "log.csv").unlink(missing_ok=True)
            return
        text = io.StringIO()
        writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self.out / "log.csv", text.getvalue())

    def _records(self) -> list[Row]:
        path = self.out / "log.jsonl"
        records = []
        for line in path.read_text(encoding="utf-8").splitlines() if path.is_file() else ():
            try:
                records.append(json.loads(line))
            except ValueError:
                break  # torn by the interruption
        return records


def sentence(row: Row) -> str:
    """An epoch in one line."""
    loss, accuracy = row["validation_loss"], row["validation_accuracy"]
    measured = "no finite loss" if loss is None else f"{loss:.4f}"
    validation = "" if accuracy is None else f", validation {measured} and {accuracy:.1%}"
    return (
        f"epoch {row['epoch'] + 1}: loss {row['train_loss']:.4f}, accuracy {row['train_accuracy']:.1%}"
        f"{validation}, {row['images_per_second']:,.0f} images/s"
    )


def number(value: float | None) -> float | None:
    """None where a measurement is no number, since JSON has no word for it."""
    return value if value is not None and math.isfinite(value) else None


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted keys, in types that every tracker takes.

    >>> flat({"run": {"seed": 0}, "milestones": [40, 50]})
    {'run.seed': 0, 'milestones': '[40, 50]'}
    """
    result: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            result |= flat(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = value if isinstance(value, bool | int | float | str) else str(value)
    return result


def memory() -> int:
    """The most bytes this process has held: on its GPU, or of the machine's memory."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    try:
        import resource
    except ImportError:  # Windows
        return 0
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
