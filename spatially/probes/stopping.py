"""Stop each point of a sweep as soon as its accuracy is known well enough.

The images are visited in an order drawn by the seed, so the first chunks are a fair sample; the interval is valid at any
stopping time (:func:`spatially.probes.intervals.anytime`), so looking after every chunk costs no confidence. Where a point
stops depends on the chunks before it alone: the result is the same for one process or many.
"""

from numbers import Real

import numpy as np
from numpy.typing import NDArray

from spatially.errors import UserError
from spatially.probes.intervals import anytime


class Stopping:
    """Counts of right answers for an array of points, and which points need no more images."""

    def __init__(self, precision: float, shape: tuple[int, ...]) -> None:
        self.precision = precision
        self.right = np.zeros(shape)
        self.count = np.zeros(shape)

    @property
    def stopped(self) -> NDArray[np.bool_]:
        """Points whose interval is at most ``precision`` to either side of its middle."""
        low, high = anytime(self.right, self.count)
        return (self.count > 0) & (high - low <= 2 * self.precision)

    def update(self, correct: NDArray[np.float64]) -> None:
        """Take in the outcomes of a chunk, ``(image, *shape)``, NaN where a point was not measured.

        Outcomes of a point that had stopped before the chunk do not count.
        """
        fresh = ~np.isnan(correct) & ~self.stopped
        self.right += np.where(fresh, correct, 0).sum(axis=0)
        self.count += fresh.sum(axis=0)


def check_precision(precision: float | None) -> float | None:
    """A half-width of an interval, or nothing."""
    if precision is not None and not (isinstance(precision, Real) and 0 < precision < 0.5):
        raise UserError(f"precision must lie between 0 and 0.5 (the interval's half-width), but came as {precision!r}")
    return precision
