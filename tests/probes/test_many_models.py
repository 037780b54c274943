"""Figures of many models stay readable."""

import numpy as np
import pytest
import xarray as xr

from spatially.probes import hessian_figures, position_bias_figures


def spectrum(values: list[float]) -> xr.Dataset:
    found = {"eigenvalue": (("batch", "rank"), np.array([values]))}
    shares = dict.fromkeys(("negative_share", "negative_share_low", "negative_share_high"), 0.5)
    return xr.Dataset(found | shares)


@pytest.mark.parametrize(("models", "panels"), [(3, 1), (4, 4), (11, 11)])
def test_more_than_three_histograms_stand_below_each_other(models: int, panels: int) -> None:
    results = {f"m{number}": spectrum([-1.0, 2.0, 3.0 + number]) for number in range(models)}
    figure = hessian_figures._spectrum(results)
    assert len(figure.axes) == panels
    if panels > 1:
        assert [axes.get_ylabel() for axes in figure.axes] == list(results)
        assert len({axes.get_xlim() for axes in figure.axes}) == 1


def test_a_width_beyond_the_axis_is_an_arrow_and_not_a_line() -> None:
    sides = {"rows": ("layer", [4, 4]), "columns": ("layer", [4, 4]), "r_squared": ("layer", [0.5, 0.6])}
    wide = {"sigma_x": ("layer", [1.0, 600.0]), "sigma_y": ("layer", [1.0, 2.0])}
    figure = position_bias_figures._fits({"model": xr.Dataset(sides | wide)})
    _, across, down = figure.axes
    line, arrow = across.lines
    assert np.isnan(line.get_ydata()[1])
    assert (arrow.get_xdata()[0], arrow.get_ydata()[0]) == (2, 8.0)
    assert len(down.lines) == 1
