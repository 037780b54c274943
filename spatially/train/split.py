"""Training, validation and test images of a set that has no split, drawn by a seed within every class.

The images of a class are put in an order drawn by (seed, image number); the one at place r of n goes where (r + ½) / n falls
among the shares. A class that this leaves without training or validation images gets one of each nevertheless, as far as it
has two: first training, then validation, then test images. So each class is cut alike, and no draw depends on another class.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from spatially import randomness

Indices = NDArray[np.int64]


def split_rows(
    labels: Sequence[int] | NDArray[np.integer], fractions: tuple[float, float, float], seed: int
) -> tuple[Indices, Indices, Indices]:
    """The numbers of the training, validation and test images, each rising.

    >>> train, validation, test = split_rows([0] * 20 + [1] * 20, (0.7, 0.15, 0.15), seed=0)
    >>> len(train), len(validation), len(test)
    (28, 6, 6)
    """
    classes = np.asarray(labels, dtype=np.int64)
    bits = randomness.image_bits(randomness.stream(seed, "split"), torch.arange(len(classes))).numpy()
    order = np.lexsort((bits, classes))
    counts = np.bincount(classes)
    first = np.cumsum(counts) - counts
    rank = np.empty(len(classes), np.int64)
    rank[order] = np.arange(len(classes)) - first[classes[order]]
    place = (rank + 0.5) / counts[classes]
    ends = np.cumsum(fractions)
    trained = np.bincount(classes[place < ends[0]], minlength=len(counts))
    trained = trained.clip(1, np.maximum(counts - 1, 1))
    seen = np.bincount(classes[place < ends[1]], minlength=len(counts)) if fractions[2] else counts
    seen = np.maximum(seen, trained + 1)
    part = (rank >= trained[classes]).astype(int) + (rank >= seen[classes])
    train, validation, test = (np.flatnonzero(part == one) for one in range(3))
    return train, validation, test
