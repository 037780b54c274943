"""Drawings and tables of loss landscapes: contours, surfaces (figure 1 of Park), and how loss and accuracy go with distance."""

from collections.abc import Callable
from math import ceil, isfinite, log10

import numpy as np
import pandas
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from spatially.drawing.panels import WIDTH, columns_for, grid, in_lines, legend, legend_height, title
from spatially.drawing.style import INK, MUTED, Series, figure_style, series
from spatially.drawing.terrain import common_height, draw_contours, draw_surface, shared_levels
from spatially.drawing.values import Results, attribute, listing, number, percent

SHARES = np.linspace(0, 1, 11)


def figures(results: Results) -> dict[str, Figure]:
    """The plane from above, in perspective, its accuracy, and means over circles."""
    levels = shared_levels([rise(dataset) for dataset in results.values()])
    return {
        "contours": _maps(results, rise, levels, "Rise of the loss around the weights", "rise of the loss"),
        "surfaces": _surfaces(results),
        "accuracy": _maps(
            results, lambda one: one["accuracy"].values, SHARES, "Accuracy around the weights", "accuracy", word=percent
        ),
        "profiles": _profiles(results),
    }


def tables(results: Results) -> dict[str, pandas.DataFrame]:
    """One row a model: its own loss, how it rises, how sharp it is."""
    rows = []
    for model, dataset in results.items():
        radii = dataset["radius"].values
        rows.append(
            {
                "model": model,
                **{name: float(dataset[f"origin_{name}"]) for name in ("loss", "nll", "l2", "accuracy")},
                **{f"rise_{radius:g}": float(dataset["rise"].sel(radius=radius)) for radius in _quarters(radii)},
                "curvature": float(dataset["curvature"]),
                "half_radius": float(dataset["half_radius"]),
                "blank": int((~np.isfinite(dataset["loss"].values)).sum()),
            }
        )
    return {"landscape": pandas.DataFrame(rows)}


def captions(results: Results) -> dict[str, str]:
    """What is shown, where the paper has it, and what gave no number."""
    first = next(iter(results.values()))
    a, b = (first[name].values for name in "ab")
    blank = blanks(results)
    return {
        "contours": "NLL plus the L2 term at w + a·d1 + b·d2, minus its value at the model's own weights (cross), with the"
        f" same levels for all models. {a.size}×{b.size} points.{blank}",
        "surfaces": "The same in perspective, on one scale for all models"
        f"{_cut_words(results)}. Corresponds to figure 1 of Park and Kim.",
        "accuracy": f"Accuracy on the same points, from the same images.{blank}",
        "profiles": "Left: the loss above the model's own, mean over the circle at a distance (line), least and most (band)."
        " Right: mean accuracy there; dots mark where it is half-way down to chance.",
        "landscape": "Loss (NLL plus L2), its two parts and the accuracy at the model's own weights; mean rise of the loss at"
        " quarters of the farthest distance, over circles; curvature, the mean of both axes' second"
        " differences at the origin; the distance at which accuracy is half-way down to chance; how many points gave"
        " no number.",
    }


def descriptions(results: Results) -> dict[str, str]:
    """The figures in words."""
    words = " ".join(_describe(*one) for one in results.items())
    return {
        "contours": f"A contour map a model. {words}",
        "surfaces": f"A surface a model. {words}",
        "accuracy": f"A contour map of accuracy a model. {words}",
        "profiles": f"Lines over the distance from the weights. {words}",
    }


def rise(dataset: xr.Dataset) -> np.ndarray:
    """The loss above the model's own; NaN where it is no number."""
    values = dataset["loss"].values - float(dataset["origin_loss"])
    return np.where(np.isfinite(values), values, np.nan)


def blanks(results: Results) -> str:
    """Which models gave no number at how many points."""
    counts = {model: int((~np.isfinite(dataset["loss"].values)).sum()) for model, dataset in results.items()}
    said = [f"{model} at {count} of {results[model]['loss'].size}" for model, count in counts.items() if count]
    return f" No number came (NaN, or infinite) of {listing(said)} points, which are left blank." if said else ""


def _maps(
    results: Results,
    values: Callable[[xr.Dataset], np.ndarray],
    levels: np.ndarray,
    heading: str,
    label: str,
    *,
    word: Callable[[float], str] = lambda level: f"{level:.2g}" if abs(level) < 100 else f"{level:,.0f}",
) -> Figure:
    columns = columns_for(len(results))
    rows = ceil(len(results) / columns)
    labels = {float(level): word(float(level)).replace("-", "−") for level in levels}
    with figure_style():
        side = (WIDTH - 1.0) / max(columns, 2)
        names, above = _names(results, side - 0.35)
        figure, axes = grid(rows, columns, width=side * columns + 1.0, height=(side + above) * rows + 0.55)
        title(figure, heading)
        for panel, (model, dataset) in zip(axes.flat, results.items(), strict=False):
            a, b = dataset["a"].values, dataset["b"].values
            filled = draw_contours(panel, a, b, values(dataset), levels=levels, labels=labels)
            panel.set_title(names[model])
        _label_outside(axes, len(results))
        bar = figure.colorbar(filled, ax=axes, shrink=0.8, aspect=24, pad=0.02)
        bar.outline.set_visible(False)
        bar.set_label(label, color=MUTED)
        bar.set_ticks(list(labels), labels=list(labels.values()))
    return figure


