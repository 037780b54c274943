"""What a training step is given, and what gives it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from spatially.subject.preprocessing import Preprocessing


@dataclass(frozen=True, eq=False)
class Batch:
    """Normalised images ``(B, 3, H, W)``, soft targets ``(B, classes)`` and labels ``(B,)``, on the device."""

    images: Tensor
    targets: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def chunks(self, count: int) -> list[Batch]:
        """Cut into ``count`` parts, for gradients that are accumulated."""
        parts = zip(*(one.chunk(count) for one in (self.images, self.targets, self.labels)), strict=True)
        return [Batch(*part) for part in parts]


class TrainingData(Protocol):
    """One process's share of a stream of batches, each a pure function of (seed, epoch, step).

    ``fingerprint`` tells its images from others when a training goes on; empty where nothing is known of them.
    """

    classes: tuple[str, ...]
    size: tuple[int, int]
    steps_per_epoch: int
    images_per_epoch: int
    fingerprint: str

    def batches(self, epoch: int, *, first_step: int = 0) -> Iterator[Batch]: ...


class ValidationData(Protocol):
    """Images that are each seen exactly once over all processes; ``preprocessing`` says how they were cropped."""

    classes: tuple[str, ...]
    preprocessing: Preprocessing

    def __len__(self) -> int: ...
    def batches(self) -> Iterator[tuple[Tensor, Tensor]]: ...
