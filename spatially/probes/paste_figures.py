"""Drawings and tables of the paste probe: does the shuffled host win, or the clean guest (figure 2 of Xu)?"""

import numpy as np
import pandas
import xarray as xr
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from spatially.drawing.panels import WIDTH, grid, ordered, title
from spatially.drawing.style import GUEST, HOST, INK, MUTED, NEITHER, figure_style
from spatially.drawing.values import Results, estimate, number, percent

PARTS = (
    ("host_rate", "the shuffled host", HOST),
    ("neither_rate", "neither", NEITHER),
    ("guest_rate", "the clean guest", GUEST),
)
PROBABILITIES = (
    ("mean_host_probability", "the shuffled host", HOST, "s"),
    ("mean_guest_probability", "the clean guest", GUEST, "o"),
)


def figures(results: Results) -> dict[str, Figure]:
    """Who wins how often, and how probable either label is; the models most taken in by the host first."""
    order = ordered(list(results), lambda name: number(results[name], "host_rate"))
    with figure_style():
        figure, axes = grid(1, 2, width=WIDTH, height=0.27 * max(len(order), 2) + 1.45, share=False)
        title(figure, "A clean image pasted into a shuffled one: which of them does the model name?")
        wins, means = axes[0]
        _draw_wins(wins, results, order)
        _draw_probabilities(means, results, order)
        for panel in (wins, means):
            _rows(panel, order if panel is wins else [""] * len(order))
        handles: list[Artist] = [Patch(color=colour, linewidth=0, label=label) for _, label, colour in PARTS]
        handles.append(Line2D([], [], color=INK, linewidth=1.3, label="95 % interval"))
        figure.legend(handles=handles, loc="outside lower left", ncols=4, labelcolor=INK, handlelength=1.2)
    return {"wins": figure}


def tables(results: Results) -> dict[str, pandas.DataFrame]:
    """One row a model and quantity, shares as fractions 0..1."""
    names = [name for name, *_ in PARTS] + [name for name, *_ in PROBABILITIES]
    rows = [
        {"model": model, "quantity": name, "value": found.value, "low": found.low, "high": found.high}
        for model, dataset in results.items()
        for name in names
        for found in [estimate(dataset, name)]
    ]
    return {"paste": pandas.DataFrame(rows)}


def captions(results: Results) -> dict[str, str]:
    """What the figure and the table show, and where the paper has it."""
    return {
        "wins": "Each host image is shuffled completely and a clean guest image is pasted into its centre. Left: how"
        " often the model answers with the host's label, the guest's, or neither. Right: the mean probability of both."
        " Black and coloured lines are 95 % intervals. Figure 2 of Xu shows one such image.",
        "paste": "Shares and mean probabilities as fractions, with the ends of their 95 % intervals.",
    }


def descriptions(results: Results) -> dict[str, str]:
    """The figure in words, for readers who cannot see it."""
    parts = "; ".join(_describe(model, dataset) for model, dataset in results.items())
    return {"wins": f"Stacked bars of who wins. {parts}."}


def _describe(model: str, dataset: xr.Dataset) -> str:
    host, neither, guest = (percent(number(dataset, name)) for name, *_ in PARTS)
    return f"{model}: host {host}, neither {neither}, guest {guest}"


def _draw_wins(axes: Axes, results: Results, order: list[str]) -> None:
    """Bars that add up to one, the host's interval at its end and the guest's at its start."""
    start = np.zeros(len(order))
    for name, label, colour in PARTS:
        found = [number(results[model], name) for model in order]
        # A missing share takes no room, so that the others keep their place.
        width = np.nan_to_num(np.array(found, dtype=float))
        axes.barh(np.arange(len(order)), width, left=start, height=0.62, color=colour, label=label, linewidth=0)
        start += width
    for row, model in enumerate(order):
        host, guest = estimate(results[model], "host_rate"), estimate(results[model], "guest_rate")
        if host.bounded:
            axes.hlines(row - 0.1, host.low, host.high, color=INK, linewidth=1.3, label="_host interval")
        if guest.bounded:
            axes.hlines(row + 0.1, 1 - guest.high, 1 - guest.low, color=INK, linewidth=1.3, label="_guest interval")
    axes.set_title("which label wins")
    axes.set_xlabel("share of images (%)")


def _draw_probabilities(axes: Axes, results: Results, order: list[str]) -> None:
    for offset, (name, label, colour, marker) in zip((-0.13, 0.13), PROBABILITIES, strict=True):
        found = [estimate(results[model], name) for model in order]
        rows = np.arange(len(order)) + offset
        axes.hlines(
            rows, [one.low for one in found], [one.high for one in found], color=colour, linewidth=2.6, alpha=0.45
        )
        values = [one.value for one in found]
        axes.plot(values, rows, linestyle="none", marker=marker, markersize=4.5, color=colour, label=label)
    axes.set_title("how probable either label is")
    axes.set_xlabel("mean probability (%)")


def _rows(axes: Axes, order: list[str]) -> None:
    axes.set_yticks(range(len(order)), order, color=INK)
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_xlim(0, 1)
    axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=""))
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="x", labelcolor=MUTED)
