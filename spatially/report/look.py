"""One image through the eyes of several models, as in figures 1 and 5 of Xu: clean, shuffled, masked, and each answer."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from spatially.drawing.panels import WIDTH
from spatially.drawing.style import FAINT, GRID, INK, MUTED, SERIES, figure_style
from spatially.drawing.values import percent
from spatially.errors import UserError

LONGEST_NAME = 26  # characters of a class name that fit above its bar


@dataclass(frozen=True)
class LookView:
    """One picture, ``(H, W, 3)`` or ``(H, W)`` uint8, and what was done to it, for example "shuffled, 8×8, α = 1"."""

    pixels: np.ndarray
    caption: str


@dataclass(frozen=True)
class LookRow:
    """What one model says: for each view its best answers (class name, probability), best first.

    ``reference`` is the class to follow, usually the one the model gives for the clean image or the true one. Where it is
    not among a view's answers, ``reference_probability`` (one number a view) still shows how far it has fallen.
    """

    model: str
    answers: Sequence[Sequence[tuple[str, float]]]
    reference: str
    reference_probability: Sequence[float] | None = None


def draw_look(rows: Sequence[LookRow], *, views: Sequence[LookView], heading: str = "") -> Figure:
    """Pictures on top, below them a row a model: its answers as bars, the reference class in colour."""
    _check(rows, views)
    bars = max(len(_answers(row, view)) for row in rows for view in range(len(views)))
    side = (WIDTH - 1.0) / max(len(views), 3)
    tall = 0.27 * bars + 0.3
    width = side * len(views) + 0.6
    with figure_style():
        figure = Figure(figsize=(width, side + 0.3 + tall * len(rows) + (0.35 if heading else 0.05)))
        if heading:
            figure.suptitle(heading, x=0.012, ha="left", color=INK)
        axes = figure.subplots(
            1 + len(rows), len(views), squeeze=False, height_ratios=[side + 0.2] + [tall] * len(rows)
        )
        for panel, view in zip(axes[0], views, strict=True):
            _draw_view(panel, view)
        for number, row in enumerate(rows):
            for place, panel in enumerate(axes[number + 1]):
                _draw_answers(panel, _answers(row, place), reference=row.reference, bars=bars)
            axes[number + 1][0].set_title(row.model, fontweight="bold", fontsize=8.5)
    return figure


def _check(rows: Sequence[LookRow], views: Sequence[LookView]) -> None:
    if not rows or not views:
        raise UserError(f"rows and views must not be empty, but there are {len(rows)} rows and {len(views)} views")
    for row in rows:
        given = [row.answers] + ([row.reference_probability] if row.reference_probability is not None else [])
        if any(len(part) != len(views) for part in given):
            raise UserError(f"rows: {row.model!r} must have one entry for each of the {len(views)} views")


def _answers(row: LookRow, view: int) -> list[tuple[str, float]]:
    """A view's answers, with the reference class at the end where it is not among them and its probability is known."""
    answers = [(str(name), float(probability)) for name, probability in row.answers[view]]
    if row.reference not in [name for name, _ in answers] and row.reference_probability is not None:
        answers.append((row.reference, float(row.reference_probability[view])))
    return answers


def _draw_view(axes: Axes, view: LookView) -> None:
    axes.imshow(view.pixels, cmap="gray", vmin=0, vmax=255)
    axes.set_anchor("NW")
    axes.set_title(view.caption, loc="left", color=MUTED, fontsize=8)
    axes.set_axis_off()


def _draw_answers(axes: Axes, answers: Sequence[tuple[str, float]], *, reference: str, bars: int) -> None:
    """Name and number above a thin bar. The reference is told by weight as well as by colour."""
    for place, (name, probability) in enumerate(answers):
        followed = name == reference
        axes.barh(place, 1, height=0.16, color=GRID, linewidth=0)
        axes.barh(place, probability, height=0.16, color=SERIES[0] if followed else FAINT, linewidth=0, label=name)
        for x, side, words in ((0, "left", _shortened(name)), (1, "right", percent(probability))):
            axes.text(
                x,
                place - 0.16,
                words,
                ha=side,
                va="bottom",
                fontsize=7,
                color=INK if followed else MUTED,
                fontweight="bold" if followed else "normal",
            )
    axes.set_xlim(0, 1)
    axes.set_ylim(bars - 0.6, -0.75)
    axes.set_axis_off()


def _shortened(name: str) -> str:
    return name if len(name) <= LONGEST_NAME else name[: LONGEST_NAME - 1] + "…"
