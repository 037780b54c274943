"""Drawing and table of the line between two checkpoints."""

import numpy as np
import pandas
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from spatially.drawing.panels import WIDTH, Curve, draw_curve, grid, legend, legend_height, title
from spatially.drawing.style import FAINT, figure_style, series
from spatially.drawing.values import Results, percent
from spatially.probes.landscape_figures import blanks

PARTS = ("nll", "l2", "loss", "accuracy")


def figures(results: Results) -> dict[str, Figure]:
    """Loss and accuracy along the line, all models together."""
    looks = series(results)
    with figure_style():
        height = 2.6 + legend_height(list(results), WIDTH)
        figure, axes = grid(1, 2, width=WIDTH, height=height, share=False)
        title(figure, "From the model's weights (0) to the other checkpoint's (1)")
        losses, accuracies = axes[0]
        for model, dataset in results.items():
            t, l2 = dataset["t"].values, dataset["l2"].values
            ends = [_finite(dataset[f"nll{end}"].values + l2) for end in ("", "_low", "_high")]
            draw_curve(losses, Curve(t, *ends), name=model, look=looks[model])
            shares = [_finite(dataset[f"accuracy{end}"].values) for end in ("", "_low", "_high")]
            draw_curve(accuracies, Curve(t, *shares), name=model, look=looks[model])
        losses.set_ylabel("loss (NLL + L2)")
        if _wide(results):
            losses.set_yscale("log")
            losses.yaxis.set_major_formatter("{x:g}")
            losses.yaxis.set_minor_formatter(NullFormatter())
        accuracies.set(ylabel="accuracy in %", ylim=(0, 1))
        accuracies.yaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=""))
        for panel in (losses, accuracies):
            panel.set_xlabel("t")
            for end in (0, 1):
                panel.axvline(end, color=FAINT, linewidth=0.8, zorder=1)
        legend(figure, looks, band="95 % interval")
    return {"line": figure}


def tables(results: Results) -> dict[str, pandas.DataFrame]:
    """One row a model: both ends, and the barrier between them."""
    rows = []
    for model, dataset in results.items():
        ends = {f"{part}_{t}": float(dataset[part].sel(t=float(t))) for t in (0, 1) for part in PARTS}
        rows.append(
            {"model": model, **ends, "barrier": float(dataset["barrier"]), "barrier_t": float(dataset["barrier_t"])}
        )
    return {"interpolation": pandas.DataFrame(rows)}


def captions(results: Results) -> dict[str, str]:
    """What is shown, and what gave no number."""
    return {
        "line": "Loss (NLL plus the L2 term) and accuracy at (1 − t)·w0 + t·w1, from the model (t = 0) through the other"
        f" checkpoint (t = 1) and beyond both.{blanks(results)}",
        "interpolation": "Both ends, and the barrier: how far the loss between them rises above the straight line through"
        " their losses, and where. About 0: one basin.",
    }


def descriptions(results: Results) -> dict[str, str]:
    """The figure in words."""
    said = [
        f"{model}: loss {float(one['loss'].sel(t=0.0)):.3g} and accuracy {percent(float(one['accuracy'].sel(t=0.0)))} at the"
        f" model, {float(one['loss'].sel(t=1.0)):.3g} and {percent(float(one['accuracy'].sel(t=1.0)))} at the other, barrier"
        f" {float(one['barrier']):.3g}."
        for model, one in results.items()
    ]
    return {"line": "A line a model over t. " + " ".join(said)}


def _wide(results: Results) -> bool:
    """Whether the losses differ too much for an even scale."""
    values = np.concatenate([dataset["loss"].values for dataset in results.values()])
    values = values[np.isfinite(values)]
    return bool(values.size and values.min() > 0 and values.max() > 20 * values.min())


def _finite(values: np.ndarray) -> np.ndarray:
    return np.where(np.isfinite(values), values, np.nan)
