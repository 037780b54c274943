"""Drawings and tables of the variance probe: the variance of the feature map along the model (figure 6 of Park)."""

from math import ceil

import numpy as np
import pandas
import xarray as xr
from matplotlib.figure import Figure

from spatially.drawing.depth import draw_depth, kinds_of, shade_handles
from spatially.drawing.panels import WIDTH, columns_for, grid, title
from spatially.drawing.style import INK, figure_style, series
from spatially.drawing.values import Results, listing

_DECADES = 50  # the ratio of largest and smallest from which a logarithmic scale shows more


def figures(results: Results) -> dict[str, Figure]:
    """A panel a model: the variance at each point of the residual stream."""
    looks = series(results)
    columns = min(columns_for(len(results)), 2)
    rows = ceil(len(results) / columns)
    with figure_style():
        figure, axes = grid(rows, columns, width=WIDTH, height=1.75 * rows + 0.9, share=False)
        title(figure, "How much the feature map varies over positions")
        for panel, (model, dataset) in zip(axes.flat, results.items(), strict=False):
            draw_depth(panel, dataset, "variance", looks[model])
            values = dataset["variance"].values
            present = values[np.isfinite(values)]
            if len(present) and present.min() > 0 and present.max() / present.min() > _DECADES:
                panel.set_yscale("log")
            panel.set_title(model)
        for spare in axes.flat[len(results) :]:
            spare.set_visible(False)
        for row in axes:
            row[0].set_ylabel("variance")
        figure.legend(
            handles=shade_handles(kinds_of(list(results.values()))), loc="outside lower right", ncols=3, labelcolor=INK
        )
    return {"depth": figure}


def tables(results: Results) -> dict[str, pandas.DataFrame]:
    """One row a model and layer."""
    frames = []
    for model, dataset in results.items():
        frame = dataset[["variance", "variance_low", "variance_high"]].to_dataframe().reset_index()
        frame.insert(0, "model", model)
        frames.append(frame)
    columns = ["model", "layer", "name", "kind", "rows", "columns", "variance", "variance_low", "variance_high"]
    joined = pandas.concat(frames, ignore_index=True)[columns]
    return {"variance": joined.rename(columns={"variance_low": "low", "variance_high": "high"})}


def captions(results: Results) -> dict[str, str]:
    """What the figure and the table show, and where the paper has it."""
    return {
        "depth": "Variance over positions of the feature map at each point of the residual stream, mean over channels and"
        " images, with 95 % intervals. Grey is what attention does, blue subsampling, white MLPs and convolutions."
        " Corresponds to figure 6 of Park and Kim.",
        "variance": "The variance at each layer, with the ends of its 95 % interval.",
    }


def descriptions(results: Results) -> dict[str, str]:
    """The figure in words, for readers who cannot see it."""
    return {"depth": "Variance by layer. " + " ".join(_describe(*one) for one in results.items())}


def _describe(model: str, dataset: xr.Dataset) -> str:
    values, kinds = dataset["variance"].values, dataset["kind"].values
    parts = []
    for kind in ("attention", "mlp", "convolution", "subsampling"):
        raised = [
            after > before for before, after, this in zip(values, values[1:], kinds[1:], strict=False) if this == kind
        ]
        if raised:
            parts.append(f"raised by {sum(raised)} of {len(raised)} {kind} layers")
    return f"{model}: from {values[0]:.3g} to {values[-1]:.3g}; {listing(parts)}."
