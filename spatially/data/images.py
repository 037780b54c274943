"""A labelled set of crops, decoded once: what every probe is run on."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spatially import randomness
from spatially.data.resident import pixels_on, sent


@dataclass(frozen=True)
class Skipped:
    """An image that could not be read, and why."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class Images:
    """Crops of one size with their labels, in memory or memory-mapped.

    ``index`` numbers the images within their source; it fixes their random draws and names them in results, and does not
    change with ``limit`` or with images that were skipped.
    """

    pixels: NDArray[np.uint8]  # (N, 3, H, W)
    labels: NDArray[np.int64]
    index: NDArray[np.int64]
    description: str
    fingerprint: str
    classes: tuple[str, ...] | None = None
    skipped: tuple[Skipped, ...] = ()
    bag_accuracy: float | None = None
    naming: Callable[[int], str] | None = None  # from an image's number to its file, relative to the folder

    def __len__(self) -> int:
        return len(self.labels)

    def __repr__(self) -> str:
        return f"Images({self.description}: {len(self)} of {self.size[0]}×{self.size[1]}, {len(self.skipped)} skipped)"

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.pixels.shape[2], self.pixels.shape[3]

    def batch(self, rows: NDArray[np.int64], device: torch.device | str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        """Pixels as bytes ``(B, 3, H, W)``, labels and index of the given rows, on a device."""
        device = torch.device(device)
        pixels = pixels_on(self, rows, device) if device.type == "cuda" else sent(self.pixels[rows], device)
        return pixels, sent(self.labels[rows], device), sent(self.index[rows], device)

    def names(self, rows: NDArray[np.int64]) -> list[str] | None:
        """The files of the given rows as "class/image.jpg"; nothing where images do not come from files."""
        return None if self.naming is None else [self.naming(int(number)) for number in self.index[rows]]

    def order(self, seed: int) -> NDArray[np.int64]:
        """Rows in an order drawn by the seed, so that the first so many are a fair sample of all."""
        bits = randomness.image_bits(randomness.stream(seed, "visit"), torch.from_numpy(self.index))
        return bits.argsort(stable=True).numpy()

    def describe(self) -> dict[str, Any]:
        """Facts for a result's attributes."""
        facts: dict[str, Any] = {
            "data": self.description,
            "data_fingerprint": self.fingerprint,
            "images": len(self),
            "skipped": len(self.skipped),
            "skipped_names": json.dumps([f"{one.name}: {one.reason}" for one in self.skipped]),
            "class_names": json.dumps(list(self.classes or ()), ensure_ascii=False),
        }
        if self.bag_accuracy is not None:
            facts["bag_accuracy"] = self.bag_accuracy
        return facts
