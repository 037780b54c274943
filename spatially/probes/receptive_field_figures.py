"""Drawings and tables of receptive fields: figures 1-4 of Kim, and how much of the mass lies how near."""

from collections.abc import Iterator

import numpy as np
import pandas
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from spatially.drawing.maps import colour_bar, draw_map, scaled
from spatially.drawing.panels import WIDTH, grid, title
from spatially.drawing.style import INK, MUTED, figure_style, series
from spatially.drawing.values import Results, percent
from spatially.probes.receptive_field import NOISE

WORDS = {"given": "", "untrained": "untrained", "reset": "positions re-initialised"}


def figures(results: Results) -> dict[str, Figure]:
    """The fields, scaled and logarithmic, and the squares that hold shares of their mass."""
    return {
        "fields": _fields(results, "Effective receptive fields", logarithmic=False),
        "fields_log": _fields(results, "Effective receptive fields, log10(x + 1)", logarithmic=True),
        "squares": _squares(results),
    }


def tables(results: Results) -> dict[str, pandas.DataFrame]:
    """One row a model and variant."""
    rows = []
    for model, name, one in _each(results):
        rows.append(
            {
                "model": model,
                "variant": name,
                "layer": str(one["name"].values),
                "position": f"{int(one['row'])}, {int(one['column'])} of {int(one['rows'])}×{int(one['columns'])}",
                **{
                    f"side_{percent(float(s), unit=False)}": float(v)
                    for s, v in zip(one["share"], one["side"], strict=True)
                },
                "r_squared": float(one["r_squared"]),
                "sigma_x": float(one["sigma_x"]),
                "sigma_y": float(one["sigma_y"]),
                "change": float(one["change"]),
                "converged": "yes" if bool(one["converged"]) else "no",
                "signal": float(one["signal"]),
                "images": int(one["images"]),
            }
        )
    return {"receptive_field": pandas.DataFrame(rows)}


def captions(results: Results) -> dict[str, str]:
    """What is shown, and where the paper has it."""
    noisy = [_label(model, name) for model, name, one in _each(results) if float(one["signal"]) < NOISE]
    noise = (
        f" Of {', '.join(noisy)} the target is the same for every image but for rounding, so its field is noise: measure"
        " with style replknet, or before the final norm."
        if noisy
        else ""
    )
    return {
        "fields": "How much each pixel moves the marked position of the feature map, from least (dark) to most (bright) in"
        f" each panel. Corresponds to figures 1 to 4 of Kim.{noise}",
        "fields_log": "The same as log10(x + 1), x relative to a field spread evenly over the image: what is faint shows.",
        "squares": "Side of the smallest square around the position that holds a share of the field's mass.",
        "receptive_field": "Sides in pixels; the fit of a two-dimensional Gaussian to the field; change, the share of the mass"
        " that would lie elsewhere had the other half of the images been used; signal, how much the target varies over"
        " images, where rounding is all there is below 0.00001.",
    }


def descriptions(results: Results) -> dict[str, str]:
    """The figures in words."""
    said = [
        f"{_label(model, name)}: half of the mass within {float(one['side'].sel(share=0.5)):.0f} pixels"
        for model, name, one in _each(results)
        if np.isfinite(one["receptive_field"]).all()
    ]
    words = "; ".join(said) or "No field is defined"
    return {
        "fields": f"One map a model. {words}.",
        "fields_log": "The same maps on a logarithmic scale.",
        "squares": f"Dots a share of the mass. {words}.",
    }


def relative(field: np.ndarray) -> np.ndarray:
    """log10(x + 1), x the field relative to one spread evenly over the image."""
    return np.log10(field * field.size + 1)


def _each(results: Results) -> Iterator[tuple[str, str, xr.Dataset]]:
    """Every model's variants."""
    for model, dataset in results.items():
        if "variant" in dataset.dims:
            for name in dataset["variant"].values:
                yield model, str(name), dataset.sel(variant=name)
        else:
            yield model, str(dataset["variant"].values), dataset


def _label(model: str, name: str) -> str:
    return f"{model} ({WORDS[name]})" if WORDS.get(name) else model


def _fields(results: Results, heading: str, *, logarithmic: bool) -> Figure:
    """One column a model, one row a variant, as in figure 4; models alone fill the rows."""
    variants = [name for name in WORDS if any(name == one for _, one, _ in _each(results))]
    models = list(results)
    stacked = len(variants) > 1
    columns = min(len(models), 4)
    blocks = -(-len(models) // columns)
    rows = blocks * (len(variants) if stacked else 1)
    with figure_style():
        figure, axes = grid(rows, columns, width=max(1.75 * columns + 0.9, 3.4), height=1.95 * rows + 0.45, share=False)
        figure.set_layout_engine("compressed")
        title(figure, heading)
        for panel in axes.flat:
            panel.set_visible(False)
        picture = None
        for model, name, one in _each(results):
            number = models.index(model)
            row = (number // columns) * len(variants) + variants.index(name)
            panel = axes[row, number % columns]
            panel.set_visible(True)
            field = one["receptive_field"].transpose("y", "x").values
            picture = draw_map(panel, scaled(relative(field) if logarithmic else field), low=0, high=1)
            _mark(panel, one, field.shape)
            if name == variants[0]:
                panel.set_title(_broken(model), fontsize=7.5)
            if WORDS[name] and number % columns == 0:
                panel.set_ylabel(WORDS[name], fontsize=7.5)
        assert picture is not None
        colour_bar(figure, picture, axes, label="log10(x + 1)" if logarithmic else "", ends=("least", "most"))
    return figure


def _mark(panel: Axes, one: xr.Dataset, shape: tuple[int, int]) -> None:
    """A frame where the position comes from, of the size of its cell."""
    height, width = shape[0] / int(one["rows"]), shape[1] / int(one["columns"])
    corner = float(one["source_x"]) - width / 2 - 0.5, float(one["source_y"]) - height / 2 - 0.5
    panel.add_patch(Rectangle(corner, width, height, fill=False, edgecolor="white", linewidth=0.6, alpha=0.8))


def _broken(name: str, most: int = 26) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _squares(results: Results) -> Figure:
    found = list(_each(results))
    shares = [float(share) for share in found[0][2]["share"].values]
    looks = series(_label(model, name) for model, name, _ in found)
    with figure_style():
        figure, axes = grid(1, 1, width=min(WIDTH, 5.6), height=0.24 * max(len(found), 2) + 1.15, share=False)
        title(figure, "How near the mass lies")
        panel = axes[0, 0]
        for row, (model, name, one) in enumerate(found):
            sides = one["side"].values.astype(float)
            look = looks[_label(model, name)]
            panel.plot(sides, [row] * len(sides), color=look.colour, linewidth=1.0, alpha=0.5)
            panel.scatter(
                sides, [row] * len(sides), color=look.colour, s=[10 + 22 * share for share in shares], zorder=3
            )
        panel.set_yticks(range(len(found)), [_label(model, name) for model, name, _ in found], color=INK)
        panel.set_ylim(len(found) - 0.4, -0.6)
        panel.set_xlim(left=0)
        panel.grid(visible=False, axis="y")
        panel.spines["left"].set_visible(False)
        held = ", ".join(percent(share, unit=False) for share in shares)
        panel.set_xlabel(f"side in pixels of the squares that hold {held} %", color=MUTED)
    return figure
