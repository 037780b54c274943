"""Drawings and tables of what models cost: speed and memory against size and work; a table like tables 1-3 of Heo."""

from collections.abc import Callable, Mapping, Sequence
from math import ceil, floor, isfinite, log10
from typing import Any, NamedTuple

import pandas
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from spatially.drawing.panels import WIDTH, grid, legend, legend_height, title
from spatially.drawing.style import MUTED, Series, figure_style, series
from spatially.drawing.values import Estimate, Results, estimate, listing, number

MEBIBYTE = 2**20


class Quantity(NamedTuple):
    """What an axis shows."""

    label: str
    of: Callable[[xr.Dataset, dict[str, str]], Estimate]


def _exactly(name: str, unit: float) -> Callable[[xr.Dataset, dict[str, str]], Estimate]:
    def read(dataset: xr.Dataset, place: dict[str, str]) -> Estimate:
        value = number(dataset, name, **place) / unit
        return Estimate(value, value, value)

    return read


def _memory(dataset: xr.Dataset, place: dict[str, str]) -> Estimate:
    value = number(dataset, "peak_memory", **place) / number(dataset, "batch_size", **place) / MEBIBYTE
    return Estimate(value, value, value)


MACS = Quantity("GMACs an image", _exactly("macs", 1e9))
PARAMETERS = Quantity("parameters (millions)", _exactly("parameters", 1e6))
ACTIVATIONS = Quantity("activations an image (millions)", _exactly("activations", 1e6))
SPEED = Quantity("images a second", lambda dataset, place: estimate(dataset, "throughput", **place))
MEMORY = Quantity("peak memory an image (MiB)", _memory)
PANELS = ((MACS, SPEED), (PARAMETERS, SPEED), (ACTIVATIONS, SPEED), (ACTIVATIONS, MEMORY))


def figures(results: Results) -> dict[str, Figure]:
    """One figure a step: speed against work and size, and memory; compiled models hollow, joined to the eager ones."""
    return {step: _scatter(results, step) for step in _present(results, "step")}


def _scatter(results: Results, step: str) -> Figure:
    looks, modes = series(results), _present(results, "mode")
    handles = _handles(looks, modes)
    below = legend_height([str(one.get_label()) for one in handles], WIDTH)
    with figure_style():
        figure, axes = grid(2, 2, width=WIDTH, height=4.8 + below, share=False)
        title(figure, {"inference": "What inference costs", "training": "What a training step costs"}[step])
        for panel, (across, up) in zip(axes.flat, PANELS, strict=True):
            for name, dataset in results.items():
                places = [{"step": step, "mode": mode} for mode in modes]
                points = [(across.of(dataset, place).value, up.of(dataset, place), place["mode"]) for place in places]
                _draw_points(panel, [one for one in points if one[1].defined], name=name, look=looks[name])
            panel.set_xlabel(across.label)
            panel.set_ylabel(up.label)
            _scale(panel)
        legend(figure, {}, levels=handles)
    return figure


def tables(results: Results) -> dict[str, pandas.DataFrame]:
    """One row a model, step and mode, laid out as tables 1-3."""
    rows = [
        _row(model, dataset, {"step": str(step), "mode": str(mode)})
        for model, dataset in results.items()
        for step in dataset["step"].values
        for mode in dataset["mode"].values
    ]
    return {"cost": pandas.DataFrame(rows)}


def captions(results: Results) -> dict[str, str]:
    """What the figures and the table show, and where the paper has it."""
    compiled = " Hollow marks are compiled." if "compiled" in _present(results, "mode") else ""
    steps = {"inference": "a forward pass", "training": "forward pass, loss and backward pass, without an optimiser"}
    machines = listing(dict.fromkeys(_machine(dataset) for dataset in results.values()))
    found = {
        step: f"Speed against work, size and activations, and peak memory beyond weights and images, of {steps[step]}"
        f" ({_batches(results, step)}; {machines}). Speed is the median over rounds, vertical lines span the"
        f" quartiles.{compiled}"
        for step in _present(results, "step")
    }
    found["cost"] = (
        "Sizes and work are of one image, memory and speed of the batch; speed with its quartiles over rounds. FLOPs in"
        " tables 1 and 2 of Heo are the GMACs here."
    )
    return found


def descriptions(results: Results) -> dict[str, str]:
    """The figures in words, for readers who cannot see them."""
    return {
        step: "Scatter charts. " + "; ".join(_describe(*one, step) for one in results.items()) + "."
        for step in _present(results, "step")
    }


