"""A GPU that is one chunk ahead of the numbers that are read from it.

Everything a probe asks of a GPU is queued there; who waits for a chunk's numbers before the next chunk is queued leaves the
GPU idle meanwhile. So a measurer may return, instead of a chunk's outcomes, what waits for them: `read` makes it, and
`in_turn` begins the next chunk before it waits for the last. On a CPU, where nothing is queued, every chunk is finished
before the next one is begun.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

Waiting = Callable[[], xr.Dataset]
Outcomes = xr.Dataset | Waiting  # of a chunk: there, or to be waited for


def read(numbers: Tensor, finish: Callable[[NDArray[Any]], xr.Dataset]) -> Outcomes:
    """What ``finish`` makes of the numbers as an array. From a GPU they are on their way at once, behind nothing that is
    queued later.

    >>> float(settled(read(torch.ones(2), lambda array: xr.Dataset({"sum": array.sum()})))["sum"])
    2.0
    """
    if not numbers.is_cuda:
        return finish(numbers.numpy())
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    arrived = torch.cuda.current_stream(numbers.device).record_event()

    def wait() -> xr.Dataset:
        arrived.synchronize()
        return finish(host.numpy())

    return wait


def settled(outcomes: Outcomes) -> xr.Dataset:
    """The outcomes, waited for if need be."""
    return outcomes if isinstance(outcomes, xr.Dataset) else outcomes()


def in_turn(
    measure: Callable[[NDArray[np.int64]], Outcomes], chunks: Iterable[NDArray[np.int64]]
) -> Iterator[xr.Dataset]:
    """The outcomes of the chunks, in their order."""
    waiting: Waiting | None = None
    for rows in chunks:
        begun = measure(rows)
        if waiting is not None:
            yield waiting()
            waiting = None
        if isinstance(begun, xr.Dataset):
            yield begun
        else:
            waiting = begun
    if waiting is not None:
        yield waiting()
