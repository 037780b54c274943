"""Where a training is, what it measured, and when it is to save and to log."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spatially.train.log import Row, memory, number


@dataclass(frozen=True)
class History:
    """What a training measured: a row an epoch as in log.csv, the best epoch by validation, results on test images."""

    rows: tuple[Row, ...]
    out: Path
    best_epoch: int | None = None
    results: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Options:
    """What does not change the weights: how often to save, at most and exactly, and to log; whether to draw curves."""

    save_minutes: float = 10.0
    save_steps: int | None = None
    log_steps: int = 50
    curves: bool = True


@dataclass
class Progress:
    """`done` steps of `epoch`, the sums of their losses and right shares, and what came before; all of it plain data.

    `limit` is the loss beyond which a training has exploded, `above` how many of the last steps were.
    """

    epoch: int = 0
    done: int = 0
    loss: float = 0.0
    right: float = 0.0
    seconds: float = 0.0
    limit: float | None = None
    above: int = 0
    best_epoch: int | None = None
    unlogged: list[float] = field(default_factory=list)
    rows: list[Row] = field(default_factory=list)

    def add(
        self, losses: Sequence[float], right: Sequence[float], rates: Sequence[float], *, first: int, every: int
    ) -> list[Row]:
        """Count some steps, the first of them number `first`; a record for every `every` of them."""
        records: list[Row] = []
        for step, (loss, share, rate) in enumerate(zip(losses, right, rates, strict=True), start=first + 1):
            self.loss += loss
            self.right += share
            self.done += 1
            self.unlogged.append(loss)
            if step % every == 0:
                mean = sum(self.unlogged) / len(self.unlogged)
                records.append({"kind": "step", "epoch": self.epoch, "step": step, "train_loss": mean, "rate": rate})
                self.unlogged = []
        return records

    def row(self, measured: Mapping[str, float], *, step: int, rate: float, images: int) -> Row:
        """The line of log.csv for an epoch whose steps are done, after `step` steps in all."""
        return {
            "epoch": self.epoch,
            "step": step,
            "rate": rate,
            "train_loss": self.loss / self.done,
            "train_accuracy": self.right / self.done,
            **{f"validation_{name}": number(measured.get(name)) for name in ("loss", "accuracy", "top5")},
            "seconds": self.seconds,
            "images_per_second": images / max(self.seconds, 1e-9),
            "memory_bytes": memory(),
        }
