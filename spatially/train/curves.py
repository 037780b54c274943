"""Learning curves: loss and accuracy of training and validation, and the rate, over the epochs."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter

from spatially.drawing.panels import WIDTH, grid, title
from spatially.drawing.style import figure_style, series
from spatially.train.log import Row

_NAMES = ("training", "validation")


def draw_curves(rows: Sequence[Row], heading: str) -> Figure:
    """Three panels, from the rows of log.csv."""
    looks = series(_NAMES)
    epochs = [row["epoch"] + 1 for row in rows]
    with figure_style():
        figure, axes = grid(1, 3, width=WIDTH, height=2.5, share=False)
        title(figure, heading)
        for panel, what in zip(axes[0], ("loss", "accuracy", "rate"), strict=True):
            panel.set_title({"rate": "learning rate"}.get(what, what))
            panel.set_xlabel("epoch")
            panel.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
            columns = {"training": "rate"}
            if what != "rate":
                columns = {"training": f"train_{what}", "validation": f"validation_{what}"}
            for name, column in columns.items():
                look = looks[name]
                values = [float("nan") if row[column] is None else row[column] for row in rows]
                marker = look.marker if len(rows) <= 40 else ""
                panel.plot(epochs, values, color=look.colour, linestyle=look.pattern, marker=marker, label=name)
        axes[0][1].yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=None))
        axes[0][0].legend()
    return figure


def write_curves(rows: Sequence[Row], out: Path, heading: str) -> None:
    """`curves.svg` and `curves.png` in a folder."""
    figure = draw_curves(rows, heading)
    with figure_style():
        figure.savefig(out / "curves.svg", metadata={"Date": None})
        figure.savefig(out / "curves.png", dpi=200, facecolor="white")
