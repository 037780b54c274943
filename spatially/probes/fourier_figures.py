"""Drawings and tables of the Fourier probe: spectra by depth, and the highest frequency along the model (figure 4 of Park)."""

import matplotlib
import numpy as np
import pandas
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.colors import Colormap
from matplotlib.figure import Figure

from spatially.drawing.depth import draw_depth, kinds_of, shade_handles
from spatially.drawing.panels import WIDTH, grid, title
from spatially.drawing.style import INK, MUTED, figure_style, series
from spatially.drawing.values import Results, listing


def figures(results: Results) -> dict[str, Figure]:
    """A row a model: its spectra, first layer pale to last layer dark, and the highest frequency layer by layer."""
    looks = series(results)
    with figure_style():
        figure, axes = grid(len(results), 2, width=WIDTH, height=1.75 * len(results) + 0.9, share=False)
        title(figure, "Which frequencies are left in the feature map, and where they are lost")
        for (spectra, highest), (model, dataset) in zip(axes, results.items(), strict=True):
            _draw_spectra(spectra, dataset)
            draw_depth(highest, dataset, "high_frequency", looks[model])
            spectra.set_title(model)
            highest.set_title("at the highest frequency of each layer")
        _share_limits(axes)
        figure.legend(
            handles=shade_handles(kinds_of(list(results.values()))), loc="outside lower right", ncols=3, labelcolor=INK
        )
    return {"spectra": figure}


def tables(results: Results) -> dict[str, pandas.DataFrame]:
    """One row a model and layer: the relative log amplitude at its highest frequency."""
    frames = []
    for model, dataset in results.items():
        frame = dataset[["high_frequency", "high_frequency_low", "high_frequency_high"]].to_dataframe().reset_index()
        frame.insert(0, "model", model)
        frames.append(frame.rename(columns={"high_frequency": "value", "highest_frequency": "frequency"}))
    columns = ["model", "layer", "name", "kind", "rows", "columns", "frequency", "value"]
    columns += ["high_frequency_low", "high_frequency_high"]
    joined = pandas.concat(frames, ignore_index=True)[columns]
    return {"high_frequency": joined.rename(columns={"high_frequency_low": "low", "high_frequency_high": "high"})}


def captions(results: Results) -> dict[str, str]:
    """What the figure and the table show, and where the paper has it."""
    return {
        "spectra": "Log amplitude of the Fourier-transformed feature map along the half diagonal, relative to frequency 0,"
        " mean over channels and images. Left: every point of the residual stream, from the stem (pale) to the last layer"
        " (dark). Right: its value at each layer's highest frequency, with 95 % intervals; grey is what attention does,"
        " blue subsampling, white MLPs and convolutions. Frequencies are true: the last one of a small map is well below"
        " π. Corresponds to figure 4 of Park and Kim.",
        "high_frequency": "Relative log amplitude at the highest frequency (in units of π) of each layer, with the ends of"
        " its 95 % interval. White noise has 0.347; a map of 2×2 or fewer has no frequency but 0, and no value here.",
    }


def descriptions(results: Results) -> dict[str, str]:
    """The figure in words, for readers who cannot see it."""
    return {"spectra": "Spectra by depth. " + " ".join(_describe(*one) for one in results.items())}


def _describe(model: str, dataset: xr.Dataset) -> str:
    values = dataset["high_frequency"].values
    seen = np.isfinite(values)
    if not seen.any():
        return f"{model}: no map has a frequency but 0."
    values, kinds = values[seen], dataset["kind"].values[seen][1:]
    changes = np.diff(values)
    parts = [
        f"{float(np.mean(changes[kinds == kind])):+.2f} a layer by {kind}"
        for kind in ("attention", "mlp", "convolution", "subsampling")
        if (kinds == kind).any()
    ]
    ends = f"{model}: {values[0]:.2f} after the stem, {values[-1]:.2f} at the end"
    return f"{ends}; {listing(parts)}." if parts else f"{ends}."


def _draw_spectra(axes: Axes, dataset: xr.Dataset) -> None:
    count = dataset.sizes["layer"]
    colours = _by_depth()
    frequency = dataset["frequency"].values
    for layer in range(count):
        values = dataset["log_amplitude"].isel(layer=layer).values
        present = np.isfinite(values)
        shown = colours(0.12 + 0.85 * layer / max(count - 1, 1))
        axes.plot(frequency[present], values[present], color=shown, linewidth=1.0, label=f"layer {layer}")
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25π", "0.5π", "0.75π", "π"])
    axes.set_xlabel("frequency")
    axes.set_ylabel("Δ log amplitude")
    axes.tick_params(axis="x", labelcolor=MUTED)


def _by_depth() -> Colormap:
    return matplotlib.colormaps["viridis_r"]


def _share_limits(axes: np.ndarray) -> None:
    """The same scale up for all models, so that they can be compared."""
    limits = [panel.get_ylim() for panel in axes.flat]
    for panel in axes.flat:
        panel.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
