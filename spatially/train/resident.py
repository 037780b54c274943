"""Small sets held on the device as bytes, batches made there; and validation images, cropped once.

On a GPU the making of a batch is captured once as a CUDA graph and replayed for each step on a stream of its own: one launch
instead of some hundreds, beside the training step before. Nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spatially.subject.preprocessing import Preprocessing
from spatially.train.augment import Augment, Finish
from spatially.train.augment.mix import mixing
from spatially.train.batch import Batch
from spatially.train.order import Order
from spatially.train.stored import Stored

_PIECE = 4096

Made = tuple[Tensor, Tensor, Tensor]
Make = Callable[[Tensor, Tensor, Tensor, Tensor], Made]


def onto(pixels: NDArray[np.uint8], device: torch.device) -> Tensor:
    """A copy on the device, made piece by piece: the pixels may be a file's."""
    held = torch.empty(pixels.shape, dtype=torch.uint8, device=device)
    for first in range(0, len(pixels), _PIECE):
        held[first : first + _PIECE] = torch.from_numpy(np.array(pixels[first : first + _PIECE])).to(device)
    return held


class ResidentTraining:
    """Batches made on the device from images that lie there."""

    resident = True

    def __init__(
        self,
        stored: Stored,
        augment: Augment,
        finish: Finish,
        order: Order,
        *,
        classes: tuple[str, ...],
        device: torch.device,
        graph: bool | None = None,
    ) -> None:
        self.classes, self.size = classes, augment.size
        self.steps_per_epoch, self.images_per_epoch = order.steps, order.steps * order.batch
        self.fingerprint = ""
        self._order, self._augment, self._finish, self._device = order, augment, finish, device
        self._pixels = onto(stored.pixels, device)
        self._labels = torch.from_numpy(stored.labels).to(device)
        self._original = torch.from_numpy(stored.original.astype(np.float64)).to(device)
        self._graph = device.type == "cuda" if graph is None else graph
        self._captured: Captured | None = None
        self._erased = 4 if finish.augmentation.erase else 0

    def plan(self, rows: Tensor, state: Tensor) -> Tensor:
        """What is done to the images of an epoch, float64 ``(steps, share, …)``."""
        flat, stored = state.flatten(), (self._pixels.shape[2], self._pixels.shape[3])
        crops = self._augment.plan(flat, self._original[rows.flatten()], stored)
        return torch.cat([crops, self._finish.plan(flat, self.size)], dim=1).unflatten(0, state.shape)

    def make(self, rows: Tensor, state: Tensor, plan: Tensor, row: Tensor) -> Made:
        """Images, targets and labels of these rows."""
        pixels, labels = self._pixels.index_select(0, rows), self._labels.index_select(0, rows)
        crops, erased = plan.split([plan.shape[1] - self._erased, self._erased], dim=1)
        return *self._finish(self._augment(pixels, crops), labels, state, erased, row), labels

    def batches(self, epoch: int, *, first_step: int = 0) -> Iterator[Batch]:
        """This process's share of the batches of an epoch, from a step on."""
        rows, state = self._order.epoch(epoch, self._device)
        table = mixing(self._order.seed, epoch, self.steps_per_epoch, self.size, self._finish.augmentation)
        tables = rows, state, self.plan(rows, state), table.to(self._device)
        steps = range(first_step, self.steps_per_epoch)
        if not self._graph:
            for step in steps:
                yield Batch(*self.make(*(table[step] for table in tables)))
            return
        if self._captured is None:
            self._captured = Captured(self.make, *(table[0] for table in tables))
        yield from self._captured.batches(tables, steps)


class Captured:
    """A function of tensors of fixed shape as a CUDA graph, replayed on a stream of its own, one step ahead."""

    def __init__(self, make: Make, *example: Tensor) -> None:
        self._inputs = [one.clone() for one in example]
        self._stream = torch.cuda.Stream(example[0].device)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.no_grad():
            for _ in range(3):  # libraries make their work space, tables are cached
                make(*self._inputs)
        self._stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        # Other threads, such as NCCL's watchdog, go on using the GPU while this one captures.
        with torch.no_grad(), torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            self._outputs = make(*self._inputs)

    def _start(self, inputs: tuple[Tensor, ...]) -> tuple[Made, torch.cuda.Event]:
        with torch.cuda.stream(self._stream):
            for held, given in zip(self._inputs, inputs, strict=True):
                held.copy_(given)
            self._graph.replay()
            images, targets, labels = (one.clone() for one in self._outputs)
            made = torch.cuda.Event()
            made.record(self._stream)
        return (images, targets, labels), made

    def batches(self, tables: tuple[Tensor, ...], steps: range) -> Iterator[Batch]:
        """The batches of some steps, each begun while the one before is in use."""
        self._stream.wait_stream(torch.cuda.current_stream())
        for table in tables:
            table.record_stream(self._stream)
        ahead = self._start(tuple(table[steps[0]] for table in tables)) if steps else None
        for step in steps:
            assert ahead is not None
            made, event = ahead
            ahead = self._start(tuple(table[step + 1] for table in tables)) if step + 1 < steps.stop else None
            current = torch.cuda.current_stream()
            current.wait_event(event)
            for one in made:
                one.record_stream(current)
            yield Batch(*made)


class Crops:
    """Validation images, cropped once: each is seen exactly once by one of the processes."""

    def __init__(
        self,
        stored: Stored,
        finish: Finish,
        preprocessing: Preprocessing,
        *,
        classes: tuple[str, ...],
        batch: int,
        device: torch.device,
        rank: int = 0,
        world: int = 1,
        resident: bool = True,
    ) -> None:
        self.classes, self.preprocessing = classes, preprocessing
        self.labels: NDArray[np.int64] = stored.labels
        self._finish, self._batch, self._device = finish, batch, device
        self._rows = np.arange(rank, len(stored), world)
        self._pixels: Any = stored.pixels
        if resident:
            self._pixels = onto(stored.pixels[rank::world], device)
        self._resident = resident

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Normalised images and labels of this process."""
        for first in range(0, len(self._rows), self._batch):
            rows = self._rows[first : first + self._batch]
            if self._resident:
                pixels = self._pixels[first : first + self._batch]
            else:
                pixels = torch.from_numpy(np.ascontiguousarray(self._pixels[rows]))
                if self._device.type == "cuda":
                    pixels = pixels.pin_memory()
                pixels = pixels.to(self._device, non_blocking=True)
            labels = torch.from_numpy(self.labels[rows]).to(self._device)
            yield self._finish.normalise(pixels.float()), labels
