"""Drawings and tables of the noise of one frequency: accuracy drop against frequency (figure 5 of Park and Kim)."""

import json
from typing import Any

import numpy as np
import pandas
import torch
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from spatially.drawing.panels import Curve, draw_curve, draw_level, grid, legend, legend_height, title
from spatially.drawing.style import FAINT, MUTED, figure_style, series
from spatially.drawing.values import Estimate, Results, estimate, listing, percent
from spatially.errors import UserError

BAND = "95 % interval"
_BANDED = 6  # models whose bands can be told apart
SHOWN = 5  # example images at most
CORNER = 48  # pixels of the noise, enlarged: a page has no room for those of a whole image


def figures(results: Results) -> dict[str, Figure]:
    """Left, the drop by frequency as in the paper; right, the accuracy itself, with each model's on clean images."""
    looks = series(results)
    width = 7.2
    with figure_style():
        figure, axes = grid(1, 2, width=width, height=3.0 + legend_height([*looks, BAND], width), share=False)
        title(figure, "Accuracy lost to noise of one frequency")
        drops, accuracies = axes[0]
        draw_level(drops, 0.0, name="_no loss", pattern="-", colour=FAINT)
        for name, dataset in results.items():
            for panel, what in ((drops, "drop"), (accuracies, "accuracy")):
                draw_curve(panel, _curve(dataset, what), name=name, look=looks[name], band=_banded(results))
            clean = float(dataset["clean_accuracy"])
            draw_level(
                accuracies, clean, name=f"_{name} on clean images", pattern=(0, (1, 2)), colour=looks[name].colour
            )
        drops.set_title("accuracy drop")
        drops.set_ylabel("accuracy drop (percentage points)")
        accuracies.set_title("accuracy (dotted: on clean images)")
        accuracies.set_ylabel("top-1 accuracy (%)")
        accuracies.set_ylim(0, None)
        for panel in (drops, accuracies):
            _axis(panel, results)
        legend(figure, looks, band=BAND if _banded(results) else "")
    return {"drop": figure}


def shown(results: Results, examples: xr.Dataset) -> dict[str, Figure]:
    """One image as the models saw it, at frequencies from low to high, and below it a corner of the noise alone."""
    dataset = next(iter(results.values()))
    frequencies = _spread(dataset["frequency"].values)
    try:
        image, noises = _noises(dataset, examples, frequencies)
    except UserError:  # the examples are of another model's size, too small for these rings
        return {}
    with figure_style():
        side = 1.05
        figure, axes = grid(
            2, len(noises) + 1, width=side * (len(noises) + 1) + 0.5, height=2 * side + 0.75, share=False
        )
        title(figure, "What the models were shown")
        for column, noise in zip(axes.T, [torch.zeros_like(image), *noises], strict=True):
            _show(column[0], image + noise, smooth=True)
            _show(column[1], 0.5 + noise[:, :CORNER, :CORNER], smooth=False)
        for panel, name in zip(axes[0], ["clean", *(f"{one:g}π" for one in frequencies)], strict=True):
            panel.set_title(name, loc="center", color=MUTED, fontsize=7.5)
        for panel, name in zip(axes[:, 0], ("image", "noise, a corner"), strict=True):
            panel.set_ylabel(name, fontsize=7.5)
    return {"images": figure}


def tables(results: Results) -> dict[str, pandas.DataFrame]:
    """One row a model and frequency, shares as fractions 0..1."""
    rows = [
        {
            "model": model,
            "frequency": float(frequency),
            **_columns("accuracy", estimate(dataset, "accuracy", frequency=frequency)),
            **_columns("drop", estimate(dataset, "drop", frequency=frequency)),
            "clean_accuracy": float(dataset["clean_accuracy"]),
        }
        for model, dataset in results.items()
        for frequency in dataset["frequency"].values
    ]
    return {"accuracy": pandas.DataFrame(rows)}


