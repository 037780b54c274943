"""How torch computes while a training runs, and that it is put back."""

import pytest
import torch

from spatially.train.recipe import Recipe
from spatially.train.settle import settled


@pytest.mark.parametrize("deterministic", [True, False])
def test_deterministic_where_it_is_asked_for_and_as_before_afterwards(deterministic: bool) -> None:
    recipe = Recipe(
        name="x", epochs=1, batch=2, optimiser={"name": "sgd", "lr": 0.1}, run={"deterministic": deterministic}
    )
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    with settled(recipe):
        assert torch.are_deterministic_algorithms_enabled() is deterministic
        assert torch.backends.cudnn.benchmark is not deterministic
    assert (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark) == before
