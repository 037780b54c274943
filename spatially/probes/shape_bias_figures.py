"""Drawings and tables of the shape-bias probe: every class a row, every model a dot and a line at its average."""

import numpy as np
import pandas
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spatially.drawing.panels import grid, legend, legend_height, title
from spatially.drawing.style import FAINT, INK, MUTED, Series, figure_style, series
from spatially.drawing.values import Results, estimate, number, percent, with_interval

_AVERAGE = "line: all classes together, with 95 % interval"


def figures(results: Results) -> dict[str, Figure]:
    """Texture to the left, shape to the right, as Geirhos draws it; the classes most named by shape on top."""
    looks = series(results)
    order = _order(results)
    with figure_style():
        width, labels = 5.6, [*results, _AVERAGE]
        figure, axes = grid(1, 1, width=width, height=0.21 * len(order) + 1.25 + legend_height(labels, width))
        title(figure, "When they disagree: does the model name the texture or the shape?")
        panel = axes[0, 0]
        for model, result in results.items():
            _draw(panel, result, order, looks[model], name=model)
        _arrange(panel, order)
        line = Line2D([], [], color=MUTED, linewidth=1.1, label=_AVERAGE)
        legend(figure, looks, levels=[line])
    return {"shape_bias": figure}


def tables(results: Results) -> dict[str, pandas.DataFrame]:
    """One row a model, and one row a model and class; shares as fractions 0..1."""
    rows = []
    for model, result in results.items():
        row = {"model": model, "images": result.sizes["image"]}
        for name in ("shape_bias", "shape_rate", "texture_rate", "decided"):
            found = estimate(result, name)
            row |= {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}
        rows.append(row)
    classes = [
        {
            "model": model,
            "class": name,
            "decided": int(result["class_decided"].sel({"class": name})),
            "value": found.value,
            "low": found.low,
            "high": found.high,
        }
        for model, result in results.items()
        for name in result["class"].values.tolist()
        for found in [estimate(result, "class_shape_bias", **{"class": name})]
    ]
    return {"shape_bias": pandas.DataFrame(rows), "classes": pandas.DataFrame(classes)}


def captions(results: Results) -> dict[str, str]:
    """What the figure and the tables show, and where the paper has it."""
    return {
        "shape_bias": "Cue-conflict images have the shape of one class and the texture of another. Of the images that a"
        " model names by either, the share named by shape: a dot for each class of shape, a vertical line for all classes"
        " together with its 95 % interval as a band. A class of which neither was ever named has no dot. Corresponds to"
        " figure 4 of Geirhos et al. In the table, shape rate and texture rate are shares of all images, and decided is"
        " their sum.",
        "classes": "Shape bias by class of shape, the number of images decided either way, and the ends of the"
        " 95 % interval.",
    }


def descriptions(results: Results) -> dict[str, str]:
    """The figure in words, for readers who cannot see it."""
    said = "; ".join(
        f"{model}: {with_interval(estimate(result, 'shape_bias'))}, {percent(number(result, 'decided'))} of images decided"
        for model, result in results.items()
    )
    return {"shape_bias": f"Shape bias by class. All classes together: {said}."}


def _order(results: Results) -> list[str]:
    """Classes by their mean over models, highest first; undefined ones last."""
    first = next(iter(results.values()))
    values = np.stack([result["class_shape_bias"].values for result in results.values()])
    defined = np.isfinite(values)
    mean = np.where(defined, values, 0).sum(axis=0) / np.maximum(defined.sum(axis=0), 1)
    mean[~defined.any(axis=0)] = -1
    return [str(first["class"].values[place]) for place in np.argsort(-mean, kind="stable")]


def _draw(axes: Axes, result: xr.Dataset, order: list[str], look: Series, *, name: str) -> None:
    values = [number(result, "class_shape_bias", **{"class": one}) for one in order]
    average = estimate(result, "shape_bias")
    if average.defined:
        axes.axvspan(average.low, average.high, color=look.colour, alpha=0.12, linewidth=0, zorder=1)
        axes.axvline(average.value, color=look.colour, linestyle=look.pattern, linewidth=1.1, zorder=2)
    axes.plot(
        values,
        range(len(order)),
        linestyle="none",
        marker=look.marker,
        markersize=4.6,
        color=look.colour,
        label=name,
        clip_on=False,
        zorder=3,
    )


def _arrange(axes: Axes, order: list[str]) -> None:
    axes.set_xlim(-0.03, 1.03)
    axes.set_ylim(len(order) - 0.4, -0.6)
    axes.set_yticks(range(len(order)), order, color=INK)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.set_xlabel("← always the texture        shape bias        always the shape →")
    axes.spines["left"].set_visible(False)
    axes.axvline(0.5, color=FAINT, linewidth=0.7, zorder=0.5)