def _names(results: Results, inches: float) -> tuple[dict[str, str], float]:
    """The models' names as titles, and how much room they take beyond one line."""
    names = {model: in_lines(model, inches) for model in results}
    return names, 0.14 * max(name.count("\n") for name in names.values())


def _label_outside(axes: np.ndarray, count: int) -> None:
    for spare in axes.flat[count:]:
        spare.set_visible(False)
    for row in axes:
        row[0].set_ylabel("b")
    for column in axes.T:
        last = [panel for panel in column if panel.get_visible()][-1]
        last.set_xlabel("a")
        last.tick_params(labelbottom=True)


def _cut_words(results: Results) -> str:
    height, cut = common_height([rise(dataset) for dataset in results.values()])
    return f", cut off {height:.3g} above the origin" if cut else ""


def _surfaces(results: Results) -> Figure:
    columns = columns_for(len(results))
    rows = ceil(len(results) / columns)
    height, _ = common_height([rise(dataset) for dataset in results.values()])
    with figure_style():
        side = WIDTH / max(columns, 2)
        names, above = _names(results, side - 0.35)
        figure = Figure(figsize=(side * columns, (0.95 * side + above) * rows + 0.35))
        title(figure, "Loss landscapes")
        for place, (model, dataset) in enumerate(results.items(), start=1):
            axes = figure.add_subplot(rows, columns, place, projection="3d")
            draw_surface(axes, dataset["a"].values, dataset["b"].values, rise(dataset), height=height)
            axes.set_title(names[model])
    return figure


def _profiles(results: Results) -> Figure:
    looks = series(results)
    with figure_style():
        height = 2.5 + legend_height(list(results), WIDTH)
        figure, axes = grid(1, 2, width=WIDTH, height=height, share=False)
        title(figure, "Loss and accuracy with the distance from the weights")
        rises, accuracies = axes[0]
        for model, dataset in results.items():
            _draw_profile(rises, accuracies, dataset, model=model, look=looks[model])
        tops = [float(np.nanmax(dataset["rise"].values)) for dataset in results.values()]
        if min(tops) > 0 and max(tops) > 20 * min(tops):
            # A power of ten: numbers on both sides of 0 then stand apart from it.
            rises.set_yscale("symlog", linthresh=10.0 ** ceil(log10(min(tops) / 2)))
            rises.yaxis.set_major_formatter("{x:g}")
        accuracies.set_ylim(0, 1)
        accuracies.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=""))
        for panel, label in ((rises, "rise of the loss"), (accuracies, "accuracy in %")):
            panel.set(xlabel="distance √(a² + b²)", ylabel=label)
            panel.margins(x=0)
        legend(figure, looks)
    return figure


def _draw_profile(rises: Axes, accuracies: Axes, dataset: xr.Dataset, *, model: str, look: Series) -> None:
    radius = dataset["radius"].values
    least, mean, most = (dataset[name].values for name in ("rise_least", "rise", "rise_most"))
    rises.fill_between(radius, least, most, color=look.colour, alpha=0.14, linewidth=0)
    for panel, values in ((rises, mean), (accuracies, dataset["ring_accuracy"].values)):
        panel.plot(radius, values, color=look.colour, linestyle=look.pattern, marker=look.marker, label=model, zorder=3)
    half, chance = float(dataset["half_radius"]), attribute(dataset, "chance")
    if isfinite(half) and isfinite(chance):
        level = (float(dataset["origin_accuracy"]) + chance) / 2
        accuracies.plot([half], [level], marker="o", markersize=6, color=look.colour, markeredgecolor=INK, zorder=4)


def _quarters(radii: np.ndarray) -> list[float]:
    """The radii nearest to quarters of the farthest."""
    wanted = radii[-1] * np.array([0.25, 0.5, 0.75, 1.0])
    return list(dict.fromkeys(float(radii[1:][np.abs(radii[1:] - one).argmin()]) for one in wanted if len(radii) > 1))


def _describe(model: str, dataset: xr.Dataset) -> str:
    far = float(dataset["radius"].values[-1])
    words = (
        f"{model}: loss {number(dataset, 'origin_loss'):.3g} and accuracy {percent(number(dataset, 'origin_accuracy'))} at its"
        " own weights"
    )
    if far > 0:
        words += f"; at distance {far:g} the loss is higher by {float(dataset['rise'].values[-1]):.3g} on average"
        words += f" and accuracy is {percent(float(dataset['ring_accuracy'].values[-1]))}"
    return words + "."
