"""Drawings and tables of the sensitivity probe: figures 4 and 7 and tables 1 and 2 of Xu, and our summaries."""

from collections.abc import Sequence
from math import isfinite, nan
from typing import Any

import numpy as np
import pandas
import xarray as xr
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from spatially.drawing.gallery import gallery
from spatially.drawing.panels import (
    WIDTH,
    Curve,
    DotPanel,
    columns_for,
    draw_curve,
    draw_dots,
    draw_level,
    grid,
    legend,
    legend_height,
    ordered,
    share_axes,
    title,
)
from spatially.drawing.style import INK, MUTED, figure_style, series
from spatially.drawing.values import (
    DONE,
    KINDS,
    Estimate,
    Results,
    attribute,
    blocks,
    covered,
    covered_note,
    estimate,
    kinds,
    listing,
    number,
    percent,
    position,
    square,
    undefined_because,
)

__all__ = ["captions", "descriptions", "figures", "gallery", "tables"]

TABLE_RATIO = {"shuffle": 1.0, "mask": 0.8}  # of tables 1 and 2
BAND = "95 % interval"


def figures(results: Results) -> dict[str, Figure]:
    """Every figure that the results allow, in reading order."""
    present = _kinds(results)
    if not present:
        return {}
    drawn = {kind: _accuracy(results, kind) for kind in present}
    if "shuffle" in present:
        drawn["reliance"] = _reliance(results)
    drawn["area"] = _area(results, present)
    drawn["confidence"] = _confidence(results, present)
    return drawn


def tables(results: Results) -> dict[str, pandas.DataFrame]:
    """One observation a row, shares as fractions 0..1; `average_confidence` is laid out as tables 1 and 2."""
    return {
        "accuracy": _accuracy_table(results),
        "average_confidence": _confidence_table(results),
        "reliance": _reliance_table(results),
        "area": _area_table(results),
    }


def captions(results: Results) -> dict[str, str]:
    """What each figure and table shows, and where the paper has it."""
    band = "Bands are 95 % intervals."
    found = {
        kind: f"Top-1 accuracy when a share α of an image's blocks is {DONE[kind]}, one panel a block size. The longer"
        f" a line stays up, the less the model minds. {band} Corresponds to figure {paper} of Xu."
        for kind, paper in (("shuffle", 4), ("mask", 7))
    }
    found["reliance"] = (
        "Structure reliance: the share of its above-chance accuracy that a model loses when every block is shuffled. 0"
        " is a bag of patches, 1 a rigid template. Lines are 95 % intervals. A summary of figure 4 of Xu."
    )
    found["area"] = (
        "Sensitivity area: how much of the area under the accuracy curve, counted above chance and relative to clean"
        " images, is lost over all ratios. The earlier a model collapses, the further right it stands. Lines are 95 %"
        " intervals. A summary of figures 4 and 7 of Xu."
    )
    found["confidence"] = (
        "Average confidence (AC): the mean probability of the true class over the images that are still classified"
        f" correctly. A line ends where no image is right. {band} Tables 1 and 2 of Xu give one ratio of it."
    )
    found["accuracy"] = "Every measured point, as fractions, with the ends of the 95 % intervals."
    found["average_confidence"] = (
        "Average confidence at the ratio nearest to α = 1 (shuffled) and α = 0.8 (masked), one column a block size."
        " Corresponds to tables 1 and 2 of Xu."
    )
    return found


def descriptions(results: Results) -> dict[str, str]:
    """The figures in words, for readers who cannot see them."""
    return {
        **{kind: _describe_curves(results, kind) for kind in _kinds(results)},
        "reliance": "Structure reliance: " + _describe_summary(results, "structure_reliance", ["shuffle"]),
        "area": "Sensitivity area: " + _describe_summary(results, "sensitivity_area", _kinds(results)),
        "confidence": "Average confidence of the correct answers against the ratio; its values are in the table.",
    }


# Curves


def _kinds(results: Results) -> list[str]:
    found = {kind for dataset in results.values() for kind in kinds(dataset)}
    return [kind for kind in KINDS if kind in found]


def _curve(dataset: xr.Dataset, name: str, *, kind: str, block: int) -> Curve | None:
    """One model's line; None where it was not measured."""
    at = position(np.atleast_1d(dataset["block"].values), block)
    if kind not in kinds(dataset) or at is None or name not in dataset:
        return None
    line = dataset.isel(block=at, kind=kinds(dataset).index(kind)).sortby("ratio")
    values = np.asarray(line[name].values, dtype=float)
    low, high = (
        np.asarray(line[name + end].values, dtype=float) if name + end in line else np.full_like(values, nan)
        for end in ("_low", "_high")
    )
    return Curve(np.asarray(line["ratio"].values, dtype=float), values, low, high)


def _panel_title(results: Results, block: int) -> str:
    """The block size, and how much of the image its whole blocks cover when that is not all."""
    share = covered(results, block)
    return f"{square(block)} px blocks" + (f" ({share} of the image)" if share else "")


