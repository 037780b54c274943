"""Weights from elsewhere: what all families' checkpoint filters do first."""

from collections.abc import Mapping
from math import isqrt
from typing import Any

from torch import Tensor

from spatially.errors import UserError

StateDict = dict[str, Tensor]
Grid = tuple[int, int]


def unwrap(checkpoint: Mapping[str, Any]) -> StateDict:
    """The weights by name in a training checkpoint, without the prefix that training on several devices leaves.

    >>> unwrap({"epoch": 3, "model": {"module.head.bias": 0}})
    {'head.bias': 0}
    """
    for wrapper in ("model", "state_dict"):
        if isinstance(inner := checkpoint.get(wrapper), Mapping):
            checkpoint = inner
    return {name.removeprefix("module."): value for name, value in checkpoint.items()}


def source_grid(count: int, grid: Grid) -> Grid | None:
    """The grid that `count` positions in a row come from, given the model's; None where there is no telling.

    Weights do not say which grid they are of. A count that only the model's own grid has is taken for that grid's. One
    that a square has as well is taken for the square's, as timm does: weights to start from are mostly of square images.
    A rectangle lying the other way round cannot be told from the model's own. A model's own weights need none of this:
    `load_state_dict` and `spatially.load` take what fits as it is.

    >>> source_grid(36, (6, 6)), source_grid(36, (4, 9)), source_grid(24, (4, 6)), source_grid(24, (5, 5))
    ((6, 6), (6, 6), (4, 6), None)
    """
    side = isqrt(count)
    if side**2 == count:
        return side, side
    return grid if grid[0] * grid[1] == count else None


def token_grid(tokens: int, grid: Grid, *, prefix: int) -> tuple[int, Grid]:
    """How many of so many positions belong to prefix tokens, all `prefix` or none, and the grid of the others.

    The model's own number of patches decides where it fits, then whichever leaves a square; with the prefix first.

    >>> token_grid(25, (4, 6), prefix=1), token_grid(25, (7, 7), prefix=1), token_grid(24, (4, 6), prefix=1)
    ((1, (4, 6)), (0, (5, 5)), (0, (4, 6)))
    """
    found = [(before, source_grid(tokens - before, grid)) for before in (prefix, 0) if tokens > before]
    fitting = [(before, source) for before, source in found if tokens - before == grid[0] * grid[1]]
    for before, source in fitting + found:
        if source is not None:
            return before, source
    raise UserError(
        f"{tokens} positions are neither of the model's grid {grid} nor of a square one: "
        "build the model with the img_size of the weights"
    )
