"""Bars that add up to one, with the intervals where they belong."""

from pathlib import Path
from runpy import run_path

import numpy as np
import pytest

from spatially.probes import paste_figures

Study = run_path(str(Path(__file__).parents[1] / "report" / "synthetic.py"))["Study"]


@pytest.fixture(scope="module")
def results():
    return Study.paste_results()


def test_bars_are_the_rates_and_add_up(results):
    wins, _ = paste_figures.figures(results)["wins"].axes
    names = [text.get_text() for text in wins.get_yticklabels()]
    for row, name in enumerate(names):
        widths = [group[row].get_width() for group in wins.containers]
        rates = [float(results[name][rate]) for rate in ("host_rate", "neither_rate", "guest_rate")]
        np.testing.assert_allclose(widths, rates)
        assert sum(widths) == pytest.approx(1)
    hosts = [float(results[name]["host_rate"]) for name in names]
    assert hosts == sorted(hosts, reverse=True)


def test_intervals_stand_at_their_boundaries(results):
    wins, _ = paste_figures.figures(results)["wins"].axes
    drawn = {tuple(np.round(path.vertices[:, 0], 9)) for area in wins.collections for path in area.get_paths()}
    for dataset in results.values():
        assert (round(float(dataset["host_rate_low"]), 9), round(float(dataset["host_rate_high"]), 9)) in drawn
        guest = (1 - float(dataset["guest_rate_high"]), 1 - float(dataset["guest_rate_low"]))
        assert tuple(np.round(guest, 9)) in drawn


def test_mean_probabilities_are_the_measured_ones(results):
    wins, means = paste_figures.figures(results)["wins"].axes
    names = [text.get_text() for text in wins.get_yticklabels()]
    for line, variable in zip(means.get_lines(), ("mean_host_probability", "mean_guest_probability"), strict=True):
        np.testing.assert_array_equal(line.get_xdata(), [float(results[name][variable]) for name in names])


def test_missing_numbers_leave_a_gap(results):
    name = next(iter(results))
    dataset = results[name].copy()
    for variable in list(dataset.data_vars):
        if dataset[variable].ndim == 0:
            dataset[variable] = np.nan
    figure = paste_figures.figures({"blind": dataset, name: results[name]})["wins"]
    figure.draw_without_rendering()
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == [name, "blind"]


def test_table_is_tidy(results):
    table = paste_figures.tables(results)["paste"]
    assert list(table.columns) == ["model", "quantity", "value", "low", "high"]
    assert len(table) == 5 * len(results)
