"""How every figure looks: type, colours, and how a model keeps its colour from figure to figure.

Series colours follow Okabe and Ito (2008), darkened where they were too pale on white. A model is told apart by its
marker and line pattern as well, so twelve models stay readable in grey and for colour-blind readers; and by its marker
and colour alone, where there are no lines.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from typing import Any

import matplotlib
from matplotlib import font_manager

INK = "#1c2430"
MUTED = "#5b6472"
FAINT = "#b9c0ca"
GRID = "#e7eaef"

SERIES = ("#0072b2", "#d55e00", "#009073", "#b5478f", "#b98300", "#3f9bd1")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "p", "<", "h", ">")  # no colour meets a marker twice
PATTERNS: tuple[Any, ...] = ("-", (0, (4.5, 1.5)), (0, (1.2, 1.2)))

HOST, NEITHER, GUEST = "#c8570a", "#d3d8df", "#0f6fae"

# What happens to the residual stream between two points of it; what is not here stays white.
SHADES = {"attention": "#dfe3e9", "subsampling": "#c9e2f5"}

# What the page's figures turn into when the reader's screen is dark; a figure's file keeps the colours above.
DARK = {
    INK: "#e9ecf1",
    MUTED: "#a7b0bd",
    FAINT: "#566070",
    GRID: "#29303b",
    NEITHER: "#3d4653",
    "#0072b2": "#4aa8e0",
    "#d55e00": "#f08a3c",
    "#009073": "#2fbf9b",
    "#b5478f": "#dd7fbb",
    "#b98300": "#dcab33",
    "#3f9bd1": "#8fcbf0",
    HOST: "#ee8a45",
    GUEST: "#4ba3df",
    SHADES["attention"]: "#333c4a",
    SHADES["subsampling"]: "#1d3f5a",
}

_FAMILIES = ("Inter", "Helvetica Neue", "Helvetica", "Arial", "Liberation Sans")


@dataclass(frozen=True)
class Series:
    """How one model is drawn."""

    colour: str
    marker: str
    pattern: Any


_STUDY: ContextVar[tuple[str, ...]] = ContextVar("study", default=())


@contextmanager
def looks_of(models: Iterable[str]) -> Iterator[None]:
    """Inside this, every figure gives these models the same looks, also one that has only some of them."""
    before = _STUDY.set(tuple(models))
    try:
        yield
    finally:
        _STUDY.reset(before)


def series(names: Iterable[str]) -> dict[str, Series]:
    """A look for each model, by its place in the study; what is no model of the study comes after them.

    >>> series(["a", "b"])["b"].colour
    '#d55e00'
    >>> with looks_of(["a", "b", "c"]):
    ...     series(["c"]) == {"c": series(["a", "b", "c"])["c"]}
    True
    """
    names = list(names)
    places = {name: place for place, name in enumerate(dict.fromkeys([*_STUDY.get(), *names]))}
    return {name: _look(places[name]) for name in names}


def _look(place: int) -> Series:
    count = len(SERIES)
    return Series(SERIES[place % count], MARKERS[place % len(MARKERS)], PATTERNS[place // count % len(PATTERNS)])


@cache
def _families() -> list[str]:
    """The installed ones only: matplotlib warns about every family it does not find."""
    installed = set(font_manager.get_font_names())
    return [name for name in _FAMILIES if name in installed] + ["DejaVu Sans"]


def _settings() -> dict[str, Any]:
    return {
        "font.family": _families(),
        "font.size": 8.0,
        "text.color": INK,
        "text.parse_math": False,  # a model's name may hold a dollar sign
        "axes.titlesize": 8.5,
        "axes.titlelocation": "left",
        "axes.titleweight": "normal",
        "axes.titlecolor": INK,
        "axes.titlepad": 6.0,
        "axes.labelsize": 8.0,
        "axes.labelcolor": MUTED,
        "axes.facecolor": "none",
        "axes.edgecolor": FAINT,
        "axes.linewidth": 0.7,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.grid": True,
        "axes.axisbelow": True,
        "axes.unicode_minus": True,
        "grid.color": GRID,
        "grid.linewidth": 0.7,
        "xtick.labelsize": 7.5,
        "ytick.labelsize": 7.5,
        "xtick.color": FAINT,
        "ytick.color": FAINT,
        "xtick.labelcolor": MUTED,
        "ytick.labelcolor": MUTED,
        "xtick.major.size": 0.0,
        "ytick.major.size": 0.0,
        "lines.linewidth": 1.4,
        "lines.markersize": 3.2,
        "lines.markeredgewidth": 0.0,
        "legend.frameon": False,
        "legend.fontsize": 8.0,
        "legend.handlelength": 2.2,
        "legend.columnspacing": 1.8,
        "figure.facecolor": "none",
        "figure.titlesize": 10.5,
        "figure.titleweight": "bold",
        "figure.constrained_layout.use": True,
        "figure.constrained_layout.h_pad": 0.06,
        "figure.constrained_layout.w_pad": 0.06,
        "figure.constrained_layout.wspace": 0.05,
        "figure.constrained_layout.hspace": 0.06,
        "svg.fonttype": "path",  # the page looks the same whatever fonts its reader has
        "svg.hashsalt": "spatially",  # the same figure gives the same bytes
        "pdf.fonttype": 42,
    }


@contextmanager
def figure_style() -> Iterator[None]:
    """Draw and save inside this; matplotlib's own settings are as before afterwards."""
    settings: Any = _settings()
    with matplotlib.rc_context(settings):
        yield
