"""Drawings and tables of the spatial interaction ratio: by depth, one panel a threshold (figure 5 of Heo)."""

import numpy as np
import pandas
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from spatially.drawing.panels import WIDTH, Curve, draw_curve, grid, legend, legend_height, title
from spatially.drawing.style import figure_style, series
from spatially.drawing.values import Results, listing, percent

BAND = "95 % interval"


def figures(results: Results) -> dict[str, Figure]:
    """One panel a threshold; models of any depth side by side, from their first layer to their last."""
    looks = series(results)
    thresholds = _thresholds(results)
    with figure_style():
        height = 2.5 + legend_height([*looks, BAND], WIDTH)
        figure, axes = grid(1, len(thresholds), width=WIDTH, height=height)
        title(figure, "Over how much of the image a layer lets positions interact")
        for panel, threshold in zip(axes[0], thresholds, strict=True):
            panel.set_title(f"attention above {percent(threshold)}")
            for model, dataset in results.items():
                curve = _curve(dataset, threshold)
                if curve is not None:
                    draw_curve(panel, curve, name=model, look=looks[model])
            panel.set_xlim(0, 1)
            panel.set_ylim(0, None)
            panel.set_xticks([0, 0.5, 1], ["first", "half-way", "last"])
            panel.yaxis.set_major_formatter(PercentFormatter(xmax=1, symbol=""))
            panel.set_xlabel("layer")
        axes[0, 0].set_ylabel("spatial interaction ratio (%)")
        legend(figure, looks, band=BAND)
    return {"depth": figure}


def tables(results: Results) -> dict[str, pandas.DataFrame]:
    """One row a model, threshold and layer, shares as fractions 0..1; `bound` is what no weights can exceed."""
    frames = []
    for model, dataset in results.items():
        names = ["interaction_ratio", "interaction_ratio_low", "interaction_ratio_high"]
        frame = dataset[names].to_dataframe().reset_index()
        frame.insert(0, "model", model)
        frames.append(frame)
    columns = ["model", "threshold", "layer", "name", "kind", "field", "rows", "columns", "heads"]
    columns += ["interaction_ratio", "interaction_ratio_low", "interaction_ratio_high", "bound"]
    joined = pandas.concat(frames, ignore_index=True)[columns]
    return {"interaction": joined.rename(columns={"interaction_ratio_low": "low", "interaction_ratio_high": "high"})}


def captions(results: Results) -> dict[str, str]:
    """What the figure and the table show, and where the paper has it."""
    return {
        "depth": "Share of the positions that a query attends to by more than the threshold in at least one head (or as many"
        " as min_heads asks), mean over queries and images, layer by layer. A k×k convolution on H×W positions counts"
        " k²/(H·W), whatever the threshold. Bands are 95 % intervals. Corresponds to figure 5 of Heo."
        + _left_out(results),
        "interaction": "Every layer as fractions, with the ends of the 95 % interval and the most it could be: a query's"
        " weights sum to 1, so that it reaches at most heads/threshold positions.",
    }


def _left_out(results: Results) -> str:
    """Attention that no layer shows, by model."""
    left = [f"{model}: {text}" for model, one in results.items() if (text := one.attrs.get("attention_left_out"))]
    return f" Not among the layers: {' | '.join(left)}." if left else ""


def descriptions(results: Results) -> dict[str, str]:
    """The figure in words, for readers who cannot see it."""
    return {"depth": "Spatial interaction ratio by layer. " + " ".join(_describe(*one) for one in results.items())}


def _describe(model: str, dataset: xr.Dataset) -> str:
    parts = []
    for threshold in np.atleast_1d(dataset["threshold"].values):
        values = dataset["interaction_ratio"].sel(threshold=threshold).values
        parts.append(
            f"above {percent(float(threshold))} {percent(float(values[0]))} in the first layer,"
            f" {percent(float(values[-1]))} in the last"
        )
    return f"{model}: {listing(parts)}."


def _thresholds(results: Results) -> list[float]:
    return sorted({float(one) for dataset in results.values() for one in np.atleast_1d(dataset["threshold"].values)})


def _curve(dataset: xr.Dataset, threshold: float) -> Curve | None:
    if not np.isclose(dataset["threshold"].values, threshold).any():
        return None
    line = dataset.sel(threshold=threshold, method="nearest")
    count = line.sizes["layer"]
    depth = np.linspace(0, 1, count) if count > 1 else np.array([0.5])
    value, low, high = (
        np.asarray(line["interaction_ratio" + end].values, dtype=float) for end in ("", "_low", "_high")
    )
    return Curve(depth, value, low, high)
