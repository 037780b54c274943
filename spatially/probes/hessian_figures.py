"""Drawings and tables of the Hessian probe: histograms of the largest eigenvalues over mini-batches (figures 2-3 of Park)."""

import json

import numpy as np
import pandas
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from spatially.drawing.panels import WIDTH, DotPanel, draw_dots, grid, legend, legend_height, ordered, title
from spatially.drawing.style import INK, MUTED, SHADES, Series, figure_style, series
from spatially.drawing.values import Results, estimate, number, percent, with_interval

Array = NDArray[np.float64]
_TOGETHER = 3  # histograms that one panel holds without hiding each other
_WIDE = 8  # the ratio of the largest magnitude to a model's middle one from which a linear scale hides that model
_FEWEST, _MOST = 12, 48  # bins


def figures(results: Results) -> dict[str, Figure]:
    """The spectra of all models in one panel, and how many eigenvalues are negative."""
    found = {"spectrum": _spectrum(results)}
    shares = {model: estimate(dataset, "negative_share") for model, dataset in results.items()}
    found["negative"] = draw_dots(
        [DotPanel("", shares)],
        looks=series(results),
        order=ordered(list(results), lambda model: shares[model].value),
        columns=1,
        heading="How often the loss curves downwards",
        label="share of negative eigenvalues among those of largest magnitude"
        if all(_which(dataset) == "magnitude" for dataset in results.values())
        else "share of negative eigenvalues among those measured",
        ends=("never", "always"),
    )
    return found


def tables(results: Results) -> dict[str, pandas.DataFrame]:
    """One row a model."""
    rows = []
    for model, dataset in results.items():
        low, middle, high = np.percentile(_values(dataset), [5, 50, 95])
        negative, largest = estimate(dataset, "negative_share"), estimate(dataset, "largest")
        rows.append(
            {
                "model": model,
                "mini-batches": dataset.sizes["batch"],
                "weights": int(dataset["weights"]),
                "5th percentile": low,
                "median": middle,
                "95th percentile": high,
                "largest": largest.value,
                "largest_low": largest.low,
                "largest_high": largest.high,
                "negative_share": negative.value,
                "negative_low": negative.low,
                "negative_high": negative.high,
                "nll": float(dataset["nll"].mean()),
                "l2": number(dataset, "l2"),
                "weight_decay": number(dataset, "weight_decay"),
                "largest residual": float(dataset["residual"].max()),
                "converged_share": number(dataset, "converged_share"),
                "products": float(dataset["products"].mean()),
            }
        )
    return {"hessian": pandas.DataFrame(rows)}


def captions(results: Results) -> dict[str, str]:
    """What the figures and the table show, and where the paper has it."""
    left = [
        f"{model}: {percent(1 - number(dataset, 'converged_share'))}"
        for model, dataset in results.items()
        if number(dataset, "converged_share") < 1
    ]
    unfinished = f" Not converged: {', '.join(left)} of the eigenvalues." if left else ""
    return {
        "spectrum": "Eigenvalues of the Hessian of the training loss (NLL plus weight decay) with respect to the weights, "
        f"{_how(results)} of each mini-batch, as a histogram over mini-batches. Narrow and close to 0 is flat; on the grey "
        f"side the loss curves downwards. Corresponds to figure 2 of Park and Kim.{unfinished}",
        "negative": "Share of negative eigenvalues among those in the histogram, with 95 % intervals over mini-batches: how "
        "far from convex the loss is where the model stands. Corresponds to figures 2 and 3 of Park and Kim.",
        "hessian": "The spectra in numbers. Weight decay is part of every eigenvalue; the largest is the mean over "
        "mini-batches of each one's most positive eigenvalue; products counts Hessian-vector products a mini-batch; "
        "the residual bounds how far an eigenvalue is from a true one.",
    }


def descriptions(results: Results) -> dict[str, str]:
    """The figures in words, for readers who cannot see them."""
    spread = []
    for model, dataset in results.items():
        low, middle, high = np.percentile(_values(dataset), [5, 50, 95])
        spread.append(f"{model}: median {middle:.3g}, 90 % between {low:.3g} and {high:.3g}")
    shares = [f"{model} {with_interval(estimate(data, 'negative_share'))}" for model, data in results.items()]
    return {
        "spectrum": "Histograms of Hessian eigenvalues over mini-batches. " + "; ".join(spread) + ".",
        "negative": "Share of negative eigenvalues: " + ", ".join(shares) + ".",
    }


