"""What a training hands over: the weights it ends with and the best ones, measured, in folders that load again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn

from spatially.errors import UserError
from spatially.subject.checkpoint import read_checkpoint as read_weights
from spatially.train.batch import ValidationData
from spatially.train.card import Identity, write_model
from spatially.train.evaluate import evaluate
from spatially.train.log import Row
from spatially.train.processes import share_weights, wait
from spatially.train.recipe import Recipe
from spatially.train.state import kept_randomness, load_weights, weights
from spatially.train.step import TrainingStep


class Delivery:
    """The model that counts, which is the average of the weights where the recipe averages."""

    def __init__(
        self,
        step: TrainingStep,
        identity: Identity,
        recipe: Recipe,
        *,
        classes: Sequence[str],
        out: Path,
        accelerator: Accelerator,
    ) -> None:
        self.step, self.identity, self.recipe, self.classes = step, identity, recipe, classes
        self.out, self.accelerator = out, accelerator
        self.model: nn.Module = step.model if step.average is None else step.average.module

    def measure(self, data: ValidationData | None) -> dict[str, float]:
        """Loss and accuracies on some images; nothing without any."""
        if data is None:
            return {}
        share_weights(self.accelerator, self.model, buffers_only=True)
        with kept_randomness():
            return evaluate(self.model, data, self.accelerator, self.step.precision())

    def write_best(self, row: Row) -> None:
        """OUT/best, of the epoch that `row` tells of."""
        self._write(self.out / "best", row, {})

    def is_there(self) -> bool:
        """Whether OUT holds these weights already, as a whole: its card is written last."""
        if not (self.out / "README.md").is_file():
            return False
        try:
            written = read_weights(self.out / "model.safetensors")
        except UserError:
            return False
        own = weights(self.model)
        return written.keys() == own.keys() and all(
            written[name].shape == value.shape and torch.equal(written[name], value.cpu())
            for name, value in own.items()
        )

    def finish(
        self, rows: Sequence[Row], best: int | None, test: ValidationData | None, *, write: bool = True
    ) -> dict[str, float]:
        """What the last and the best weights do on test images; OUT with the last ones, unless it is not to be written."""
        results = {f"test_{name}": value for name, value in self.measure(test).items()}
        if write:
            self._write(self.out, rows[-1], results)
        if test is None or best is None:
            return results
        last = {name: value.clone() for name, value in weights(self.model).items()}
        wait(self.accelerator)
        load_weights(self.model, read_weights(self.out / "best" / "model.safetensors"))
        of_best = self.measure(test)
        load_weights(self.model, last)
        if write:
            self._write_card_of_best(rows[best], of_best)
        return results | {f"best_test_{name}": value for name, value in of_best.items()}

    def _write_card_of_best(self, row: Row, measured: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            folder = self.out / "best"
            values = read_weights(folder / "model.safetensors")
            results = {f"test_{name}": value for name, value in measured.items()}
            write_model(
                folder, values, self.identity, classes=self.classes, recipe=self.recipe, row=row, results=results
            )

    def _write(self, folder: Path, row: Row, results: Mapping[str, float]) -> None:
        if self.accelerator.is_main_process:
            values = weights(self.model)
            write_model(
                folder, values, self.identity, classes=self.classes, recipe=self.recipe, row=row, results=results
            )
