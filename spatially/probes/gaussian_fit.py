r"""How far a map is a two-dimensional Gaussian, and how wide (Kim et al., section 3.2, table 1).

.. math:: g(x, y) = a \exp\left(-\frac{(x - x_c)^2}{2σ_x^2} - \frac{(y - y_c)^2}{2σ_y^2}\right), \qquad
          R^2 = 1 - \frac{\operatorname{var}(\text{map} - g)}{\operatorname{var}(\text{map})},

fitted by least squares with a ≥ 0, the centre inside the grid and σ ≥ 1e-6, from the map's own moments and from its highest
value on, of which the best counts. The map's minimum is subtracted first. What remains of a constant is treated in one of
three ways:

* ``baseline="free"``: the fit maximises R², which a constant does not change, as it does not change attention when it is
  added to all logits. A noiseless Gaussian reads R² = 1 and its own σ, however wide it is.
* ``baseline="minimum"``: the minimum counts as 0, as in the paper. A Gaussian whose tails the grid cuts off then reads too
  narrow: σ = 5 on 14×14 patches as 4.33, with R² = 0.995.
* ``baseline="none"``: not even the minimum is subtracted.

>>> y, x = np.mgrid[:14, :14]
>>> found = fit_gaussian(3 * np.exp(-((x - 6) ** 2 / 50 + (y - 4) ** 2 / 8)))
>>> round(found.r_squared, 6), round(found.sigma_x, 4), round(found.sigma_y, 4), round(found.y, 4)
(1.0, 5.0, 2.0, 4.0)
"""

from dataclasses import dataclass
from math import nan, sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spatially.errors import UserError, unknown

BASELINES = ("free", "minimum", "none")
SMALLEST_SIGMA = 1e-6

Map = NDArray[np.float64]


@dataclass(frozen=True)
class GaussianFit:
    """The best Gaussian: its height, centre and widths in cells of the grid, and how much of the variance it explains."""

    amplitude: float
    x: float
    y: float
    sigma_x: float
    sigma_y: float
    r_squared: float


UNDEFINED = GaussianFit(nan, nan, nan, nan, nan, nan)


def fit_gaussian(values: NDArray[Any], *, baseline: str = "free") -> GaussianFit:
    """Fit a map (rows, columns). One of fewer values than a Gaussian has parameters, one that is the same everywhere, or one
    that is not finite has no fit: all NaN."""
    if baseline not in BASELINES:
        raise unknown("baseline", baseline, BASELINES)
    given = np.asarray(values, dtype=np.float64)
    if given.ndim != 2:
        raise UserError(f"a Gaussian is fitted to a map of rows and columns: got shape {given.shape}")
    if (
        min(given.shape) < 2
        or given.size < 6
        or not np.isfinite(given).all()
        or np.ptp(given) <= 1e-12 * np.abs(given).max()
    ):
        return UNDEFINED
    raised = given - given.min() if baseline != "none" else given
    scale = np.abs(raised).max()
    best = min(
        (_fit(raised / scale, start, free=baseline == "free") for start in _starts(raised)),
        key=lambda result: result.chisqr,
    )
    found = best.params.valuesdict()
    return GaussianFit(
        amplitude=float(found["amplitude"] * scale),
        x=float(found["x"]),
        y=float(found["y"]),
        sigma_x=float(found["sigma_x"]),
        sigma_y=float(found["sigma_y"]),
        r_squared=float(1 - best.residual.var() / np.var(raised / scale)),
    )


def _starts(raised: Map) -> list[tuple[float, float, float, float]]:
    """Centre and widths by the moments of the map, and of its square, in which far tails weigh less; and a narrow and a
    wide one around the highest value, for spots that stand beside others."""
    weights = np.clip(raised, 0, None)
    y, x = (float(place) for place in np.unravel_index(raised.argmax(), raised.shape))
    height, width = raised.shape
    at_the_top = [(x, y, 1.0, 1.0), (x, y, width / 4, height / 4)]
    return [_moments(weights, 1.0), _moments(weights**2, sqrt(2)), *at_the_top]


def _moments(weights: Map, widening: float) -> tuple[float, float, float, float]:
    y, x = np.indices(weights.shape)
    total = weights.sum()
    if total == 0:  # nowhere above zero: any start is as good
        weights, total = np.ones_like(weights), weights.size
    centre_x, centre_y = float((weights * x).sum() / total), float((weights * y).sum() / total)
    sigma_x = sqrt((weights * (x - centre_x) ** 2).sum() / total) * widening
    sigma_y = sqrt((weights * (y - centre_y) ** 2).sum() / total) * widening
    return centre_x, centre_y, max(sigma_x, 0.3), max(sigma_y, 0.3)


def _fit(target: Map, start: tuple[float, float, float, float], *, free: bool) -> Any:
    from lmfit import Parameters, minimize  # half a second to import

    rows, columns = (np.arange(side, dtype=np.float64) for side in target.shape)
    parameters = Parameters()
    parameters.add("amplitude", value=max(float(target.max()), 1e-3), min=0)
    # The transformation that keeps a parameter within its bounds is flat on them: start a little inside.
    parameters.add("x", value=float(np.clip(start[0], 1e-2, columns[-1] - 1e-2)), min=0, max=columns[-1])
    parameters.add("y", value=float(np.clip(start[1], 1e-2, rows[-1] - 1e-2)), min=0, max=rows[-1])
    parameters.add("sigma_x", value=start[2], min=SMALLEST_SIGMA)
    parameters.add("sigma_y", value=start[3], min=SMALLEST_SIGMA)

    def residual(current: Any) -> Map:
        value = current.valuesdict()
        down = np.exp(-0.5 * ((rows - value["y"]) / value["sigma_y"]) ** 2)
        across = np.exp(-0.5 * ((columns - value["x"]) / value["sigma_x"]) ** 2)
        gaussian = value["amplitude"] * np.outer(down, across)
        difference = gaussian - target
        return (difference - difference.mean() if free else difference).ravel()

    return minimize(residual, parameters, method="leastsq", ftol=1e-12, xtol=1e-12)
