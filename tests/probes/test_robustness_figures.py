"""The drawings and tables of robustness and shape bias say what was measured."""

from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
import xarray as xr

from spatially.drawing.values import Results
from spatially.probes import Robustness, ShapeBias, robustness_figures, shape_bias_figures

_SHARED = run_path(str(Path(__file__).parent / "published.py"))
CORNER, MIDDLE, reader, main_images = (_SHARED[name] for name in ("CORNER", "MIDDLE", "reader", "main_images"))


@pytest.fixture
def table() -> Results:
    """Two models that were put to different tests."""
    first, second = reader(CORNER, name="corner"), reader(MIDDLE, name="middle")
    return {
        "corner": Robustness(epsilons=["2/255", "1/255"]).run(first, main_images(first)),
        "middle": Robustness(epsilons=[0.5]).run(second, main_images(second)),
    }


@pytest.fixture
def biases(tmp_path: Path) -> dict[str, xr.Dataset]:
    import spatially

    folder = _SHARED["make_cue_conflict"](tmp_path / "cue")
    found = {}
    for name, place in (("shape", CORNER), ("texture", MIDDLE)):
        subject = reader(place, name=name)
        found[name] = ShapeBias().run(subject, spatially.open_images(folder, subject, answers=False))
    return found


def test_table_5(table: Results) -> None:
    tables = robustness_figures.tables(table)
    short = tables["robustness"].set_index("model")
    assert list(short) == ["Standard", "Occlusion", "FGSM, ε = 1/255", "FGSM, ε = 2/255", "FGSM, ε = 0.5"]
    assert short.loc["corner", "Standard"] == "100.0"
    assert short.loc["corner", "Occlusion"] == "100.0"
    assert short.loc["middle", "Occlusion"] == "0.0"
    assert short.loc["corner", "FGSM, ε = 0.5"] == "–"  # it was not put to that
    long = tables["intervals"]
    assert len(long) == 4 + 3
    assert ((long["low"] <= long["accuracy"]) & (long["accuracy"] <= long["high"])).all()
    assert (long["images"] == 12).all()


def test_the_figure_has_a_panel_a_test_and_a_dot_a_model(table: Results) -> None:
    (figure,) = robustness_figures.figures(table).values()
    panels = [axes for axes in figure.axes if axes.get_visible()]
    assert [axes.get_title(loc="left") for axes in panels] == [
        robustness_figures.title_of(test) for test in robustness_figures.names_of_tests(table)
    ]
    dots = {str(line.get_label()): line.get_xdata()[0] for line in panels[1].lines if line.get_label() in table}
    assert dots == {"corner": 1.0, "middle": 0.0}
    words = [text.get_text() for text in panels[4].texts]
    assert "undefined" in words
    description = robustness_figures.descriptions(table)["robustness"]
    assert "corner: Standard 100\u202f%" in description
    assert set(robustness_figures.captions(table)) == set(robustness_figures.tables(table))


def test_the_caption_speaks_of_what_was_tested(table: Results) -> None:
    assert "ImageNet-A" not in robustness_figures.captions(table)["robustness"]
    assert "FGSM" in robustness_figures.captions(table)["robustness"]
    one = reader()
    bare = {"reader": Robustness(occlusion=None, epsilons=[]).run(one, main_images(one))}
    assert "FGSM" not in robustness_figures.captions(bare)["robustness"]
    assert len(robustness_figures.figures(bare)["robustness"].axes) == 1


def test_shape_bias_is_drawn_by_class_with_its_average(biases: dict[str, xr.Dataset]) -> None:
    (figure,) = shape_bias_figures.figures(biases).values()
    (axes,) = figure.axes
    dots = {str(line.get_label()): line for line in axes.lines if line.get_label() in biases}
    assert np.array_equal(dots["shape"].get_xdata(), np.ones(16))
    assert np.array_equal(dots["texture"].get_xdata(), np.zeros(16))
    averages = {float(line.get_xdata()[0]) for line in axes.lines if len(line.get_xdata()) == 2}
    assert averages == {0.0, 0.5, 1.0}  # the two models', and the middle
    assert len(axes.get_yticklabels()) == 16
    tables = shape_bias_figures.tables(biases)
    assert tables["shape_bias"].set_index("model")["shape_bias"].to_dict() == {"shape": 1.0, "texture": 0.0}
    assert len(tables["classes"]) == 32
    assert "shape: 100\u202f%" in shape_bias_figures.descriptions(biases)["shape_bias"]


def test_a_model_that_decided_nothing_is_drawn_without_dots(biases: dict[str, xr.Dataset]) -> None:
    blank = biases["shape"].copy()
    for name in ("shape_bias", "class_shape_bias"):
        for end in ("", "_low", "_high"):
            blank[name + end] = blank[name + end] * np.nan
    (figure,) = shape_bias_figures.figures({"blank": blank}).values()
    lines = [line for line in figure.axes[0].lines if line.get_label() == "blank"]
    assert np.isnan(lines[0].get_xdata()).all()


def test_the_accuracy_of_guessing_is_marked(table: Results) -> None:
    (figure,) = robustness_figures.figures(table).values()
    chance = float(table["corner"]["test_chance"].sel(test="standard"))
    marks = [line for line in figure.axes[0].lines if line.get_marker() == "^" and list(line.get_ydata()) == [0]]
    assert chance in {float(line.get_xdata()[0]) for line in marks}
