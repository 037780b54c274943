"""The learning rate against closed forms and timm's own schedulers."""

import math
from typing import Any

import pytest
import torch
from timm.scheduler import create_scheduler_v2

from spatially.train.library import read_recipe
from spatially.train.recipe import Recipe
from spatially.train.schedule import Schedule

STEPS = 7


def rates(steps: int = STEPS, **schedule: Any) -> list[float]:
    recipe = Recipe(name="x", epochs=6, batch=8, optimiser={"name": "sgd", "lr": 0.4}, schedule=schedule)
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    made = Schedule(optimiser, recipe, steps)
    return [made.set(step) for step in range(recipe.total_epochs * steps)]


def test_cosine_with_warmup_is_the_closed_form() -> None:
    found = rates(name="cosine", warmup_epochs=2, warmup_lr=0.01, min_lr=0.03)
    for step, rate in enumerate(found):
        if step < 2 * STEPS:
            expected = 0.01 + (0.4 - 0.01) * step / (2 * STEPS)
        else:
            expected = 0.03 + (0.4 - 0.03) * (1 + math.cos(math.pi * step / (6 * STEPS))) / 2
        assert rate == pytest.approx(expected, abs=1e-12)


def test_warmup_before_the_epochs_moves_the_cosine() -> None:
    found = rates(name="cosine", warmup_epochs=2, warmup_lr=0.0, warmup_before=True)
    assert len(found) == 8 * STEPS
    assert found[2 * STEPS :] == pytest.approx(
        [0.2 * (1 + math.cos(math.pi * step / (6 * STEPS))) for step in range(6 * STEPS)], abs=1e-12
    )


@pytest.mark.parametrize("every", ["step", "epoch"])
def test_rate_drops_after_the_milestones_and_not_before(every: str) -> None:
    found = rates(name="step", milestones=[3, 5], every=every)
    expected = [0.4 * 0.1 ** ((step >= 3 * STEPS) + (step >= 5 * STEPS)) for step in range(6 * STEPS)]
    assert found == pytest.approx(expected, rel=1e-12)


def test_constant_rate() -> None:
    assert set(rates(name="constant")) == {0.4}


@pytest.mark.parametrize("every", ["step", "epoch"])
def test_the_same_as_the_schedule_of_timms_training_script(every: str) -> None:
    found = rates(name="cosine", warmup_epochs=2, warmup_lr=1e-6, min_lr=1e-5, every=every)
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    scheduler, _ = create_scheduler_v2(
        optimiser,
        sched="cosine",
        num_epochs=6,
        min_lr=1e-5,
        warmup_lr=1e-6,
        warmup_epochs=2,
        step_on_epochs=every == "epoch",
        updates_per_epoch=STEPS,
    )
    expected = []
    for epoch in range(6):
        for step in range(STEPS):
            expected.append(optimiser.param_groups[0]["lr"])
            scheduler.step_update(num_updates=epoch * STEPS + step + 1)
        scheduler.step(epoch + 1)
    assert found == expected


def test_a_cosine_of_one_change_is_the_rate_itself_and_nothing_is_said_of_it(caplog: pytest.LogCaptureFixture) -> None:
    recipe = Recipe(
        name="x", epochs=1, batch=8, optimiser={"name": "sgd", "lr": 0.4}, schedule={"every": "epoch", "min_lr": 0.1}
    )
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.4)
    made = Schedule(optimiser, recipe, STEPS)
    assert [made.set(step) for step in range(STEPS)] == [0.4] * STEPS
    assert not caplog.records


def test_a_rate_that_a_small_batch_brings_below_the_least_one_does_not_rise() -> None:
    recipe = read_recipe("deit").within(6).override({"batch": 8, "schedule.warmup_epochs": 0})
    assert recipe.learning_rate < recipe.schedule.min_lr
    optimiser = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=recipe.learning_rate)
    made = Schedule(optimiser, recipe, STEPS)
    assert [made.set(step) for step in range(6 * STEPS)] == pytest.approx([recipe.learning_rate] * 6 * STEPS)
