"""The loop: epochs of steps, an evaluation after each, checkpoints between, a folder with the trained model at the end.

The host looks at what the device computed only now and then (losses, a signal, the time for a checkpoint), about every two
seconds; all processes look at the same steps. What a training ends with does not depend on when it looked or was saved.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker
from rich.console import Console
from torch import Tensor, nn

from spatially.randomness import stream
from spatially.train import checkpoint as files
from spatially.train.batch import Batch, TrainingData, ValidationData
from spatially.train.card import Identity, identity_of
from spatially.train.curves import write_curves
from spatially.train.deliver import Delivery
from spatially.train.distillation import Teacher, load_teacher
from spatially.train.guard import (
    Signals,
    Stopped,
    check_losses,
    diverged,
    exit_code,
    highest,
    memory_error,
    weights_finite,
)
from spatially.train.lock import alone
from spatially.train.log import Log, Row
from spatially.train.processes import agree, joined, mean_over_processes, share_weights, wait
from spatially.train.progress import History, Options, Progress
from spatially.train.recipe import Recipe
from spatially.train.resume import bring_best, check_same, facts_of, has_best, starting_point
from spatially.train.schedule import Schedule
from spatially.train.settle import settled
from spatially.train.state import capture, kept_randomness, restore, seed_everything
from spatially.train.step import TrainingStep, training_step

LOOK_SECONDS = 2.0
EPOCH_SECONDS = 30.0
SAVING_SHARE = 0.05
MOST_STEPS = 100


def fit(
    model: nn.Module,
    training: TrainingData,
    validation: ValidationData | None,
    recipe: Recipe,
    out: str | Path,
    *,
    identity: Identity | None = None,
    test: ValidationData | None = None,
    teacher: Teacher | None = None,
    resume: str | Path | None = "auto",
    accelerator: Accelerator | None = None,
    trackers: Sequence[str | GeneralTracker] = (),
    save_minutes: float = 10.0,
    save_steps: int | None = None,
    log_steps: int = 50,
    curves: bool = True,
    console: Console | None = None,
) -> History:
    """Train `model` as the recipe says and write it to `out`, going on from where an earlier run was interrupted.

    Args:
        model: in the state training starts from; it is moved, and trained in place.
        training, validation, test: see `spatially.train.batch`; the best epoch is the one with the best validation.
        identity: how the model is built and images are prepared, for the folder; asked of the model where not given.
        teacher: instead of the one that the recipe names.
        resume: "auto" goes on from what is in `out`; a path from there, unless `out` holds its continuation already; None
            wants a folder without checkpoints.
        accelerator: processes and device; with `mixed_precision="no"`, since the recipe says the precision.
        trackers: accelerate's, such as "tensorboard", where no accelerator is given.
        save_minutes, save_steps: how often a checkpoint is written, at most and exactly; besides after the first epoch, and
            after others where the last one is half a minute old.
        log_steps: how many steps a line of log.jsonl stands for.
        curves: whether learning curves are drawn at the end.
        console: where to print.
    """
    out = Path(out)
    accelerator = accelerator or joined(trackers, out)
    identity = identity or identity_of(model, training.size)
    options = Options(save_minutes, save_steps, log_steps, curves)
    main = bool(accelerator.is_main_process)
    with alone(out, main=main), settled(recipe), kept_randomness(), Signals() as signals:
        start = starting_point(out, resume)
        if start is not None:
            check_same(start, facts_of(recipe, identity, training))
        seed_everything(stream(recipe.run.seed, "training", accelerator.process_index) >> 1)
        share_weights(accelerator, model.to(accelerator.device))
        if teacher is None:
            teacher = load_teacher(recipe, training.classes, identity.preprocessing, accelerator.device)
        prepare = accelerator.prepare_model
        step = training_step(model, recipe, device=accelerator.device, teacher=teacher, prepare=prepare)
        delivery = Delivery(step, identity, recipe, classes=training.classes, out=out, accelerator=accelerator)
        with Log(out, accelerator, recipe, console=console or Console()) as log:
            run = _Run(delivery, training, validation, options=options, signals=signals, log=log)
            try:
                run.start(start)
                for epoch in range(run.progress.epoch, recipe.total_epochs):
                    run.epoch(epoch)
                return run.finish(test)
            except torch.OutOfMemoryError as error:
                raise memory_error(recipe) from error


class _Run:
    """One training in progress."""

    def __init__(
        self,
        delivery: Delivery,
        training: TrainingData,
        validation: ValidationData | None,
        *,
        options: Options,
        signals: Signals,
        log: Log,
    ) -> None:
        self.delivery, self.training, self.validation = delivery, training, validation
        self.step: TrainingStep = delivery.step
        self.recipe, self.out, self.accelerator = delivery.recipe, delivery.out, delivery.accelerator
        self.options, self.signals, self.log = options, signals, log
        self.saved = self.out / "checkpoints"
        self.schedule = Schedule(self.step.optimiser, self.recipe, training.steps_per_epoch)
        self.progress = Progress()
        self.interval = 1
        self.saved_at = self.looked_at = time.perf_counter()
        self.saving = 0.0
        self.trained = False
        self.facts = facts_of(self.recipe, delivery.identity, training)

    def start(self, start: files.Checkpoint | None) -> None:
        """From the beginning, or from a checkpoint."""
        if self.accelerator.is_main_process:
            self.out.mkdir(parents=True, exist_ok=True)
        if start is not None:
            restore(self.step, start.tensors, start.facts, self.accelerator.process_index)
            self.progress = Progress(**start.facts["progress"])
            self._find_best(start)
            if start.folder.resolve().parent != self.saved.resolve():
                self._save()  # so that `out` is a whole run from here on, whatever becomes of the other
        self.trained = self.progress.epoch == self.recipe.total_epochs
        steps = self.recipe.total_epochs * self.training.steps_per_epoch
        self.log.start(self.step.updates, steps, self.progress.rows)

    def _find_best(self, start: files.Checkpoint) -> None:
        """The best weights so far, which another run may hold; without them the next epoch's are the best."""
        if not has_best(start):
            self.progress.best_epoch = None
        elif self.accelerator.is_main_process:
            bring_best(start, self.out)
        wait(self.accelerator)

    def epoch(self, epoch: int) -> None:
        """The steps that are left of an epoch, and its evaluation."""
        self.looked_at = time.perf_counter()
        waiting: list[Tensor] = []
        for batch in self._batches(epoch):
            self.schedule.set(self.step.updates)
            waiting.append(self.step(batch))
            if len(waiting) >= self.interval or self._save_now():
                self._look(waiting)
                waiting = []
        if waiting:
            self._look(waiting)
        progress, steps = self.progress, self.training.steps_per_epoch
        if progress.done < steps:
            self._save_or_stop(now=False)
            raise RuntimeError(f"the training data gave {progress.done} of {steps} batches of epoch {epoch}")
        images = steps * self.recipe.batch
        rate = self.schedule.set(self.step.updates - 1)
        row = progress.row(self.delivery.measure(self.validation), step=self.step.updates, rate=rate, images=images)
        progress.rows.append(row)
        self.log.epoch(progress.rows)
        self._keep_best(row)
        self.progress = replace(progress, epoch=epoch + 1, done=0, loss=0.0, right=0.0, seconds=0.0)
        last, exploding = epoch + 1 == self.recipe.total_epochs, progress.above > 0
        # What is about to be told as diverged must not take the place of a good checkpoint.
        self._save_or_stop(now=last or (epoch == 0 and not exploding), seconds=None if exploding else self._pause())

    def finish(self, test: ValidationData | None) -> History:
        """Write what is to stay."""
        rows, best = self.progress.rows, self.progress.best_epoch
        done = self.trained and self.delivery.is_there()
        results = self.delivery.finish(rows, best, test, write=not done)
        if self.accelerator.is_main_process and self.options.curves and not done:
            write_curves(rows, self.out, f"{self.delivery.identity.name}, {self.recipe.name}")
        self.log.finish(f"{self.out} is trained already: nothing is left to do" if done else "")
        wait(self.accelerator)
        return History(tuple(rows), self.out, best, results)

    def _batches(self, epoch: int) -> Iterator[Batch]:
        if self.progress.done >= self.training.steps_per_epoch:
            return
        try:
            with kept_randomness():  # a loader may draw when it starts, which it would do again after an interruption
                batches = iter(self.training.batches(epoch, first_step=self.progress.done))
                first = next(batches)
            yield first
            yield from batches
        except RuntimeError:
            # a signal to the whole group of processes ends a loader's workers as well, while all of this can be saved
            if not self.signals.received or self.accelerator.num_processes > 1:
                raise

    def _look(self, waiting: list[Tensor]) -> None:
        """Read the losses of the steps since the last look; save or stop where it is time."""
        progress, count = self.progress, len(waiting)
        losses, right = mean_over_processes(self.accelerator, torch.stack(waiting)).double().T.tolist()
        first = self.step.updates - count
        if progress.limit is None:
            progress.limit = highest(losses[0], classes=len(self.training.classes))
        progress.above = check_losses(
            losses, first_step=first, limit=progress.limit, above=progress.above, kept=self._kept()
        )
        now = time.perf_counter()
        seconds, self.looked_at = max(now - self.looked_at, 1e-9), now
        rates = [self.schedule.set(number) for number in range(first, first + count)]
        records = progress.add(losses, right, rates, first=first, every=self.options.log_steps)
        progress.seconds += seconds
        self.log.steps(records, epoch=progress.epoch, done=self.step.updates, speed=self.recipe.batch * count / seconds)
        self.interval = max(1, min(MOST_STEPS, int(LOOK_SECONDS * count / seconds), 4 * self.interval))
        self._save_or_stop(now=self._save_now())

    def _save_now(self) -> bool:
        every = self.options.save_steps
        return every is not None and self.step.updates % every == 0

    def _pause(self) -> float:
        """Seconds between the saves at the ends of epochs: writing is to take a small part of the time."""
        return max(EPOCH_SECONDS, self.saving / SAVING_SHARE)

    def _kept(self) -> str:
        """What a training that diverged leaves, in words."""
        best = self.progress.best_epoch
        words = files.last_good(self.saved)
        return words if best is None else f"{words}, and the best weights, of epoch {best + 1}, are {self.out / 'best'}"

    def _save_or_stop(self, *, now: bool, seconds: float | None = None) -> None:
        """All processes together, when one was asked to stop or the main one finds it is time: `seconds` after the last."""
        main = self.accelerator.is_main_process
        pause = min(60 * self.options.save_minutes, math.inf if seconds is None else seconds)
        due = main and time.perf_counter() - self.saved_at >= pause
        mine = self.interval if main else 0
        signal, time_to_save, self.interval = agree(self.accelerator, self.signals.received, int(due), mine)
        if signal or time_to_save or now:
            self._save()
        if signal:
            place = f"epoch {self.progress.epoch + 1} after {self.progress.done} steps"
            self.log.finish(f"stopped, saved in {self.out} in {place}; the same command goes on")
            raise Stopped(exit_code(signal))

    def _save(self) -> None:
        begun = time.perf_counter()
        if not weights_finite(self.step.model):
            what = f"the weights are no numbers any more after {self.step.updates} steps"
            raise diverged(what, self._kept())
        groups, facts = capture(self.step)
        if self.accelerator.is_main_process:
            facts |= self.facts | {"progress": asdict(self.progress)}
            files.write_checkpoint(self.saved, self.step.updates, groups, facts)
        wait(self.accelerator)
        self.saved_at = time.perf_counter()
        self.saving = self.saved_at - begun

    def _keep_best(self, row: Row) -> None:
        progress, accuracy = self.progress, row["validation_accuracy"]
        if accuracy is None or row["validation_loss"] is None or not weights_finite(self.delivery.model):
            return
        best = progress.best_epoch
        if best is None or accuracy > progress.rows[best]["validation_accuracy"]:
            progress.best_epoch = row["epoch"]
            self.delivery.write_best(row)
