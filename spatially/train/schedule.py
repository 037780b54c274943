"""How the learning rate goes, by timm's schedulers: a pure function of the number of optimiser steps done before.

Cosine, over T steps without the warm-up, from the rate r to the least rate m:

.. math:: r_t = m + (r - m) (1 + \\cos(\\pi t / T)) / 2;

steps: r · factor^(milestones passed); a warm-up of w steps rises on a line from its own first rate to r.
"""

from timm.scheduler import CosineLRScheduler, MultiStepLRScheduler
from timm.scheduler.scheduler import Scheduler
from torch.optim import Optimizer

from spatially.train.recipe import Recipe


class Schedule:
    """Sets the rate of an optimiser before each of its steps."""

    def __init__(self, optimiser: Optimizer, recipe: Recipe, steps_per_epoch: int) -> None:
        self.steps_per_epoch = steps_per_epoch
        self.by_epoch = recipe.schedule.every == "epoch"
        self.timm: Scheduler = _scheduler(optimiser, recipe, 1 if self.by_epoch else steps_per_epoch)
        self.optimiser = optimiser

    def set(self, step: int) -> float:
        """Set the rate for the step that comes after `step` others, and return it."""
        if self.by_epoch:
            self.timm.step(step // self.steps_per_epoch)
        else:
            self.timm.step_update(step)
        return float(self.optimiser.param_groups[0]["lr"])


def _scheduler(optimiser: Optimizer, recipe: Recipe, unit: int) -> Scheduler:
    """`unit`: how often the rate changes in an epoch."""
    wanted = recipe.schedule
    common = {
        "warmup_t": wanted.warmup_epochs * unit,
        "warmup_lr_init": wanted.warmup_lr,
        "warmup_prefix": wanted.warmup_before,
        "t_in_epochs": wanted.every == "epoch",
    }
    # One change of the rate alone is no cosine: timm would say so on the terminal, and keep the rate as below.
    if wanted.name == "cosine" and recipe.epochs * unit > 1:
        least = min(wanted.min_lr, recipe.learning_rate)  # which a small batch may bring below it
        return CosineLRScheduler(optimiser, t_initial=recipe.epochs * unit, lr_min=least, **common)
    # timm lowers the rate one step before a milestone; "after 40 epochs" means the step after
    milestones = [milestone * unit + 1 for milestone in wanted.milestones]
    return MultiStepLRScheduler(optimiser, decay_t=milestones, decay_rate=wanted.factor, **common)
