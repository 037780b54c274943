"""What a training says of itself while it runs."""

import io
from pathlib import Path
from types import SimpleNamespace

import pytest
from accelerate import Accelerator
from rich.console import Console

from spatially.train.log import Log, memory, sentence
from spatially.train.recipe import Recipe


def test_the_time_still_to_come_is_known_where_a_step_takes_a_minute(tmp_path: Path) -> None:
    now = [0.0]
    console = Console(file=io.StringIO(), force_terminal=True, width=120, get_time=lambda: now[0])
    recipe = Recipe(name="slow", epochs=1, batch=2, optimiser={"name": "sgd", "lr": 0.1})
    with Log(tmp_path, Accelerator(cpu=True), recipe, console=console) as log:
        log.start(0, 10, [])
        for done in (1, 2, 3):
            now[0] += 60.0
            log.steps([], epoch=0, done=done, speed=1.0)
        assert log._progress.tasks[0].time_remaining == pytest.approx(7 * 60, abs=1)


@pytest.mark.parametrize(("system", "expected"), [("linux", 3 * 1024), ("darwin", 3)])
def test_memory_is_in_bytes_on_every_system(system: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("sys.platform", system)
    monkeypatch.setattr("resource.getrusage", lambda _: SimpleNamespace(ru_maxrss=3))
    assert memory() == expected


@pytest.mark.parametrize(
    ("loss", "accuracy", "expected"),
    [
        (1.25, 0.5, "accuracy 25.0%, validation 1.2500 and 50.0%, 1,000 images/s"),
        (None, 0.5, "accuracy 25.0%, validation no finite loss and 50.0%, 1,000 images/s"),
        (None, None, "accuracy 25.0%, 1,000 images/s"),
    ],
)
def test_an_epoch_is_told_whatever_its_validation_measured(
    loss: float | None, accuracy: float | None, expected: str
) -> None:
    row = {"epoch": 2, "train_loss": 1.5, "train_accuracy": 0.25, "images_per_second": 1000.0}
    row |= {"validation_loss": loss, "validation_accuracy": accuracy}
    assert sentence(row) == f"epoch 3: loss 1.5000, {expected}"
