"""A height over a plane, from above and in perspective, with the same levels for all that stand side by side."""

from collections.abc import Mapping, Sequence
from math import ceil, log10
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm
from matplotlib.contour import QuadContourSet

from spatially.drawing.maps import MAP
from spatially.drawing.style import FAINT, MUTED

CUT = 4  # surfaces are shown up to so many times the height of the lowest


def shared_levels(heights: Sequence[np.ndarray]) -> np.ndarray:
    """Round levels, 1-2-5, from a tenth of the lowest one's top up to the highest's; one below 0 if much lies there.

    >>> shared_levels([np.array([0.0, 60.0]), np.array([0.0, 9.0])]).tolist()
    [0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0]
    """
    tops = [float(np.nanmax(one)) for one in heights if np.isfinite(one).any()]
    bottom = min((float(np.nanmin(one)) for one in heights if np.isfinite(one).any()), default=0.0)
    positive = [top for top in tops if top > 0] or [1.0]
    low, high = max(min(positive) / 10, max(positive) / 1e4), max(positive)
    decades = range(ceil(log10(low)) - 1, ceil(log10(high)) + 1)
    rounds = [float(f"{part}e{decade}") for decade in decades for part in (1, 2, 5)]
    first = max(sum(one <= low for one in rounds) - 1, 0)
    steps = [0.0, *rounds[first : sum(one < high for one in rounds) + 1]]
    return np.array([bottom, *steps] if bottom < -steps[1] else steps)


def draw_contours(
    axes: Axes, a: np.ndarray, b: np.ndarray, heights: np.ndarray, *, levels: np.ndarray, labels: Mapping[float, str]
) -> QuadContourSet:
    """Filled contours of heights (a, b) with labelled lines, and a cross at the origin; what is NaN stays blank."""
    colours = matplotlib.colormaps[MAP]
    shown = np.clip(heights.T, levels[0], levels[-1])
    filled = axes.contourf(a, b, shown, levels=levels, cmap=colours, norm=BoundaryNorm(levels, colours.N))
    lines = axes.contour(a, b, shown, levels=levels[1:-1], colors="white", linewidths=0.5)
    # Neighbouring lines lie close: a number on every other one can be read, and the bar has them all.
    inner = levels[1:-1]
    axes.clabel(lines, levels=inner[1::2] if len(inner) > 2 else inner, fmt=dict(labels), fontsize=6)
    axes.plot([0], [0], marker="+", color="white", markersize=6, markeredgewidth=1.2)
    axes.set(xlim=(a[0], a[-1]), ylim=(b[0], b[-1]), aspect="equal")
    axes.locator_params(nbins=5)
    axes.grid(visible=False)
    return filled


def common_height(heights: Sequence[np.ndarray]) -> tuple[float, bool]:
    """How high surfaces are shown, and whether any is cut there."""
    tops = [float(np.nanmax(one)) for one in heights if np.isfinite(one).any()]
    highest, lowest = max(tops, default=1.0), min(tops, default=1.0)
    height = min(highest, CUT * lowest) if lowest > 0 else highest
    return (height if height > 0 else 1.0), height < highest


def draw_surface(axes: Any, a: np.ndarray, b: np.ndarray, heights: np.ndarray, *, height: float) -> None:
    """Heights (a, b) in perspective, open at the top where they rise above ``height``."""
    low = min(0.0, float(np.nanmin(heights))) if np.isfinite(heights).any() else 0.0
    across, down = np.meshgrid(a, b, indexing="ij")
    axes.plot_surface(
        across,
        down,
        _open_above(heights, height),
        cmap=MAP,
        vmin=0,
        vmax=height,
        rstride=1,
        cstride=1,
        linewidth=0.15,
        edgecolor="white",
    )
    axes.set(zlim=(low, height), xlabel="a", ylabel="b")
    axes.view_init(elev=28, azim=-60)
    axes.set_box_aspect((1, 1, 0.8), zoom=1.0)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_pane_color((1, 1, 1, 0))
        axis.line.set_color(FAINT)
        axis.set_tick_params(labelsize=6, pad=-2, labelcolor=MUTED)
        axis.labelpad = -8
    axes.locator_params(nbins=4)


def _open_above(heights: np.ndarray, height: float) -> np.ndarray:
    """Heights cut off, and NaN where all neighbours are cut off too: walls without a lid."""
    above = np.pad(~(heights <= height), 1, constant_values=True)
    rows, columns = heights.shape
    around = [above[i : i + rows, j : j + columns] for i in range(3) for j in range(3)]
    return np.where(np.all(around, axis=0) | np.isnan(heights), np.nan, np.minimum(heights, height))
