"""Maps as pictures: one colour scale, frames without ticks, a bar that says what the colours mean."""

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage

from spatially.drawing.style import MUTED

MAP = "viridis"  # even in brightness, so that it stays readable in grey and for colour-blind readers


def draw_map(axes: Axes, values: np.ndarray, *, low: float | None = None, high: float | None = None) -> AxesImage:
    """A map without axes, every cell a square; what was not measured stays blank."""
    picture = axes.imshow(values, cmap=MAP, vmin=low, vmax=high, interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return picture


def colour_bar(
    figure: Figure, picture: AxesImage, axes: Any, *, label: str, ends: tuple[str, str] | None = None
) -> None:
    """One bar for the panels that share its colours; its ends in words, or numbers."""
    bar = figure.colorbar(picture, ax=axes, shrink=0.8, aspect=24, pad=0.02)
    bar.outline.set_visible(False)
    bar.set_label(label, color=MUTED)
    if ends is not None:
        bar.set_ticks(list(picture.get_clim()), labels=list(ends))


def scaled(values: np.ndarray) -> np.ndarray:
    """From 0 at the least to 1 at the most; what is the same everywhere is 0, and what is undefined stays so."""
    if np.isnan(values).all():
        return values
    low, high = np.nanmin(values), np.nanmax(values)
    return (values - low) / (high - low) if high > low else np.zeros_like(values)
