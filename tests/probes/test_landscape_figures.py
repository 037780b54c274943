"""Figures and tables of landscapes from made-up numbers: what they say must be what is in them."""

from itertools import pairwise

import numpy as np
import pytest
import xarray as xr

from spatially.drawing.style import figure_style
from spatially.drawing.terrain import common_height, shared_levels
from spatially.probes import Landscape, landscape_figures


def bowl(height: float, *, points: int = 9, accuracy: float = 0.9) -> xr.Dataset:
    """The result for a loss of 1 + height·(a² + b²) whose accuracy falls to chance at radius 1."""
    probe = Landscape(points=points)
    a, b = np.array(probe.places).T
    square = a**2 + b**2
    share = np.maximum(0.1, accuracy - (accuracy - 0.1) * np.sqrt(square))
    parts = xr.Dataset(
        {
            "nll": ("point", 0.75 + height * square),
            "nll_deviation": ("point", np.ones_like(a)),
            "l2": ("point", np.full_like(a, 0.25)),
            "accuracy": ("point", share),
            "measured": ("point", np.full(len(a), 100)),
        },
        coords={"point": np.arange(len(a))},
    )
    result = probe.summarise(probe.join([parts.isel(point=[n]) for n in range(len(a))]), chance=0.1)
    return result.assign_attrs(chance=0.1)


def test_the_numbers_of_a_bowl() -> None:
    found = bowl(3.0, points=41)
    assert float(found.curvature) == pytest.approx(6.0)
    assert float(found.origin_loss) == 1.0
    assert float(found.half_radius) == pytest.approx(0.5, abs=0.002)
    assert float(found.rise.sel(radius=1.0)) == pytest.approx(3.0, rel=0.002)
    assert found.nll_low.values == pytest.approx(found.nll.values - 1.984 * 0.1, abs=1e-3)


def test_off_the_grid_the_origin_still_counts() -> None:
    found = bowl(3.0, points=4)
    assert found.sizes == {"a": 4, "b": 4, "radius": 2}
    assert float(found.origin_loss) == 1.0
    assert np.isnan(found.curvature)


def test_levels_are_written_in_plain_numbers() -> None:
    figure = landscape_figures.figures({"steep": bowl(70.0)})["contours"]
    words = {one.get_text() for one in figure.axes[-1].get_yticklabels()}
    assert {"10", "100", "200"} <= words


def test_the_table_and_the_words() -> None:
    results = {"flat": bowl(0.5), "steep": bowl(50.0)}
    table = landscape_figures.tables(results)["landscape"]
    assert table["loss"].tolist() == [1.0, 1.0]
    assert table["curvature"].tolist() == pytest.approx([1.0, 100.0])
    assert list(table.columns[5:9]) == ["rise_0.25", "rise_0.5", "rise_0.75", "rise_1"]
    assert table["rise_1"].tolist() == pytest.approx([float(one.rise[-1]) for one in results.values()])
    assert table["blank"].tolist() == [0, 0]
    captions = landscape_figures.captions(results)
    assert "cut off 4 above" in captions["surfaces"]  # four times the highest of the flat one, 0.5·2
    assert "No number" not in captions["contours"]
    assert "steep: loss 1 and accuracy 90" in landscape_figures.descriptions(results)["contours"]
    assert set(landscape_figures.figures(results)) <= set(captions)


def test_every_model_has_its_panel() -> None:
    results = {f"model {number}": bowl(number + 1.0, points=5) for number in range(5)}
    for name, figure in landscape_figures.figures(results).items():
        titles = {axes.get_title(loc=where) for axes in figure.axes for where in ("left", "center")}
        if name == "profiles":
            titles = {str(text.get_text()) for one in figure.legends for text in one.get_texts()}
        assert set(results) <= titles


@pytest.mark.parametrize("heights", [(1.0, 1.0), (0.02, 300.0), (1e-6, 5.0)])
def test_levels_span_all_and_split_the_flattest(heights: tuple[float, float]) -> None:
    values = [np.linspace(0, top, 50) for top in heights]
    levels = shared_levels(values)
    assert (np.diff(levels) > 0).all()
    assert levels[-1] >= max(heights)
    assert len(levels) <= 16
    if max(heights) / min(heights) < 1e4:
        assert sum(0 < level < min(heights) for level in levels) >= 2


def test_levels_below_zero_and_without_numbers() -> None:
    assert shared_levels([np.array([-3.0, 2.0])])[0] == -3.0
    assert shared_levels([np.array([-0.001, 2.0])])[0] == 0.0
    assert (np.diff(shared_levels([np.full(4, np.nan)])) > 0).all()
    assert common_height([np.full(4, np.nan)]) == (1.0, False)
    assert common_height([np.array([-1.0, -0.5])]) == (1.0, False)


def test_long_names_do_not_run_into_each_other() -> None:
    names = [f"vit_small_patch16_224.augreg_in21k_ft_in1k_{number}" for number in range(3)]
    for figure in landscape_figures.figures({name: bowl(1.0, points=5) for name in names}).values():
        with figure_style():
            figure.draw_without_rendering()
            titles = [title for axes in figure.axes for title in (axes._left_title, axes.title)]  # type: ignore[attr-defined]
            boxes = [title.get_window_extent() for title in titles if title.get_text()]
        for one, other in pairwise(boxes):
            assert not one.overlaps(other)


def test_numbers_of_a_scale_that_shows_both_sides_of_zero_stand_apart() -> None:
    flat = bowl(0.013)
    flat["rise_least"] = -20 * flat["rise_least"]
    figure = landscape_figures.figures({"flat": flat, "steep": bowl(5.0)})["profiles"]
    rises = figure.axes[0]
    assert rises.get_yscale() == "symlog"
    with figure_style():
        figure.draw_without_rendering()
        boxes = sorted(
            (label.get_window_extent() for label in rises.get_yticklabels() if label.get_text()), key=lambda box: box.y0
        )
    for below, above in pairwise(boxes):
        assert below.y1 <= above.y0
