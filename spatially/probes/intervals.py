r"""95 % intervals: at a fixed number of images, and valid at any stopping time.

Images count as independent draws from the population they stand for.

* :func:`wilson`: a share, at a fixed number of images.
* :func:`student`: a mean, at a fixed number.
* :func:`anytime`: a mean of values in 0..1, at any stopping time. For the sum S of n values the process
  :math:`M_n(p) = \int q^{S}(1-q)^{n-S}\,\mathrm d\mathrm{Beta}_{1/2,1/2}(q) \,/\, p^{S}(1-p)^{n-S}` is a martingale when
  the values are 0 or 1 with mean p, and, since :math:`x \mapsto a^x` is convex, a supermartingale for any values in 0..1.
  By Ville's inequality :math:`\{p : M_n(p) < 1/\alpha\}` holds the mean for all n at once with probability 1 − α.
* :func:`difference`: the difference of two shares of the same images.
* :func:`lost_share`: one minus a ratio of two paired means, by Fieller's theorem.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special, stats

Array = NDArray[np.float64]
LEVEL = 0.95


class Interval(NamedTuple):
    """Lower and upper ends, arrays of one shape."""

    low: Array
    high: Array


def wilson(successes: ArrayLike, count: ArrayLike, *, level: float = LEVEL) -> Interval:
    """Wilson's score interval for a share.

    >>> low, high = wilson(8, 10)
    >>> print(f"{low:.4f} {high:.4f}")
    0.4902 0.9433
    """
    successes, count = np.asarray(successes, float), np.asarray(count, float)
    quantile = special.ndtri(0.5 + level / 2)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = successes / count
        centre = (share + quantile**2 / (2 * count)) / (1 + quantile**2 / count)
        spread = share * (1 - share) / count + quantile**2 / (4 * count**2)
        half = quantile / (1 + quantile**2 / count) * np.sqrt(spread)
    # At a share of 0 or 1 rounding would leave the end a hair inside the estimate.
    return Interval(np.clip(np.minimum(centre - half, share), 0, 1), np.clip(np.maximum(centre + half, share), 0, 1))


def student(
    mean: ArrayLike,
    deviation: ArrayLike,
    count: ArrayLike,
    *,
    level: float = LEVEL,
    within: tuple[float, float] = (0.0, 1.0),
) -> Interval:
    """Student's interval for the mean of values that lie ``within`` two ends; undefined (NaN) for fewer than two values."""
    mean, deviation, count = (np.asarray(value, float) for value in (mean, deviation, count))
    freedom = np.where(count > 1, count - 1, np.nan)
    half = special.stdtrit(freedom, 0.5 + level / 2) * deviation / np.sqrt(np.maximum(count, 1))
    return Interval(np.clip(mean - half, *within), np.clip(mean + half, *within))


def difference(before: ArrayLike, after: ArrayLike, *, level: float = LEVEL) -> Interval:
    """For ``mean(before) − mean(after)`` of outcomes 0 or 1 of the same images, along the first axis.

    Wald's interval with half an image added to each of the four pairs of outcomes (Agresti and Min 2005), so that what was
    never seen to change is not held to be unchangeable.

    >>> low, high = difference([1] * 8 + [0] * 2, [1] * 5 + [0] * 5)
    >>> print(f"{low:.3f} {high:.3f}")
    -0.044 0.544
    """
    lost = np.asarray(before, float) - np.asarray(after, float)
    count = len(lost) + 2
    mean, square = lost.sum(axis=0) / count, ((lost**2).sum(axis=0) + 1) / count
    half = special.ndtri(0.5 + level / 2) * np.sqrt((square - mean**2) / count)
    estimate = lost.mean(axis=0)
    return Interval(
        np.clip(np.minimum(mean - half, estimate), -1, 1), np.clip(np.maximum(mean + half, estimate), -1, 1)
    )


def anytime(total: ArrayLike, count: ArrayLike, *, level: float = LEVEL) -> Interval:
    """The interval for the mean of values in 0..1 that holds at every number of images at once.

    >>> low, high = anytime(80, 100)
    >>> print(f"{low:.3f} {high:.3f}")
    0.648 0.909
    """
    total, count = np.broadcast_arrays(np.asarray(total, float), np.asarray(count, float))
    mean = np.divide(total, count, out=np.full(total.shape, 0.5), where=count > 0)
    evidence = special.betaln(total + 0.5, count - total + 0.5) - special.betaln(0.5, 0.5)

    def excluded(p: Array) -> NDArray[np.bool_]:
        likelihood = special.xlogy(total, p) + special.xlog1py(count - total, -p)
        return evidence - likelihood >= -np.log1p(-level)

    return Interval(_boundary(excluded, np.zeros_like(mean), mean), _boundary(excluded, np.ones_like(mean), mean))


def _boundary(excluded, outside: Array, inside: Array) -> Array:  # type: ignore[no-untyped-def]
    """By bisection, the outermost point that is not excluded; ``outside`` itself if it is not."""
    end, keep = outside.copy(), ~excluded(outside)
    outer, inner = outside.copy(), inside.copy()
    for _ in range(52):
        middle = (outer + inner) / 2
        out = excluded(middle)
        outer, inner = np.where(out, middle, outer), np.where(out, inner, middle)
    return np.where(keep, end, outer)


def lost_share(after: Array, before: Array, chance: float, *, level: float = LEVEL) -> tuple[float, float, float]:
    """``1 − (mean(after) − chance) / (mean(before) − chance)`` for values in 0..1 paired by image, and its interval.

    The interval is Fieller's, with half an image added in each corner of the unit square (Agresti and Min 2005), so that
    what was never seen to change is not held to be unchangeable. Cut to 0..1; NaN when ``before`` is not above chance.
    """
    count = len(before)
    if count == 0 or before.mean() <= chance:
        return np.nan, np.nan, np.nan
    estimate = float(np.clip(1 - (after.mean() - chance) / (before.mean() - chance), 0, 1))
    upper = np.concatenate([after, [0, 0, 1, 1]]) - chance
    lower = np.concatenate([before, [0, 1, 0, 1]]) - chance
    weights = np.concatenate([np.ones(count), np.full(4, 0.5)])
    kept = _fieller(upper, lower, weights, quantile=float(stats.t.ppf(0.5 + level / 2, count + 1)))
    low, high = np.clip(1 - kept[1], 0, 1), np.clip(1 - kept[0], 0, 1)
    return estimate, float(min(low, estimate)), float(max(high, estimate))


def _fieller(upper: Array, lower: Array, weights: Array, *, quantile: float) -> tuple[float, float]:
    """All ratios r with (ū − r·l̄)² ≤ q²·var(u − r·l)/n: a quadratic inequality; everything if l̄ may be 0."""
    count = weights.sum()
    means = np.average(upper, weights=weights), np.average(lower, weights=weights)
    covariance = np.cov(upper, lower, aweights=weights) * quantile**2 / count
    square = means[1] ** 2 - covariance[1, 1]
    linear = means[0] * means[1] - covariance[0, 1]
    constant = means[0] ** 2 - covariance[0, 0]
    if square <= 0:
        return -np.inf, np.inf
    root = np.sqrt(max(linear**2 - square * constant, 0.0))
    return (linear - root) / square, (linear + root) / square
