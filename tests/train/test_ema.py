"""The average of the weights against timm's own and the formula."""

import copy
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import torch
from timm.utils import ModelEmaV3

from spatially.train.step import training_step

tiny = SimpleNamespace(**run_path(str(Path(__file__).parent / "tiny.py")))


def test_average_is_timms_and_the_formula() -> None:
    recipe = tiny.recipe(**{"run.precision": "fp64"})
    step = training_step(tiny.network(norm=True), recipe)
    theirs = ModelEmaV3(copy.deepcopy(step.model), decay=0.9)
    weight = step.model.head.weight
    by_hand = weight.detach().clone()
    for number, batch in enumerate(tiny.TinyData().batches(0), start=1):
        step(batch)
        theirs.update(step.model, step=number)
        # timm takes the first over as it is
        by_hand = weight.detach().clone() if number == 1 else 0.9 * by_hand + 0.1 * weight.detach()
    assert step.average is not None
    torch.testing.assert_close(step.average.module.head.weight, by_hand, rtol=1e-12, atol=0)
    for found, expected in zip(
        step.average.module.state_dict().values(), theirs.module.state_dict().values(), strict=True
    ):
        assert torch.equal(found, expected)


def test_none_without_a_decay() -> None:
    assert training_step(tiny.network(), tiny.recipe(**{"regularisation.ema": None})).average is None
