"""Drawings and tables of position biases: figures 5 and 6 and table 1 of Kim."""

import numpy as np
import pandas
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.markers import CARETUPBASE
from matplotlib.ticker import MaxNLocator

from spatially.drawing.maps import colour_bar, draw_map, scaled
from spatially.drawing.panels import WIDTH, grid, legend, legend_height, title
from spatially.drawing.style import MUTED, figure_style, series
from spatially.drawing.values import Results
from spatially.probes.position_bias import maps_of

MOST_COLUMNS = 12


def figures(results: Results) -> dict[str, Figure]:
    """The layers' maps, the first layer's at many queries, and the fits by layer."""
    return {"layers": _layers(results), "queries": _queries(results), "fits": _fits(results)}


def tables(results: Results) -> dict[str, pandas.DataFrame]:
    """Table 1: one row a model and layer."""
    rows = [
        {
            "model": model,
            "layer": int(layer) + 1,
            "name": str(one["name"].values),
            "kind": str(one["kind"].values),
            **{name: float(one[name]) for name in ("r_squared", "sigma_x", "sigma_y")},
        }
        for model, dataset in results.items()
        for layer in dataset["layer"].values
        for one in [dataset.sel(layer=layer)]
    ]
    return {"position_bias": pandas.DataFrame(rows)}


def captions(results: Results) -> dict[str, str]:
    """What is shown, and where the paper has it."""
    return {
        "layers": "What each layer adds to the attention of one query to every key, mean over heads, from least (dark) to most"
        " (bright) in each panel; of embeddings, how alike each patch's is to the query's. The second row, where there is one,"
        " is the same after the positions were drawn anew. Corresponds to figure 6 of Kim.",
        "queries": "The first layer's bias of many queries: each small map is one query's, at its own place in the grid."
        " Beside it the same after the positions were drawn anew. Corresponds to figure 5 of Kim.",
        "fits": "How far each layer's map is a two-dimensional Gaussian (R², 1 is entirely), and how wide, in patches; arrows"
        " at the top are wider than twice the grid, which is to say flat."
        " Corresponds to table 1 of Kim.",
        "position_bias": "The fits, as in table 1 of Kim. A map that is the same everywhere has none.",
    }


def descriptions(results: Results) -> dict[str, str]:
    """The figures in words."""
    said = []
    for model, dataset in results.items():
        values = dataset["r_squared"].values
        finite = values[np.isfinite(values)]
        spread = f"R² from {finite.min():.2f} to {finite.max():.2f}" if finite.size else "no fit"
        said.append(f"{model}: {dataset.sizes['layer']} layers, {spread}")
    words = "; ".join(said)
    return {
        "layers": f"One small map a layer. {words}.",
        "queries": "The first layer's maps, laid out by query.",
        "fits": f"Lines by layer. {words}.",
    }


def _layers(results: Results) -> Figure:
    lines: list[tuple[str, list[tuple[str, np.ndarray]]]] = []
    for model, dataset in results.items():
        for name, more in (("bias", ""), ("fresh_bias", ", drawn anew")):
            if name in dataset:
                maps = [(str(number + 1), one) for number, one in enumerate(maps_of(dataset, name))]
                lines += [
                    (model + more if first == 0 else "", maps[first : first + MOST_COLUMNS])
                    for first in range(0, len(maps), MOST_COLUMNS)
                ]
    columns = max(len(maps) for _, maps in lines)
    with figure_style():
        width = max(min(WIDTH, 0.62 * columns + 0.9), 4.2)
        figure, axes = grid(len(lines), columns, width=width, height=0.83 * len(lines) + 0.5, share=False)
        figure.set_layout_engine("compressed")
        title(figure, "What positions add to attention, layer by layer")
        for row, (label, maps) in zip(axes, lines, strict=True):
            for panel, content in zip(row, [*maps, *[None] * (columns - len(maps))], strict=True):
                if content is None:
                    panel.set_visible(False)
                    continue
                picture = draw_map(panel, scaled(content[1]), low=0, high=1)
                panel.set_xlabel(content[0], fontsize=7, labelpad=1)
            row[0].set_title(" ", fontsize=7.5)  # makes room; the label itself reaches over the columns beside it
            above = row[0].text(0, 1.06, label, fontsize=7.5, transform=row[0].transAxes, va="bottom")
            above.set_in_layout(False)
        colour_bar(figure, picture, axes, label="", ends=("least", "most"))
    return figure


def _queries(results: Results) -> Figure:
    columns = 2 if any("fresh_first_bias" in dataset for dataset in results.values()) else 1
    rows = len(results)
    with figure_style():
        figure, axes = grid(rows, columns, width=2.9 * columns + 0.8, height=2.9 * rows + 0.45, share=False)
        title(figure, "The first layer, query by query")
        for row, (model, dataset) in zip(axes, results.items(), strict=True):
            for panel, name in zip(row, ("first_bias", "fresh_first_bias")[:columns], strict=True):
                if name not in dataset:
                    panel.set_visible(False)
                    continue
                picture = draw_map(panel, _mosaic(dataset[name]))
                panel.set_title(model if name == "first_bias" else "positions drawn anew", fontsize=7.5)
                colour_bar(figure, picture, panel, label="")
    return figure


def _mosaic(maps: xr.DataArray, most: int = 7) -> np.ndarray:
    """The queries' maps side by side, a blank line between them; at most so many down and across."""
    values = maps.transpose("query_y", "query_x", "key_y", "key_x").values
    down, across = (
        np.unique(np.linspace(0, side - 1, min(side, most)).round().astype(int)) for side in values.shape[:2]
    )
    chosen = np.pad(values[np.ix_(down, across)], ((0, 0), (0, 0), (0, 1), (0, 1)), constant_values=np.nan)
    return np.concatenate([np.concatenate(list(row), axis=1) for row in chosen], axis=0)[:-1, :-1]


def _fits(results: Results) -> Figure:
    looks = series(results)
    with figure_style():
        height = 2.4 + legend_height(list(looks), WIDTH)
        figure, axes = grid(1, 3, width=WIDTH, height=height, share=False)
        title(figure, "Is it a Gaussian, and how wide?")
        labels = ("R²", "σ across (patches)", "σ down (patches)")
        for panel, name, label in zip(axes[0], ("r_squared", "sigma_x", "sigma_y"), labels, strict=True):
            for model, dataset in results.items():
                values = dataset[name].values.astype(float)
                look = looks[model]
                top = np.inf if name == "r_squared" else _ceiling(results)
                layers, beyond = np.arange(len(values)) + 1, values > top
                panel.plot(
                    layers,
                    np.where(beyond, np.nan, values),
                    color=look.colour,
                    linestyle=look.pattern,
                    marker=look.marker,
                )
                # An arrow where a width runs off the axis; without a line, which would point nowhere.
                for layer in layers[beyond]:
                    panel.plot([layer], [top], color=look.colour, marker=CARETUPBASE, markersize=6, clip_on=False)
            panel.set_title(label)
            panel.set_xlabel("layer", color=MUTED)
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes[0, 0].set_ylim(0, 1.02)
        for panel in axes[0, 1:]:
            panel.set_ylim(0, _ceiling(results))
        legend(figure, looks)
    return figure


def _ceiling(results: Results) -> float:
    """Fits of what is no Gaussian run to hundreds of patches: the axis ends at twice the widest grid."""
    return 2.0 * max(int(dataset[name].max()) for dataset in results.values() for name in ("rows", "columns"))