def _describe(model: str, dataset: xr.Dataset, step: str) -> str:
    speeds = [
        f"{number(dataset, 'throughput', step=step, mode=mode):.3g} images/s {mode}" for mode in _of(dataset, "mode")
    ]
    macs, parameters = number(dataset, "macs") / 1e9, number(dataset, "parameters") / 1e6
    return f"{model}: {macs:.3g} GMACs, {parameters:.3g} million parameters, {listing(speeds)}"


def _row(model: str, dataset: xr.Dataset, place: dict[str, str]) -> dict[str, Any]:
    speed = estimate(dataset, "throughput", **place)
    return {
        "model": model,
        "input": "×".join(str(side) for side in dataset["input_size"].values),
        "GMACs": number(dataset, "macs") / 1e9,
        "parameters_(M)": number(dataset, "parameters") / 1e6,
        "activations_(M)": number(dataset, "activations") / 1e6,
        **place,
        "batch": int(number(dataset, "batch_size", **place)),
        "images/s": speed.value,
        "low": speed.low,
        "high": speed.high,
        "peak_memory_(MiB)": number(dataset, "peak_memory", **place) / MEBIBYTE,
        "number_format": str(dataset.attrs.get("dtype", "")),
        "machine": _machine(dataset),
    }


def _of(dataset: xr.Dataset, name: str) -> list[str]:
    return [str(one) for one in dataset[name].values]


def _present(results: Results, name: str) -> list[str]:
    return list(dict.fromkeys(one for dataset in results.values() for one in _of(dataset, name)))


def _machine(dataset: xr.Dataset) -> str:
    return str(dataset["seconds"].attrs.get("machine", "unknown machine"))


def _batches(results: Results, step: str) -> str:
    sizes = {
        int(number(dataset, "batch_size", step=step, mode=mode))
        for dataset in results.values()
        if step in _of(dataset, "step")
        for mode in _of(dataset, "mode")
    }
    return f"batches of {listing(str(size) for size in sorted(sizes))}"


def _draw_points(panel: Axes, points: Sequence[tuple[float, Estimate, str]], *, name: str, look: Series) -> None:
    """One mark a mode, with a line through its quartiles; a thin line joins the modes."""
    across, up = [x for x, *_ in points], [y.value for _, y, _ in points]
    panel.plot(across, up, color=look.colour, linewidth=0.8, label="_modes")
    for x, y, mode in points:
        panel.vlines(x, y.low, y.high, color=look.colour, linewidth=2.4, alpha=0.45, label="_quartiles")
        panel.plot([x], [y.value], linestyle="none", markersize=6, label=name, **_mark(look, mode))


def _mark(look: Series, mode: str) -> dict[str, Any]:
    face = look.colour if mode == "eager" else "none"
    return {
        "marker": look.marker,
        "markerfacecolor": face,
        "markeredgecolor": look.colour,
        "markeredgewidth": 1.2,
    }


def _handles(looks: Mapping[str, Series], modes: Sequence[str]) -> list[Line2D]:
    """The models' marks, and what full and hollow ones are where there are both."""
    shown = {name: (look, "eager") for name, look in looks.items()}
    if len(modes) > 1:
        shown |= {mode: (Series(MUTED, "o", "-"), mode) for mode in modes}
    return [Line2D([], [], linestyle="none", markersize=5, label=name, **_mark(*one)) for name, one in shown.items()]


def _scale(panel: Axes) -> None:
    """Logarithmic, with plain round numbers, and room around the outermost marks."""
    panel.margins(0.12)
    data = panel.dataLim
    for axis, set_scale, least in (
        (panel.xaxis, panel.set_xscale, data.minposx),
        (panel.yaxis, panel.set_yscale, data.minposy),
    ):
        if not isfinite(least):
            continue  # nothing lies above 0: calibrators have no parameters
        set_scale("log")
        axis.set_major_locator(FixedLocator(round_numbers(*axis.get_view_interval())))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
        axis.set_minor_locator(NullLocator())


def round_numbers(low: float, high: float) -> list[float]:
    """At least three round numbers between two others, as even on a logarithmic scale as they can be.

    >>> round_numbers(0.09, 7), round_numbers(5.5, 12), round_numbers(22, 26)
    ([0.1, 0.3, 1.0, 3.0], [6.0, 8.0, 10.0], [22.0, 23.0, 24.0, 25.0, 26.0])
    """
    for within in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 4, 6, 8)):
        decades = range(floor(log10(low)), ceil(log10(high)) + 1)
        found = [float(f"{digit}e{decade}") for decade in decades for digit in within]
        if len(inside := [one for one in found if low <= one <= high]) >= 3:
            return inside
    return [
        float(f"{one:.12g}") for one in MaxNLocator(5, steps=[1, 2, 5, 10]).tick_values(low, high) if low <= one <= high
    ]