def _levels(results: Results) -> list[tuple[float, str, Any]]:
    """The lines that are no model: chance, and the best that a bag of patches can do."""
    lines = (("chance", "chance", (0, (1, 2))), ("bag_accuracy", "best bag of patches", (0, (6, 3))))
    found = []
    for name, words, pattern in lines:
        values = {attribute(dataset, name) for dataset in results.values()}
        found += [(level, f"{words} ({percent(level)})", pattern) for level in sorted(filter(isfinite, values))]
    return found


def _top(results: Results, levels: Sequence[float]) -> float:
    """A little above the highest thing drawn."""
    ends = ("accuracy", "accuracy_high")
    highest = [float(dataset[end].max()) for dataset in results.values() for end in ends if end in dataset]
    return min(1.0, max(filter(isfinite, [*highest, *levels]), default=1.0) * 1.06) or 1.0


def _accuracy(results: Results, kind: str) -> Figure:
    """Figure 4 (shuffle) or 7 (mask): one panel a block size."""
    looks, sizes, levels = series(results), blocks(results), _levels(results)
    columns = columns_for(len(sizes))
    rows = -(-len(sizes) // columns)
    width = {1: 4.4, 2: 6.2}.get(columns, WIDTH)
    below = legend_height([*looks, *(name for _, name, _ in levels), BAND], width)
    with figure_style():
        figure, axes = grid(rows, columns, width=width, height=rows * 2.1 + 0.5 + below)
        title(figure, f"Accuracy when a share α of the blocks is {DONE[kind]}")
        for panel, block in zip(axes.flat, sizes, strict=False):
            panel.set_title(_panel_title(results, block))
            for level, name, pattern in levels:
                draw_level(panel, level, name=name, pattern=pattern, colour=INK if name.startswith("best") else MUTED)
            for name, dataset in results.items():
                curve = _curve(dataset, "accuracy", kind=kind, block=block)
                if curve is not None:
                    draw_curve(panel, curve, name=name, look=looks[name])
        for spare in axes.flat[len(sizes) :]:
            spare.set_visible(False)
        top = _top(results, [level for level, *_ in levels])
        share_axes(axes, x=f"ratio of {DONE[kind]} blocks, α", y="top-1 accuracy (%)", top=top)
        legend(figure, looks, levels=_level_handles(levels), band=BAND)
    return figure


def _level_handles(levels: Sequence[tuple[float, str, Any]]) -> list[Line2D]:
    return [
        Line2D([], [], color=INK if name.startswith("best") else MUTED, linestyle=pattern, linewidth=1.0, label=name)
        for _, name, pattern in levels
    ]


def _confidence(results: Results, present: Sequence[str]) -> Figure:
    """Average confidence over α: a row a kind, a column a block size."""
    looks, sizes = series(results), blocks(results)
    width = {1: 3.6, 2: 5.4}.get(len(sizes), WIDTH)
    with figure_style():
        height = 1.65 * len(present) + 0.6 + legend_height([*looks, BAND], width)
        figure, axes = grid(len(present), len(sizes), width=width, height=height)
        title(figure, "Confidence of the answers that stay correct")
        for row, kind in zip(axes, present, strict=True):
            for panel, block in zip(row, sizes, strict=True):
                panel.set_title(f"{square(block)} px, {DONE[kind]}")
                for name, dataset in results.items():
                    curve = _curve(dataset, "average_confidence", kind=kind, block=block)
                    if curve is not None:
                        draw_curve(panel, curve, name=name, look=looks[name])
        share_axes(axes, x="ratio α", y="average confidence (%)")
        for panel in axes.flat:
            panel.set_xticks([0, 0.5, 1])
        legend(figure, looks, band=BAND)
    return figure


# Summaries


def _reliance(results: Results) -> Figure:
    sizes = blocks(results)
    panels = [_dot_panel(results, "structure_reliance", kind="shuffle", block=block) for block in sizes]
    return draw_dots(
        panels,
        looks=series(results),
        order=_order(results, panels),
        columns=min(len(sizes), 4),
        heading="How much a model relies on structure",
        label="structure reliance: share of the above-chance accuracy lost when every block is shuffled (α = 1)",
        ends=("bag of\npatches", "rigid\ntemplate"),
        note=_note(results, "structure_reliance", ["shuffle"]),
    )


def _area(results: Results, present: Sequence[str]) -> Figure:
    sizes = blocks(results)
    panels = [_dot_panel(results, "sensitivity_area", kind=kind, block=block) for kind in present for block in sizes]
    return draw_dots(
        panels,
        looks=series(results),
        order=_order(results, panels),
        columns=len(sizes) if len(present) > 1 else min(len(sizes), 4),
        heading="How early a model collapses",
        label="sensitivity area: lost share of the area under the above-chance accuracy curve, over all ratios α",
        ends=("never", "at once"),
        note=_note(results, "sensitivity_area", present),
    )


def _dot_panel(results: Results, name: str, *, kind: str, block: int) -> DotPanel:
    found = {model: estimate(dataset, name, kind=kind, block=block) for model, dataset in results.items()}
    return DotPanel(f"{square(block)} px, {DONE[kind]}", found)


def _order(results: Results, panels: Sequence[DotPanel]) -> list[str]:
    """By the mean over all panels, so that a row is the same model everywhere."""

    def mean(name: str) -> float:
        values = [panel.estimates[name].value for panel in panels]
        finite = [value for value in values if isfinite(value)]
        return sum(finite) / len(finite) if finite else nan

    return ordered(list(results), mean)


def _note(results: Results, name: str, present: Sequence[str]) -> str:
    """What whole blocks do not cover, and one line a model that has an undefined value, with the reason."""
    lines = [note] if (note := covered_note(results)) else []
    for model, dataset in results.items():
        reasons = dict.fromkeys(
            _reason(dataset, name, kind=kind, block=block) for kind in present for block in blocks(results)
        )
        if any(reasons):
            lines.append(f"{model} undefined: {listing(reason for reason in reasons if reason)}")
    return "\n".join(lines)


def _reason(dataset: xr.Dataset, name: str, *, kind: str, block: int) -> str:
    """Why a summary has no value; empty when it has one."""
    if isfinite(number(dataset, name, kind=kind, block=block)):
        return ""
    return undefined_because(dataset, kind=kind, block=block)


# Tables


def _accuracy_table(results: Results) -> pandas.DataFrame:
    rows = []
    for model, dataset in results.items():
        for kind in kinds(dataset):
            for block in np.atleast_1d(dataset["block"].values):
                for ratio in np.atleast_1d(dataset["ratio"].values):
                    place = {"kind": kind, "block": int(block), "ratio": float(ratio)}
                    measured = number(dataset, "measured", **place)
                    rows.append(
                        {
                            "model": model,
                            **place,
                            "images": int(measured) if isfinite(measured) else None,
                            **_columns("accuracy", estimate(dataset, "accuracy", **place)),
                            **_columns("average_confidence", estimate(dataset, "average_confidence", **place)),
                        }
                    )
    return pandas.DataFrame(rows)


def _columns(name: str, found: Estimate) -> dict[str, float]:
    return {name: found.value, f"{name}_low": found.low, f"{name}_high": found.high}


def _confidence_table(results: Results) -> pandas.DataFrame:
    """Tables 1 and 2: the ratio nearest to the paper's that was measured, named in its column."""
    rows = []
    for kind in _kinds(results):
        for model, dataset in results.items():
            if kind in kinds(dataset):
                measured = np.atleast_1d(dataset["ratio"].values).astype(float)
                ratio = float(measured[np.abs(measured - TABLE_RATIO[kind]).argmin()])
                confidence = {
                    square(block): number(dataset, "average_confidence", kind=kind, block=block, ratio=ratio)
                    for block in blocks(results)
                }
                rows.append({"model": model, "kind": kind, "ratio": ratio, **confidence})
    return pandas.DataFrame(rows)


def _reliance_table(results: Results) -> pandas.DataFrame:
    name = "structure_reliance"
    rows = [
        {
            "model": model,
            "block": block,
            "covered": number(dataset, "covered", block=block),
            **_columns(name, estimate(dataset, name, block=block)),
            "undefined": _reason(dataset, name, kind="shuffle", block=block),
        }
        for model, dataset in results.items()
        for block in blocks(results)
    ]
    return pandas.DataFrame(rows)


def _area_table(results: Results) -> pandas.DataFrame:
    name = "sensitivity_area"
    rows = [
        {
            "model": model,
            "kind": kind,
            "block": block,
            **_columns(name, estimate(dataset, name, kind=kind, block=block)),
            "undefined": _reason(dataset, name, kind=kind, block=block),
        }
        for model, dataset in results.items()
        for kind in _kinds(results)
        for block in blocks(results)
    ]
    return pandas.DataFrame(rows)


# Words


def _describe_curves(results: Results, kind: str) -> str:
    parts = []
    for model, dataset in results.items():
        for block in blocks(results):
            curve = _curve(dataset, "accuracy", kind=kind, block=block)
            if curve is None or not np.isfinite(curve.y).any():
                continue
            kept = np.flatnonzero(np.isfinite(curve.y))[[0, -1]]
            (start, end), (first, last) = curve.x[kept], curve.y[kept]
            parts.append(
                f"{model}, {square(block)} blocks: {percent(first)} at α = {start:g}, {percent(last)} at α = {end:g}"
            )
    return f"Line charts of accuracy against the ratio of {DONE[kind]} blocks. " + "; ".join(parts) + "."


def _describe_summary(results: Results, name: str, present: Sequence[str]) -> str:
    parts = []
    for kind in present:
        for block in blocks(results):
            found = {model: number(dataset, name, kind=kind, block=block) for model, dataset in results.items()}
            values = ", ".join(
                f"{model} {value:.2f}" if isfinite(value) else f"{model} undefined" for model, value in found.items()
            )
            parts.append(f"{square(block)} blocks {DONE[kind]}: {values}")
    return "; ".join(parts) + "."
