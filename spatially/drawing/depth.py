"""Numbers along the depth of a model, over the shades of what happens there: figures 4 and 6 of Park & Kim."""

from collections.abc import Sequence

import numpy as np
import xarray as xr
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from spatially.drawing.style import FAINT, INK, SHADES, Series

WORDS = {"attention": "attention", "subsampling": "subsampling"}
OTHERS = "MLP or convolution"


def shade(axes: Axes, kinds: Sequence[str]) -> None:
    """Attention grey, subsampling blue, MLPs and convolutions white: from one point to the next, by what lies between."""
    for layer, kind in enumerate(kinds):
        if layer and kind in SHADES:
            axes.axvspan(layer - 1, layer, color=SHADES[kind], linewidth=0, zorder=0)
    axes.set_xlim(0, max(len(kinds) - 1, 1))
    axes.grid(visible=False, axis="x")


def shade_handles(kinds: Sequence[str]) -> list[Artist]:
    """The legend of those shades that occur."""
    handles: list[Artist] = [
        Patch(facecolor=SHADES[kind], linewidth=0, label=word) for kind, word in WORDS.items() if kind in kinds
    ]
    if {"mlp", "convolution"} & set(kinds):
        handles.append(Patch(facecolor="none", edgecolor=FAINT, linewidth=0.7, label=OTHERS))
    return handles


def draw_depth(axes: Axes, dataset: xr.Dataset, name: str, look: Series) -> None:
    """A number at each layer with its interval as a band, over the shades."""
    kinds = [str(kind) for kind in dataset["kind"].values]
    shade(axes, kinds)
    layers = np.arange(len(kinds))
    low, value, high = (np.asarray(dataset[name + end].values, dtype=float) for end in ("_low", "", "_high"))
    axes.fill_between(layers, low, high, color=look.colour, alpha=0.2, linewidth=0)
    axes.plot(layers, value, color=look.colour, marker=look.marker, clip_on=False, zorder=3, label=name)
    axes.set_xlabel("layer")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.tick_params(axis="x", labelcolor=INK)


def kinds_of(datasets: Sequence[xr.Dataset]) -> list[str]:
    """Every kind of layer that occurs in any of them."""
    return list(dict.fromkeys(str(kind) for dataset in datasets for kind in dataset["kind"].values))