def _spectrum(results: Results) -> Figure:
    """One histogram a model on common bins, as shares of its eigenvalues; many models stand below each other."""
    looks = series(results)
    values = {model: _values(dataset) for model, dataset in results.items()}
    width = _linear_width(values)
    edges = _edges(values, width)
    apart = len(values) > _TOGETHER
    across = min(WIDTH, 5.2)
    with figure_style():
        height = 0.62 * len(values) + 0.9 if apart else 2.7 + legend_height(list(looks), across)
        figure, axes = grid(len(values) if apart else 1, 1, width=WIDTH if apart else across, height=height)
        title(figure, "How the loss curves: the Hessian's largest eigenvalues")
        for place, (model, found) in enumerate(values.items()):
            _steps(axes[place if apart else 0, 0], found, edges, looks[model])
        for panel in axes.flat:
            _spectrum_axis(panel, edges, width)
        axes[-1, 0].set_xlabel("eigenvalue" + ("" if width is None else ", linear near 0 and logarithmic away from it"))
        axes[0, 0].set_ylim(0, axes[0, 0].get_ylim()[1] * 1.04)
        if edges[0] < 0 < edges[-1]:
            axes[0, 0].annotate(
                "negative", (0, 1), (-4, -3), xycoords=("data", "axes fraction"), textcoords="offset points", ha="right",
                va="top", color=MUTED, fontsize=7,
            )  # fmt: skip
        if apart:
            for panel, model in zip(axes[:, 0], values, strict=True):
                panel.set_ylabel(model, rotation=0, ha="right", va="center", color=INK)
            figure.supylabel("share of eigenvalues (%)", color=MUTED, fontsize=8)
        else:
            axes[0, 0].set_ylabel("share of eigenvalues (%)")
            legend(figure, looks)
    return figure


def _spectrum_axis(panel: Axes, edges: Array, width: float | None) -> None:
    """The common scale, 0 marked, what curves downwards on grey."""
    if edges[0] < 0:
        panel.axvspan(edges[0], min(0, edges[-1]), color=SHADES["attention"], alpha=0.6, linewidth=0, zorder=0)
    panel.axvline(0, color=MUTED, linewidth=0.8, zorder=1)
    if width is not None:
        panel.set_xscale("asinh", linear_width=width)
        panel.set_xticks(_ticks(edges[0], edges[-1], width))
        panel.xaxis.set_major_formatter(lambda value, _: f"{value:,.6g}".replace("-", "−"))
        panel.minorticks_off()
    panel.set_xlim(edges[0], edges[-1])


def _steps(panel: Axes, values: Array, edges: Array, look: Series) -> None:
    heights = 100 * np.histogram(values, edges)[0] / len(values)
    panel.stairs(heights, edges, fill=True, color=look.colour, alpha=0.16, linewidth=0, zorder=2)
    panel.stairs(heights, edges, color=look.colour, linestyle=look.pattern, linewidth=1.3, zorder=3)
    peak = int(heights.argmax())
    panel.plot(edges[peak : peak + 2].mean(), heights[peak], color=look.colour, marker=look.marker, zorder=4)


def _linear_width(values: dict[str, Array]) -> float | None:
    """Up to where the scale is linear; None where all of it is: no model's spectrum is then squeezed by another's."""
    middles = [float(np.median(np.abs(one))) for one in values.values()]
    largest = max(float(np.abs(one).max()) for one in values.values())
    smallest = min((middle for middle in middles if middle > 0), default=0.0)
    return smallest / 2 if 0 < _WIDE * smallest < largest else None


def _edges(values: dict[str, Array], width: float | None) -> Array:
    """Edges of bins of equal width on the scale, 0 among them, so that no bin holds both signs."""
    every = np.concatenate(list(values.values()))
    shown = every if width is None else np.arcsinh(every / width)
    low, high = min(shown.min(), 0.0), max(shown.max(), 0.0)
    fewest = min(len(one) for one in values.values())
    wanted = round(fewest ** (1 / 2) * (2 if width is None else 4))  # several models share a wide scale
    step = (high - low or 1.0) / np.clip(wanted, _FEWEST, _MOST)
    # At least one empty bin on either side.
    edges = step * np.arange(np.floor(low / step) - 1, np.ceil(high / step) + 2)
    return edges if width is None else np.sinh(edges) * width


def _ticks(low: float, high: float, width: float) -> Array:
    """0 and powers of ten, not more than about nine."""
    first, last = np.ceil(np.log10(width)), np.floor(np.log10(max(abs(low), abs(high))))
    every = max(1, int(np.ceil((last - first + 1) / (4 if low < -width else 8))))
    sizes = 10.0 ** np.arange(first, last + 1, every)
    ticks = np.concatenate([-sizes[::-1], [0.0], sizes])
    return ticks[(ticks >= low) & (ticks <= high)]


def _values(dataset: xr.Dataset) -> Array:
    found = np.asarray(dataset["eigenvalue"].values, dtype=float).ravel()
    return found[np.isfinite(found)]


def _which(dataset: xr.Dataset) -> str:
    options = json.loads(dataset.attrs.get("options", "{}"))
    return str(options.get("which", "magnitude"))


def _how(results: Results) -> str:
    """For example "the 5 of largest magnitude"."""
    said = set()
    for dataset in results.values():
        ranks = dataset.sizes["rank"]
        ends = ranks // 2
        both = f"the {ends} most positive and the {ends} most negative"
        said.add(f"the {ranks} of largest magnitude" if _which(dataset) == "magnitude" else both)
    return " or ".join(sorted(said))
