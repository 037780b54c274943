"""Two drawings that several probes share: curves in a grid of panels, and estimates as dots with intervals."""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter

from spatially.drawing.style import FAINT, INK, MUTED, Series, figure_style
from spatially.drawing.values import Estimate

WIDTH = 7.2  # inches: the text width of a two-column paper


@dataclass(frozen=True)
class Curve:
    """One model's line in one panel, shares 0..1 over a ratio; NaN where nothing was measured."""

    x: np.ndarray
    y: np.ndarray
    low: np.ndarray
    high: np.ndarray


def columns_for(count: int) -> int:
    """Two rows of two are easier to read than four narrow panels."""
    return 2 if count == 4 else min(count, 3)


def grid(rows: int, columns: int, *, width: float, height: float, share: bool = True) -> tuple[Figure, np.ndarray]:
    """A figure that no global state knows about, and its axes (rows, columns)."""
    figure = Figure(figsize=(width, height))
    return figure, figure.subplots(rows, columns, sharex=share, sharey=share, squeeze=False)


def title(figure: Figure, text: str) -> None:
    figure.suptitle(text, x=0.012, ha="left", color=INK)


def in_lines(name: str, inches: float) -> str:
    """A model's name in as many lines as a panel of this width needs for it, broken at its own marks where it has any.

    >>> in_lines("vit_small_patch16_224.augreg_in21k", 1.5).splitlines()
    ['vit_small_patch16_224.', 'augreg_in21k']
    """
    most = max(int(inches / 0.062), 8)  # characters of 8.5 points
    lines = []
    while len(name) > most:
        end = 1 + max(name.rfind(mark, most // 2, most) for mark in "._-/ ") or most
        lines.append(name[:end])
        name = name[end:]
    return "\n".join([*lines, name])


def draw_curve(axes: Axes, curve: Curve, *, name: str, look: Series, band: bool = True) -> None:
    """A line with its interval as a band. Points without a value are left out, and the line breaks there."""
    if band:
        axes.fill_between(curve.x, curve.low, curve.high, color=look.colour, alpha=0.16, linewidth=0, label=name)
    axes.plot(
        curve.x,
        curve.y,
        color=look.colour,
        linestyle=look.pattern,
        marker=look.marker,
        label=name,
        clip_on=False,
        zorder=3,
    )


def draw_level(axes: Axes, level: float, *, name: str, pattern: Any, colour: str = MUTED) -> None:
    axes.axhline(level, color=colour, linestyle=pattern, linewidth=1.0, zorder=1.5, label=name)


def share_axes(axes: np.ndarray, *, x: str, y: str, top: float = 1.0) -> None:
    """Ratio from 0 to 1 across, per cent up; labels at the outer panels only."""
    for panel in axes.flat:
        panel.set_xlim(0, 1)
        panel.set_ylim(0, top)
        panel.set_xticks(np.linspace(0, 1, 6))
        panel.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0 if top >= 0.05 else None, symbol=""))
        panel.margins(0)
    for row in axes:
        row[0].set_ylabel(y)
    for column in axes.T:
        visible = [panel for panel in column if panel.get_visible()]
        if visible:
            visible[-1].set_xlabel(x)
            visible[-1].tick_params(labelbottom=True)


def legend(figure: Figure, looks: Mapping[str, Series], *, levels: Sequence[Line2D] = (), band: str = "") -> None:
    """One legend under all panels: models first, then what the other lines and the bands are."""
    handles: list[Any] = [
        Line2D([], [], color=look.colour, linestyle=look.pattern, marker=look.marker, label=name)
        for name, look in looks.items()
    ]
    handles += levels
    if band:
        handles.append(Patch(facecolor=MUTED, alpha=0.25, linewidth=0, label=band))
    labels = [str(handle.get_label()) for handle in handles]
    # A character is about 0.058 inches wide at 8 points, and a handle with its gaps 0.5.
    widest = max(map(len, labels)) * 0.058 + 0.5
    columns = max(1, min(len(labels), int(figure.get_figwidth() / widest)))
    columns = ceil(len(labels) / ceil(len(labels) / columns))
    figure.legend(handles, labels, loc="outside lower left", ncols=columns, labelcolor=INK, borderaxespad=0.2)