def captions(results: Results) -> dict[str, str]:
    """What the figures and the table show, and where the paper has it."""
    return {
        "drop": f"Accuracy lost (left) and left over (right) when random noise of one frequency is added to the images:"
        f" {_noise(results)}. {'Bands are' if _banded(results) else 'The table has the'} 95 % intervals over images."
        " Corresponds to figure 5 of Park and Kim.",
        "images": f"One image with noise of rising frequency, and on grey the noise alone in a corner of {CORNER}×{CORNER}"
        " pixels. What leaves the range of colours is"
        " cut for display only.",
        "accuracy": "Accuracy and its drop as fractions by frequency (in units of π), with the ends of their 95 % intervals.",
    }


def descriptions(results: Results) -> dict[str, str]:
    """The figures in words, for readers who cannot see them."""
    return {
        "drop": "Line charts of the accuracy drop and the accuracy against the frequency of the noise. "
        + "; ".join(_describe(*one) for one in results.items())
        + ".",
        "images": "An image under noise from coarse blotches, at low frequencies, to fine grain, at high ones.",
    }


def _describe(model: str, dataset: xr.Dataset) -> str:
    drop, frequency = dataset["drop"].values, dataset["frequency"].values
    worst = int(drop.argmax())
    return (
        f"{model}: {percent(float(dataset['clean_accuracy']))} on clean images, loses {100 * drop[0]:.1f} points at"
        f" {frequency[0]:g}π, {100 * drop[-1]:.1f} at {frequency[-1]:g}π, most ({100 * drop[worst]:.1f}) at"
        f" {frequency[worst]:g}π"
    )


def _banded(results: Results) -> bool:
    return len(results) <= _BANDED


def _options(dataset: xr.Dataset) -> dict[str, Any]:
    return dict(json.loads(str(dataset.attrs["options"])))


def _noise(results: Results) -> str:
    """The noise in words, each kind once."""
    kinds = dict.fromkeys(_kind(_options(dataset)) for dataset in results.values())
    return listing(kinds)


def _kind(options: dict[str, Any]) -> str:
    width = f"rings of ± {options['half_width']:.3g}π"
    if options["style"] == "authors":
        return f"square {width} of signs ± {options['size']:g} in normalised space, whose energy grows with frequency"
    return f"round {width}, of root mean square {options['size']:g} at every frequency"


def _curve(dataset: xr.Dataset, name: str) -> Curve:
    return Curve(*(dataset[one].values for one in ("frequency", name, f"{name}_low", f"{name}_high")))


def _axis(panel: Axes, results: Results) -> None:
    highest = max(1.0, *(float(dataset["frequency"].max()) for dataset in results.values()))
    panel.set_xlim(0, highest)
    ticks = np.arange(0, highest + 0.01, 0.2)
    panel.set_xticks(ticks, ["0", *("π" if np.isclose(one, 1) else f"{one:.1f}π" for one in ticks[1:])])
    panel.set_xlabel("frequency of the noise")
    panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}".replace("-", "−")))


def _columns(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def _spread(frequencies: np.ndarray) -> list[float]:
    places = np.linspace(0, len(frequencies) - 1, min(SHOWN, len(frequencies))).round().astype(int)
    return [float(frequencies[place]) for place in places]


def _noises(
    dataset: xr.Dataset, examples: xr.Dataset, frequencies: list[float]
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The first example and the very noise that was added to it."""
    from spatially.perturb.frequency import draw_noise

    options = _options(dataset)
    image = torch.from_numpy(np.ascontiguousarray(examples["pixels"].values[0])).float() / 255
    index = torch.from_numpy(np.asarray(examples["index"].values[:1], dtype=np.int64))
    draw = draw_noise(tuple(image.shape), index=index, seed=options["seed"], style=options["style"])
    unit = torch.ones(3, 1, 1)
    if options["style"] == "authors":
        unit = torch.tensor(json.loads(str(dataset.attrs["preprocessing"]))["std"]).view(3, 1, 1)
    found = [draw.at(one, half_width=options["half_width"], size=options["size"])[0] * unit for one in frequencies]
    return image, found


def _show(axes: Axes, image: torch.Tensor, *, smooth: bool) -> None:
    """Smoothed where a page has fewer points than the image pixels."""
    pixels = image.clamp(0, 1).permute(1, 2, 0).numpy()
    axes.imshow(pixels, interpolation="auto" if smooth else "nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)
