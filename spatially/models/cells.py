r"""Images cut into cells, the mean cell of each class at each place, and the correlation of cells.

The correlation of two cells x and w of n values each (all pixels and colours of a cell together) is

.. math:: r(x, w) = \frac{n \sum x w - \sum x \sum w}
          {\sqrt{(n \sum x^2 - (\sum x)^2)\,(n \sum w^2 - (\sum w)^2)}}.

It does not change with brightness or contrast. For pixel levels 0 … 255 every sum in it is a whole number below 2⁵³ (up
to cells of 350 × 350 pixels), so float64 holds it exactly and no order of summation, batch or device changes a bit.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from spatially.errors import UserError

INFORMATIVE = 0.1  # a cell tells classes apart when their means differ at least so much, of the place where most


def cut(images: Tensor, cell: int) -> Tensor:
    """The whole cells of images ``(B, C, H, W)``: ``(B, rows, columns, C, cell, cell)``; a remainder strip is left out.

    >>> cut(torch.zeros(2, 3, 64, 70), 16).shape
    torch.Size([2, 4, 4, 3, 16, 16])
    """
    return images.unfold(2, cell, cell).unfold(3, cell, cell).permute(0, 2, 3, 1, 4, 5)


def correlation(cells: Tensor, words: Tensor) -> Tensor:
    """Every cell ``(…, M, n)`` with every word ``(…, K, n)``: ``(…, M, K)``, 0 where one of the two is constant."""
    count = cells.shape[-1]

    def spread(values: Tensor) -> Tensor:
        return count * (values * values).sum(-1) - values.sum(-1) ** 2

    together = count * (cells @ words.mT) - cells.sum(-1)[..., :, None] * words.sum(-1)[..., None, :]
    return together / (spread(cells)[..., :, None] * spread(words)[..., None, :]).clamp(min=1.0).sqrt()


@dataclass(frozen=True)
class ClassMeans:
    """The one statistic that both calibrators are fitted from."""

    cells: Tensor
    """The mean images, cut: uint8 ``(classes, rows, columns, 3, cell, cell)``."""
    informative: Tensor
    """Where the classes' means differ: bool ``(rows, columns)``."""


def class_means(images: Tensor, labels: Tensor, *, cell: int) -> ClassMeans:
    """The mean image of each class, rounded to whole levels and cut into cells."""
    if images.ndim != 4 or images.shape[1] != 3 or images.dtype != torch.uint8:
        raise UserError(f"images must be uint8 (N, 3, H, W): got {images.dtype} {tuple(images.shape)}")
    if labels.shape != images.shape[:1] or labels.is_floating_point():
        raise UserError(f"labels must be {len(images)} whole numbers: got {labels.dtype} {tuple(labels.shape)}")
    if not isinstance(cell, int) or not 1 <= cell <= min(images.shape[2:]):
        raise UserError(f"the cell's side must be 1 to {min(images.shape[2:])} pixels, the image's: got {cell!r}")
    counts = torch.bincount(labels.to(torch.int64)).tolist() if len(labels) else []
    if len(counts) < 2 or min(counts) == 0:
        raise UserError(f"labels must be 0 … classes − 1, each at least once, two or more classes: counts are {counts}")
    means = [
        (2 * images[labels == label].sum(0, dtype=torch.int64) + count) // (2 * count)
        for label, count in enumerate(counts)
    ]
    cells = cut(torch.stack(means), cell)
    difference = (cells.double() - cells.double().mean(0)).square().mean((0, 3, 4, 5))
    informative = (difference > 0) & (difference >= INFORMATIVE * difference.max())
    if not informative.any():
        raise UserError("images have the same mean in every class: there is nothing to fit")
    return ClassMeans(cells=cells.to(torch.uint8).contiguous(), informative=informative)
