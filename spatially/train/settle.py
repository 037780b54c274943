"""How torch computes while a training runs: deterministic where the recipe asks, fast otherwise; put back afterwards."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from spatially.train.recipe import Recipe


@contextmanager
def settled(recipe: Recipe) -> Iterator[None]:
    """Deterministic algorithms only, or the convolutions that prove fastest for the batch's size."""
    before = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    if recipe.run.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it when it is first used
        torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = not recipe.run.deterministic
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.backends.cudnn.benchmark = before[1]
