"""The figures of a sweep, as figures 2 and 3 of Heo et al.: training loss and accuracies against the cost of one image."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from spatially.drawing.panels import WIDTH, grid, legend, title
from spatially.drawing.style import INK, figure_style, series

if TYPE_CHECKING:
    from spatially.train.sweep import Outcome

PANELS = (
    ("training loss", "macs", "train_loss"),
    ("generalisation", "train_accuracy", "validation_accuracy"),
    ("accuracy", "macs", "validation_accuracy"),
)
LABELS = {
    "macs": "GMACs an image",
    "train_loss": "training loss",
    "train_accuracy": "training accuracy",
    "validation_accuracy": "validation accuracy",
}
POINT = {"macs": 1e-9}


def draw_sweep(outcomes: Sequence[Outcome], heading: str) -> Figure:
    """Three panels; the members of a series are joined in the order of their cost."""
    looks = series(dict.fromkeys(one.series for one in outcomes))
    with figure_style():
        figure, axes = grid(1, len(PANELS), width=WIDTH, height=2.9, share=False)
        title(figure, heading)
        for panel, (name, across, up) in zip(axes[0], PANELS, strict=True):
            panel.set_title(name, color=INK)
            for label, look in looks.items():
                own = sorted((one for one in outcomes if one.series == label), key=lambda one: one.macs)
                panel.plot(
                    [getattr(one, across) * POINT.get(across, 1.0) for one in own],
                    [getattr(one, up) for one in own],
                    color=look.colour,
                    linestyle=look.pattern,
                    marker=look.marker,
                    markersize=4.4,
                    label=label,
                )
            _axis(panel, "x", across)
            _axis(panel, "y", up)
        legend(figure, looks)
    return figure


def _axis(panel: Axes, which: str, quantity: str) -> None:
    getattr(panel, f"set_{which}label")(LABELS[quantity])
    axis: Any = getattr(panel, f"{which}axis")
    if quantity.endswith("accuracy"):
        axis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
    elif quantity == "macs" and which == "x":
        panel.set_xlim(left=0)


def write_figures(outcomes: Sequence[Outcome], folder: Path, *, heading: str) -> None:
    """`sweep.svg`, `sweep.pdf` and `sweep.png` in a folder."""
    from spatially.report.files import save_figure, settle

    save_figure(settle(draw_sweep(outcomes, heading)), folder, "sweep")
