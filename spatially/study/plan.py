"""What a study will do and how long it should take, before it does it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from rich.markup import escape
from rich.table import Table

from spatially import randomness
from spatially.perturb.pixels import as_float
from spatially.probes.base import Probe, Rows, describe

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject

LONGEST_PLAN = 24  # lines


@dataclass(frozen=True, eq=False)
class Task:
    """One probe of one model."""

    position: int
    subject: Subject
    images: Images
    probe: Probe
    batch: int
    command: str

    @property
    def model(self) -> str:
        return self.subject.name

    @cached_property
    def chunks(self) -> list[Rows]:
        """Rows of the images, chunk by chunk."""
        return self.probe.chunks(self.images, batch=self.batch)

    @cached_property
    def attributes(self) -> dict[str, Any]:
        """What is measured, exactly, with a key that is the same if and only if all of it is."""
        facts = describe(self.probe, self.subject, self.images, batch=self.batch)
        text = repr((sorted(facts.items()), behaviour(self.subject)))
        key = blake2b(text.encode(), digest_size=16).hexdigest()
        return {**facts, "key": key, "command": self.command, "position": self.position}

    @property
    def forward_passes(self) -> int:
        return self.probe.passes * len(self.images)

    @property
    def memory(self) -> int:
        """Bytes: the crops (memory-mapped or in memory), the weights, and two batches of float pixels."""
        weights = sum(tensor.numel() * tensor.element_size() for tensor in self.subject.model.state_dict().values())
        pixel_count = int(np.prod(self.images.pixels.shape[1:]))
        return self.images.pixels.nbytes + weights + 2 * self.batch * pixel_count * 4


@torch.inference_mode()
def behaviour(subject: Subject) -> str:
    """What a model does with one image of noise, roughly: weights alone do not tell when its code was changed."""
    noise = randomness.normal(
        randomness.stream(0, "behaviour"), torch.zeros(1, dtype=torch.int64), (3, *subject.preprocessing.input_size)
    )
    logits = subject((noise * 0.25 + 0.5).clamp(0, 1).to(subject.device)).double()
    return " ".join(f"{float(value):.3g}" for value in (logits.mean(), logits.std(), logits.min(), logits.max()))


@torch.inference_mode()
def speed(subject: Subject, images: Images, batch: int) -> float:
    """Images a second, of the fastest of a few passes: what disturbs a machine only makes it slower."""
    rows = np.arange(min(batch, len(images), batch if subject.device.type == "cuda" else 8))
    pixels = as_float(images.batch(rows, subject.device)[0])
    subject(pixels)
    seconds: list[float] = []
    while len(seconds) < 3 and sum(seconds) < 1:
        _wait(subject.device)
        start = time.perf_counter()
        subject(pixels)
        _wait(subject.device)
        seconds.append(time.perf_counter() - start)
    return len(rows) / min(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plan_table(rows: list[tuple[Task, int, float | None]], *, processes: int) -> Table:
    """A line a task: what is left of it, and how long that takes at its measured speed. Of many tasks, a line a model."""
    table = _plan_by_model(rows, processes) if len(rows) > LONGEST_PLAN else _plan_by_task(rows, processes)
    most = size(max((task.memory for task, *_ in rows), default=0))
    total = sum(_seconds(*row, processes) for row in rows)
    who = f"{processes} process{'es' if processes > 1 else ''}"
    table.caption = f"about {duration(total)} in all with {who}, {most} of memory beside the activations"
    return table


def _passes(task: Task, done: int) -> float:
    """Forward passes that are left."""
    return task.forward_passes * (len(task.chunks) - done) / len(task.chunks)


def _seconds(task: Task, done: int, rate: float | None, processes: int) -> float:
    return _passes(task, done) / rate / processes if rate else 0.0


def _plan_by_model(rows: list[tuple[Task, int, float | None]], processes: int) -> Table:
    counts = {len(task.images) for task, *_ in rows}
    title = f"Plan: {counts.pop():,} images" if len(counts) == 1 else "Plan"
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("model", overflow="fold")
    for name in ("probes", "passes", "images/s", "about", "state"):
        table.add_column(name, justify="right", no_wrap=True)
    for model in dict.fromkeys(task.model for task, *_ in rows):
        own = [row for row in rows if row[0].model == model]
        ready = sum(done == len(task.chunks) for task, done, _ in own)
        begun = any(done for _, done, _ in own)
        rate = next((rate for *_, rate in own if rate), None)
        table.add_row(
            escape(model),
            str(len(own)),
            f"{sum(_passes(task, done) for task, done, _ in own):,.0f}",
            f"{rate * processes:,.0f}" if rate else "",
            duration(sum(_seconds(*row, processes) for row in own)) if rate else "",
            "done" if ready == len(own) else f"{ready}/{len(own)}" if begun else "new",
        )
    return table


def _plan_by_task(rows: list[tuple[Task, int, float | None]], processes: int) -> Table:
    counts = {len(task.images) for task, *_ in rows}
    title = f"Plan: {counts.pop():,} images" if len(counts) == 1 else "Plan"
    table = Table(title=title, title_justify="left", caption_justify="left")
    table.add_column("model", overflow="fold")
    table.add_column("probe", no_wrap=True)
    for name in (*(["images"] if counts else []), "passes", "images/s", "about", "state"):
        table.add_column(name, justify="right", no_wrap=True)
    before = ""
    for task, done, rate in rows:
        chunks = len(task.chunks)
        state = "done" if done == chunks else f"{done}/{chunks}" if done else "new"
        if before and task.model != before:
            table.add_section()
        table.add_row(
            "" if task.model == before else escape(task.model),
            task.probe.name,
            *([f"{len(task.images):,}"] if counts else []),
            f"{_passes(task, done):,.0f}",
            f"{rate * processes:,.0f}" if rate else "",
            duration(_seconds(task, done, rate, processes)) if rate else "",
            state,
        )
        before = task.model
    return table


def duration(seconds: float) -> str:
    """Seconds as a person says them.

    >>> duration(42), duration(200), duration(9000)
    ('42 s', '3 min', '2.5 h')
    """
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def size(count: float) -> str:
    """Bytes as a person says them.

    >>> size(7_500_000_000)
    '7.0 GiB'
    """
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