def legend_height(labels: Sequence[str], width: float) -> float:
    """Inches the legend will need, so that the panels keep their size."""
    columns = max(1, int(width / (max(map(len, labels)) * 0.058 + 0.5)))
    return 0.16 * ceil(len(labels) / columns) + 0.1


@dataclass(frozen=True)
class DotPanel:
    """One panel of `draw_dots`: its title and the estimate of each model."""

    title: str
    estimates: Mapping[str, Estimate]


def draw_dots(
    panels: Sequence[DotPanel],
    *,
    looks: Mapping[str, Series],
    order: Sequence[str],
    columns: int,
    heading: str,
    label: str,
    ends: tuple[str, str],
    note: str = "",
) -> Figure:
    """Every model a row, best first; a dot with its interval, from 0 to 1; "undefined" where there is no value."""
    rows = ceil(len(panels) / columns)
    names = max(map(len, order)) * 0.056 + 0.2
    width = min(WIDTH, names + 3.2 * columns)
    foot = _wrapped([label, *note.splitlines()], width)
    height = rows * (0.62 + 0.23 * max(len(order), 2)) + 0.45 + 0.16 * foot.count("\n")
    with figure_style():
        figure, axes = grid(rows, columns, width=width, height=height)
        title(figure, heading)
        for panel, content in zip(axes.flat, panels, strict=False):
            _dots(panel, content, looks=looks, order=order)
        _name_ends(axes, ends)
        for spare in axes.flat[len(panels) :]:
            spare.set_visible(False)
        text = figure.supxlabel(foot, x=0.012, ha="left", color=MUTED, fontsize=7.5)
        text.set_linespacing(1.4)
    return figure


def _wrapped(lines: Sequence[str], width: float) -> str:
    """About 17 characters of 7.5 points fit an inch."""
    return "\n".join(part for line in lines for part in textwrap.wrap(line, int(17 * width)))


def _dots(axes: Axes, panel: DotPanel, *, looks: Mapping[str, Series], order: Sequence[str]) -> None:
    axes.set_title(panel.title)
    axes.grid(visible=False, axis="y")
    axes.spines["left"].set_visible(False)
    axes.set_yticks(range(len(order)), order, color=INK)
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_xlim(-0.03, 1.03)
    for row, name in enumerate(order):
        found = panel.estimates[name]
        if not found.defined:
            axes.text(0.0, row, "undefined", color=MUTED, fontsize=7, style="italic", va="center", ha="left")
            continue
        axes.hlines(row, 0, 1, color=FAINT, linewidth=0.5, zorder=1)
        if found.bounded:
            axes.hlines(row, found.low, found.high, color=looks[name].colour, linewidth=2.4, alpha=0.5, zorder=2)
        axes.plot(
            [found.value],
            [row],
            color=looks[name].colour,
            marker=looks[name].marker,
            markersize=4.4,
            label=name,
            zorder=3,
        )


def _name_ends(axes: np.ndarray, ends: tuple[str, str]) -> None:
    """The scale's ends in words, under their numbers."""
    lines = max(end.count("\n") for end in ends) + 1
    labels = [f"0\n{ends[0]}", "0.5" + "\n " * lines, f"1\n{ends[1]}"]  # as many lines each, so that numbers align
    for panel in axes.flat:
        panel.set_xticks([0, 0.5, 1], labels)
        if not panel.get_xticklabels():  # an inner panel of a shared axis
            continue
        first, middle, last = panel.get_xticklabels()
        first.set_horizontalalignment("left")
        last.set_horizontalalignment("right")
        for text in (first, middle, last):
            text.set_linespacing(1.3)


def ordered(names: Sequence[str], key: Callable[[str], float]) -> list[str]:
    """Highest first, undefined last, and otherwise as given."""
    return sorted(names, key=lambda name: -key(name) if np.isfinite(key(name)) else np.inf)
