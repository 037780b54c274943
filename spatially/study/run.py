"""Run a study: the plan, every chunk of every task by any number of processes, and the results.

A chunk's outcomes are a pure function of the subject, the images' numbers and the options, so it does not matter which
process measures it, when, or after how many interruptions.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
import xarray as xr
import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from spatially.data import Images, open_images
from spatially.errors import NotApplicable, UserError
from spatially.files import write_whole
from spatially.memory import trim
from spatially.probes import Probe
from spatially.probes.ahead import in_turn, settled
from spatially.study.plan import Task, plan_table, speed
from spatially.study.processes import Processes, fixed_threads
from spatially.study.spec import ALL, Study
from spatially.study.store import Store, read_dataset, slug, write_dataset
from spatially.subject import load

_EXAMPLES = 3
_LONG_REASON = 90  # characters


def run_study(
    study: Study,
    out: str | Path,
    *,
    device: str = "auto",
    overwrite: bool = False,
    dry_run: bool = False,
    console: Console | None = None,
) -> Store:
    """Measure every model with every probe and keep the results in ``out``; what is there already is not done again."""
    processes = Processes(cpu=device == "cpu" or not torch.cuda.is_available())
    console = console or Console(stderr=True)
    console.quiet = console.quiet or not processes.is_main
    store = Store(out)
    with fixed_threads():
        tasks, skipped = _prepare(study, processes, device)
        processes.wait()
        left = [task for task in tasks if not _finished(store, task, overwrite=overwrite)]
        _show_plan(tasks, left, store, processes, console)
        for line in _said_once(skipped, len(study.models)):
            console.print(escape(line), style="yellow")
        if names := study.left_out:
            ask = f"--probes {','.join([ALL, *names])}"
            console.print(f"skipped {', '.join(names)}: long to measure; to have it too: {ask}", style="yellow")
        if dry_run:
            return store
        if processes.is_main:
            store.clear_drafts()
            write_whole(store.folder / "study.yaml", yaml.safe_dump(study.describe(), sort_keys=False))
            write_dataset(store.folder / "examples.nc", _examples(tasks[0].images, seed=tasks[0].probe.seed))
            store.keep_skipped([asdict(one) for one in skipped])
        widest = max((len(task.model) for task in left), default=0)
        for _, of_model in groupby(left, key=lambda task: task.model):
            _run_model(list(of_model), store, processes, console, widest=widest)
    return store


@dataclass(frozen=True)
class Skipped:
    """A probe that has nothing to measure in a model."""

    model: str
    probe: str
    reason: str


def _said_once(skipped: Sequence[Skipped], models: int) -> Iterator[str]:
    """A line for each reason, with all the models that have it; the long of a long reason stands on the page alone."""
    of: dict[tuple[str, str], list[str]] = {}
    for one in skipped:
        of.setdefault((one.probe, one.reason.removeprefix(f"{one.model} ")), []).append(one.model)
    told = {(one.model, one.probe): one.reason for one in skipped}
    for (probe, reason), names in of.items():
        whose = "" if len(names) == models > 1 else f" of {', '.join(names)}"
        said = told[names[0], probe] if len(names) == 1 else reason
        short, colon, _ = said.partition(": ")
        yield f"skipped {probe}{whose}: {short if colon and len(said) > _LONG_REASON else said}"


def _prepare(study: Study, processes: Processes, device: str) -> tuple[list[Task], list[Skipped]]:
    """Load the models, open their images and check that every probe fits, before anything runs."""
    where = str(processes.device) if device == "auto" or processes.count > 1 else device
    names: set[str] = set()
    tasks: list[Task] = []
    skipped: list[Skipped] = []
    for options in study.models:
        subject = load(**{"device": where, **options})
        if slug(subject.name) in names:
            raise UserError(f"two models are called {subject.name}; give one of them another name (name: …)")
        names.add(slug(subject.name))
        with processes.main_first():
            said = None if processes.is_main else False
            # Probes for which the answers count see to the classes themselves.
            images = open_images(subject=subject, progress=said, answers=False, **study.data)
        for probe in study.make_probes():
            try:
                view = probe.view(subject, images)
                probe.check(view, images)
            except UserError as error:
                if not _may_skip(study, probe, error):
                    raise
                skipped.append(Skipped(subject.name, probe.name, str(error)))
                continue
            tasks.append(Task(len(tasks), view, images, probe, study.batch, study.command()))
    measured = {task.probe.name for task in tasks}
    for one in skipped:
        if one.probe not in measured and not study.everything:
            raise NotApplicable(one.reason)
    if not tasks:
        raise UserError("nothing can be measured: " + "; ".join(f"{one.probe}: {one.reason}" for one in skipped))
    return tasks, skipped


def _may_skip(study: Study, probe: Probe, error: UserError) -> bool:
    """What a model has nothing for is left out; of all probes also those that its images do not do for, unless the user set
    their options, which may be what is wrong."""
    return isinstance(error, NotApplicable) or (study.everything and not study.options_of(probe.name))


def _finished(store: Store, task: Task, *, overwrite: bool) -> bool:
    """Whether the result is there and whole. One that was measured otherwise is not silently replaced."""
    path = store.result_path(task.model, task.probe.name)
    if not path.exists():
        return False
    try:
        found = read_dataset(path).attrs
    except UserError:
        return False
    wanted = task.attributes
    if found.get("key") == wanted["key"]:
        return True
    if overwrite:
        return False
    differing = [
        name for name in wanted if name not in ("key", "command", "position") and found.get(name) != wanted[name]
    ]
    raise UserError(
        f"{path} was measured otherwise ({', '.join(differing) or 'key'} differ); choose another --out, or --overwrite it"
    )


def _show_plan(
    tasks: Sequence[Task], left: Sequence[Task], store: Store, processes: Processes, console: Console
) -> None:
    if not processes.is_main:
        return
    rates = {id(task.subject.model): speed(task.subject, task.images, task.batch) for task in left}
    rows = []
    for task in tasks:
        chunks = len(task.chunks)
        key = task.attributes["key"]
        found = (store.read_part(task.model, task.probe.name, chunk, key=key) for chunk in range(chunks))
        present = 0 if task not in left else sum(part is not None for part in found)
        rows.append((task, present if task in left else chunks, rates.get(id(task.subject.model))))
    console.print(plan_table(rows, processes=processes.count))
    for note in dict.fromkeys(note for task in tasks for note in _notes(task)):
        console.print(escape(note), style="yellow")


def _notes(task: Task) -> Iterator[str]:
    """What a reader of the numbers should know beforehand."""
    facts = task.subject.describe()
    if facts["class_mapping"] == "order":
        yield (
            f"{task.model} has other names for its {task.subject.answers} classes than the data: they are taken in the same"
            " order; if that is wrong, say which is which with --class-map FILE"
        )
    elif facts["class_mapping"] not in ("identity", "none"):
        count, how = task.subject.answers, facts["class_mapping"]
        yield f"{task.model} answers among the data's {count} classes (by {how}), chance {1 / count:.1%}"
    for skipped in task.images.skipped[:5]:
        yield f"skipped {skipped.name}: {skipped.reason}"
    if len(task.images.skipped) > 5:
        yield f"skipped {len(task.images.skipped) - 5} more; all are named in the result"


def _examples(images: Images, *, seed: int) -> xr.Dataset:
    """A few images of different classes, for the report."""
    order = images.order(seed)
    _, first = np.unique(images.labels[order], return_index=True)
    rows = order[np.sort(first)[:_EXAMPLES]]
    names = [images.classes[label] if images.classes else f"class {label}" for label in images.labels[rows]]
    return xr.Dataset(
        {"pixels": (("example", "channel", "y", "x"), np.asarray(images.pixels[rows]))},
        coords={
            "index": ("example", images.index[rows]),
            "label": ("example", images.labels[rows]),
            "class_name": ("example", names),
        },
        attrs={"seed": seed},
    )


def _run_model(tasks: Sequence[Task], store: Store, processes: Processes, console: Console, *, widest: int) -> None:
    """All that is left of one model, in one line of progress: what is being measured now, then how much it was."""
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TaskProgressColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
        TextColumn("{task.fields[doing]}"),
        console=console,
    )
    with bar:
        label = bar.add_task(
            escape(tasks[0].model.ljust(widest)), total=sum(len(task.chunks) for task in tasks), doing=""
        )
        before = 0
        for task in tasks:
            bar.update(label, doing=task.probe.name)
            for done in _run_task(task, store, processes):
                bar.update(label, completed=before + done)
            before += len(task.chunks)
        bar.update(label, doing=tasks[0].probe.name if len(tasks) == 1 else f"{len(tasks)} probes")


def _run_task(task: Task, store: Store, processes: Processes) -> Iterator[int]:
    """Measure one probe of one model and keep its result; yields how many chunks are done, about."""
    start = time.perf_counter()
    attributes = task.attributes
    measure = _measure_with_stopping if task.probe.stopping() else _measure_all
    yield from measure(task, store, processes, attributes["key"])
    processes.wait()
    if processes.is_main:
        found = (
            store.read_part(task.model, task.probe.name, chunk, key=attributes["key"])
            for chunk in range(len(task.chunks))
        )
        parts = [part for part in found if part is not None]
        result = task.probe.finish(parts, task.subject, task.images, batch=task.batch)
        result.attrs = attributes
        write_dataset(store.result_path(task.model, task.probe.name), result)
        store.clear_parts(task.model, task.probe.name)
        seconds = time.perf_counter() - start
        store.log(
            model=task.model,
            probe=task.probe.name,
            seconds=round(seconds, 2),
            processes=processes.count,
            at=time.time(),
        )
    processes.wait()


def _measure_all(task: Task, store: Store, processes: Processes, key: str) -> Iterator[int]:
    """Each process takes every so manieth of the chunks that are left; yields how many are done, about."""
    chunks = task.chunks
    left = [
        number for number in range(len(chunks)) if store.read_part(task.model, task.probe.name, number, key=key) is None
    ]
    # Nobody may write before everybody has looked, or they would share out different lists.
    processes.wait()
    done = len(chunks) - len(left)
    yield done
    measure = task.probe.measurer(task.subject, task.images, batch=task.batch)
    mine = left[processes.rank :: processes.count]
    for number, part in zip(mine, in_turn(measure, (chunks[number] for number in mine)), strict=True):
        _keep(part, task, store, number, key)
        done += processes.count
        yield min(done, len(chunks))


def _measure_with_stopping(task: Task, store: Store, processes: Processes, key: str) -> Iterator[int]:
    """Rounds of one chunk a process; after each, every process takes in the same chunks in the same order."""
    chunks, stopping = task.chunks, task.probe.stopping()
    assert stopping is not None
    measure = task.probe.measurer(task.subject, task.images, batch=task.batch)
    for first in range(0, len(chunks), processes.count):
        stopped = stopping.stopped
        if stopped.all():
            break
        numbers = range(first, min(first + processes.count, len(chunks)))
        found = {number: store.read_part(task.model, task.probe.name, number, key=key) for number in numbers}
        processes.wait()
        mine = first + processes.rank
        if mine in found and found[mine] is None:
            _keep(settled(measure(chunks[mine], stopped=stopped)), task, store, mine, key)
        processes.wait()
        for number in numbers:
            part = store.read_part(task.model, task.probe.name, number, key=key)
            if part is None:
                raise OSError(
                    f"chunk {number} is not where another process wrote it; do all processes see {store.folder}?"
                )
            stopping.update(task.probe.outcomes(part))
        yield numbers[-1] + 1
    yield len(chunks)


def _keep(part: xr.Dataset, task: Task, store: Store, number: int, key: str) -> None:
    """Write down what was measured of a chunk."""
    part.attrs["key"] = key
    write_dataset(store.part_path(task.model, task.probe.name, number), part)
    trim()
