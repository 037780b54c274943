"""Drawings and tables of the robustness probe: accuracy on every test, model by model (table 5 of Heo)."""

from math import isfinite

import pandas
import xarray as xr
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from spatially.drawing.panels import DotPanel, draw_dots, ordered
from spatially.drawing.style import MUTED, figure_style, series
from spatially.drawing.values import Estimate, Results, estimate, listing, number, percent

_TITLES = {
    "standard": "Standard",
    "occlusion": "Occlusion",
    "imagenet_a": "ImageNet-A",
    "backgrounds": "Background challenge",
}


def figures(results: Results) -> dict[str, Figure]:
    """A panel a test, a row a model, the most accurate on plain images first."""
    names = names_of_tests(results)
    panels = [
        DotPanel(title_of(test), {model: estimate(result, "accuracy", test=test) for model, result in results.items()})
        for test in names
    ]
    order = ordered(list(results), lambda model: number(results[model], "accuracy", test="standard"))
    same = [test for test in names if _on_the_same_images(test)]
    figure = draw_dots(
        panels,
        looks=series(results),
        order=order,
        columns=min(len(panels), 2 if len(panels) in (2, 4) else 3),
        heading="How much accuracy is left when images are harder",
        label="Accuracy, in per cent over each dot; bars are 95 % intervals.",
        ends=("none right", "all right"),
        note="Triangles on the axis: the accuracy of guessing."
        + (" Grey ticks: the same model on the same images as they are." if same else ""),
    )
    with figure_style():
        for axes, test in zip(figure.axes, names, strict=False):
            axes.xaxis.set_major_formatter(PercentFormatter(xmax=1, decimals=0, symbol=""))
            for chance in {number(result, "test_chance", test=test) for result in results.values()}:
                if isfinite(chance):
                    place = axes.get_xaxis_transform()
                    axes.plot([chance], [0], transform=place, color=MUTED, marker="^", markersize=5, clip_on=False)
            for row, model in enumerate(order):
                _annotate(axes, results[model], test, row)
    return {"robustness": figure}


def tables(results: Results) -> dict[str, pandas.DataFrame]:
    """One row a model and one column a test as in table 5, in per cent; and every number with its interval."""
    names = names_of_tests(results)
    short = pandas.DataFrame(
        [
            {"model": model, **{title_of(test): _points(estimate(result, "accuracy", test=test)) for test in names}}
            for model, result in results.items()
        ]
    )
    rows = [
        {
            "model": model,
            "test": test,
            "epsilon": float(result["epsilon"].sel(test=test)),
            "images": int(result["count"].sel(test=test)),
            "accuracy": found.value,
            "low": found.low,
            "high": found.high,
            "chance": float(result["test_chance"].sel(test=test)),
        }
        for model, result in results.items()
        for test in result["test"].values.tolist()
        for found in [estimate(result, "accuracy", test=test)]
    ]
    return {"robustness": short, "intervals": pandas.DataFrame(rows)}


def captions(results: Results) -> dict[str, str]:
    """What the figure and the tables show, and where the paper has it."""
    names = names_of_tests(results)
    said = [_explanation(test) for test in ("occlusion", "fgsm", "imagenet_a", "backgrounds") if _has(names, test)]
    explained = f" {' '.join(said)}" if said else ""
    return {
        "robustness": f"Share of images answered rightly, with 95 % intervals.{explained} Corresponds to table 5 of Heo et"
        " al.",
        "intervals": "Accuracy of each test as a fraction, with the ends of its 95 % interval, the number of"
        " images (of foregrounds in the background challenge) and the accuracy of guessing.",
    }


def descriptions(results: Results) -> dict[str, str]:
    """The figure in words, for readers who cannot see it."""
    said = [
        f"{model}: "
        + listing(
            f"{title_of(test)} {percent(number(result, 'accuracy', test=test))}"
            for test in names_of_tests(results)
            if estimate(result, "accuracy", test=test).defined
        )
        for model, result in results.items()
    ]
    return {"robustness": f"Accuracy on each test. {'; '.join(said)}."}


def names_of_tests(results: Results) -> list[str]:
    """Every test that any model was put to, in the order of the paper."""
    found = dict.fromkeys(str(test) for result in results.values() for test in result["test"].values)
    rank = {"standard": 0, "occlusion": 1, "imagenet_a": 2, "backgrounds": 3}
    return sorted(found, key=lambda test: (rank.get(test, 4), _epsilon(results, test)))


def title_of(test: str) -> str:
    """
    >>> title_of("fgsm 1/255"), title_of("occlusion")
    ('FGSM, ε = 1/255', 'Occlusion')
    """
    return _TITLES.get(test, test.replace("fgsm ", "FGSM, ε = "))


def _points(found: Estimate) -> str:
    return f"{100 * found.value:.1f}" if found.defined else "–"


def _on_the_same_images(test: str) -> bool:
    return test == "occlusion" or test.startswith("fgsm ")


def _annotate(axes: Axes, result: xr.Dataset, test: str, row: int) -> None:
    """The number over its dot, and where the model stood before."""
    found = estimate(result, "accuracy", test=test)
    if not found.defined:
        return
    side = "left" if found.value < 0.08 else "right" if found.value > 0.92 else "center"
    axes.text(found.value, row - 0.2, _points(found), color=MUTED, fontsize=6.5, ha=side, va="bottom")
    standard = number(result, "accuracy", test="standard")
    if _on_the_same_images(test):
        axes.plot([standard], [row], color=MUTED, marker="|", markersize=7, markeredgewidth=1.0, zorder=2.5)


def _epsilon(results: Results, test: str) -> float:
    return max(number(result, "epsilon", test=test) for result in results.values() if test in result["test"].values)


def _has(names: list[str], test: str) -> bool:
    return any(name.split(" ")[0] == test for name in names)


def _explanation(test: str) -> str:
    return {
        "occlusion": "Occlusion sets a rectangle, by default the centre half, to zero.",
        "fgsm": "FGSM moves each pixel (0..1) by ε in the direction that hurts the model most.",
        "imagenet_a": "ImageNet-A is answered among its 200 classes.",
        "backgrounds": "In the background challenge a foreground counts only if it is right on every background.",
    }[test]
