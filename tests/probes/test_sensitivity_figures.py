"""The drawn lines are the measured numbers, in every shape a study may have."""

from pathlib import Path
from runpy import run_path

import matplotlib as mpl
import numpy as np
import pytest
import torch
from matplotlib import _pylab_helpers

from spatially.errors import UserError
from spatially.probes import sensitivity_figures

Study = run_path(str(Path(__file__).parents[1] / "report" / "synthetic.py"))["Study"]


@pytest.fixture(scope="module")
def results():
    return Study.results(images=60, bag_accuracy=0.42)


def panels(figure):
    return [axes for axes in figure.axes if axes.get_visible()]


def lines(axes, label):
    return [line for line in axes.get_lines() if line.get_label() == label]


def band(axes, label):
    """Lower and upper edge of a model's band, by ratio."""
    (area,) = [patch for patch in axes.collections if patch.get_label() == label]
    corners = area.get_paths()[0].vertices
    ratios = np.unique(corners[:, 0])
    edges = [corners[np.isclose(corners[:, 0], ratio), 1] for ratio in ratios]
    return np.array([edge.min() for edge in edges]), np.array([edge.max() for edge in edges])


@pytest.mark.parametrize("kind", ["shuffle", "mask"])
def test_lines_and_bands_are_the_measured_accuracy(results, kind):
    figure = sensitivity_figures.figures(results)[kind]
    for axes, block in zip(panels(figure), (8, 16, 24, 32), strict=True):
        for name, dataset in results.items():
            measured = dataset.sel(kind=kind, block=block)
            (line,) = lines(axes, name)
            np.testing.assert_array_equal(line.get_xdata(), measured["ratio"])
            np.testing.assert_array_equal(line.get_ydata(), measured["accuracy"])
            low, high = band(axes, name)
            np.testing.assert_allclose(low, measured["accuracy_low"])
            np.testing.assert_allclose(high, measured["accuracy_high"])
        for label, level in (("chance (1\u202f%)", 0.01), ("best bag of patches (42\u202f%)", 0.42)):
            (line,) = lines(axes, label)
            assert set(line.get_ydata()) == {level}


def test_confidence_is_drawn_and_breaks_where_no_image_is_right(results):
    dataset = next(iter(results.values())).copy(deep=True)
    dataset["average_confidence"].loc[{"kind": "shuffle", "block": 8, "ratio": 1.0}] = np.nan
    figure = sensitivity_figures.figures({"a": dataset})["confidence"]
    (line,) = lines(panels(figure)[0], "a")
    np.testing.assert_array_equal(line.get_ydata(), dataset["average_confidence"].sel(kind="shuffle", block=8))
    assert np.isnan(line.get_ydata()[-1])


def test_reliance_is_sorted_with_its_interval(results):
    figure = sensitivity_figures.figures(results)["reliance"]
    names = [text.get_text() for text in panels(figure)[0].get_yticklabels()]
    for axes, block in zip(panels(figure), (8, 16, 24, 32), strict=True):
        for row, name in enumerate(names):
            measured = results[name].sel(block=block)
            (dot,) = lines(axes, name)
            assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (float(measured["structure_reliance"]), row)
            ends = {tuple(path.vertices[:, 0]) for area in axes.collections for path in area.get_paths()}
            assert (float(measured["structure_reliance_low"]), float(measured["structure_reliance_high"])) in ends
    means = [float(results[name]["structure_reliance"].mean()) for name in names]
    assert means == sorted(means, reverse=True)


def test_an_undefined_model_is_named_with_the_reason():
    results = {"good": Study.sensitivity("good", (0.8, 0.2, 0.1), images=60), "blind": Study.blind("blind")}
    drawn = sensitivity_figures.figures(results)
    for name in ("reliance", "area"):
        axes = panels(drawn[name])[0]
        assert not lines(axes, "blind")
        assert "undefined" in [text.get_text() for text in axes.texts]
        assert "blind undefined: its accuracy on clean images" in drawn[name].get_supxlabel()
    table = sensitivity_figures.tables(results)["reliance"].set_index("model")
    assert "not above chance" in table.loc["blind", "undefined"].iloc[0]
    assert (table.loc["good", "undefined"] == "").all()


@pytest.mark.parametrize(
    ("dropped", "reason"),
    [({"ratio": 1.0}, "α = 1 was not measured"), ({"ratio": 0.0}, "clean images (α = 0) were not measured")],
)
def test_reasons_follow_from_what_is_missing(dropped, reason):
    dataset = Study.sensitivity("a", (0.8, 0.2, 0.1), images=60).drop_sel(dropped)
    for end in ("", "_low", "_high"):
        dataset["structure_reliance" + end][:] = np.nan
    assert reason in sensitivity_figures.figures({"a": dataset})["reliance"].get_supxlabel()


@pytest.mark.parametrize("kind", ["shuffle", "mask"])
def test_one_model_one_kind_one_block(kind):
    dataset = Study.sensitivity("only", (0.8, 0.2, 0.1), kinds=(kind,), blocks=(16,), images=60)
    drawn = sensitivity_figures.figures({"only": dataset})
    assert set(drawn) == {kind, "area", "confidence"} | ({"reliance"} if kind == "shuffle" else set())
    assert len(panels(drawn[kind])) == 1
    assert set(sensitivity_figures.tables({"only": dataset})) == {"accuracy", "average_confidence", "reliance", "area"}


def test_models_with_different_blocks_and_kinds_share_a_figure():
    results = {
        "a": Study.sensitivity("a", (0.8, 0.2, 0.1), blocks=(8, 16), images=60),
        "b": Study.sensitivity("b", (0.8, 0.2, 0.1), kinds=("mask",), blocks=(16, 32), images=60),
    }
    drawn = sensitivity_figures.figures(results)
    first, second, third = panels(drawn["mask"])
    assert (len(lines(first, "b")), len(lines(second, "b")), len(lines(third, "a"))) == (0, 1, 0)
    assert not any(lines(axes, "b") for axes in panels(drawn["shuffle"]))
    assert "b undefined: shuffling was not measured" in drawn["reliance"].get_supxlabel()


def test_twelve_models_are_told_apart_and_fit():
    results = {
        f"model_number_{i}_patch16_224.in1k": Study.sensitivity("m" * i, (0.7, 0.1 + 0.07 * i, 0.05 * i), images=60)
        for i in range(12)
    }
    figure = sensitivity_figures.figures(results)["shuffle"]
    drawn = [line for line in panels(figure)[0].get_lines() if line.get_label() in results]
    assert len({(line.get_color(), line.get_linestyle(), str(line._dash_pattern)) for line in drawn}) == 12
    figure.draw_without_rendering()
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][:12] == list(results)
    box, sheet = legend.get_window_extent(), figure.bbox
    assert box.x0 >= 0
    assert box.x1 <= sheet.x1
    assert max(axes.get_tightbbox().x1 for axes in panels(figure)) <= sheet.x1
    assert box.y1 <= min(axes.get_tightbbox().y0 for axes in panels(figure))


def test_average_confidence_table_is_laid_out_as_in_the_paper(results):
    table = sensitivity_figures.tables(results)["average_confidence"]
    assert list(table.columns) == ["model", "kind", "ratio", "8×8", "16×16", "24×24", "32×32"]
    row = table[(table["kind"] == "mask") & (table["model"] == "resnet50.a1_in1k")].iloc[0]
    assert row["ratio"] == 0.8
    expected = results["resnet50.a1_in1k"]["average_confidence"].sel(kind="mask", ratio=0.8, block=24)
    assert row["24×24"] == float(expected)


def test_the_nearest_measured_ratio_is_taken(results):
    fewer = {name: dataset.sel(ratio=[0.0, 0.5, 0.7]) for name, dataset in results.items()}
    table = sensitivity_figures.tables(fewer)["average_confidence"]
    assert set(table["ratio"]) == {0.7}


def test_accuracy_table_has_one_row_a_point(results):
    table = sensitivity_figures.tables(results)["accuracy"]
    assert len(table) == 4 * 2 * 4 * 11
    row = table.set_index(["model", "kind", "block", "ratio"]).loc[("resnet50.a1_in1k", "mask", 16, 0.3)]
    measured = results["resnet50.a1_in1k"].sel(kind="mask", block=16, ratio=0.3)
    for name in ("accuracy", "accuracy_low", "accuracy_high", "average_confidence"):
        assert row[name] == float(measured[name])


def test_partly_covered_images_say_so(results):
    titles = [axes.get_title(loc="left") for axes in panels(sensitivity_figures.figures(results)["shuffle"])]
    assert titles == ["8×8 px blocks", "16×16 px blocks", "24×24 px blocks (93\u202f% of the image)", "32×32 px blocks"]


def test_gallery_shows_each_kind_block_and_ratio():
    calls = []

    def note(kind):
        def perturb(images, *, block, ratio, index, seed):
            calls.append((kind, block, ratio, index.tolist(), seed, tuple(images.shape)))
            return images + 3 * ratio  # leaves 0..1, as noise may

        return perturb

    examples = Study.examples(2, side=32)
    figure = sensitivity_figures.gallery(
        examples, kinds=["mask"], blocks=[4, 8], ratios=[0, 1], perturb={"mask": note("mask")}, example=1
    )
    assert calls == [("mask", block, ratio, [1], 0, (1, 3, 32, 32)) for block in (4, 8) for ratio in (0, 1)]
    shown = figure.axes[0].get_images()[0].get_array()
    np.testing.assert_allclose(shown, examples["pixels"].values[1].transpose(1, 2, 0) / 255, rtol=1e-6)
    assert figure.axes[1].get_images()[0].get_array().max() == 1


def test_gallery_uses_the_probes_own_perturbations():
    perturb = pytest.importorskip("spatially.perturb")
    examples = Study.examples(1, side=32)
    figure = sensitivity_figures.gallery(examples, kinds=["shuffle"], blocks=[8], ratios=[1.0])
    images = torch.from_numpy(examples["pixels"].values).float() / 255
    expected = perturb.shuffle_blocks(images, block=8, ratio=1.0, index=torch.tensor([0]), seed=0)[0]
    np.testing.assert_array_equal(figure.axes[0].get_images()[0].get_array(), expected.permute(1, 2, 0))


def test_gallery_names_the_examples_there_are():
    with pytest.raises(UserError, match="example must be 0 … 0, not 3"):
        sensitivity_figures.gallery(Study.examples(1, side=32), example=3)


def test_matplotlib_is_left_as_it_was(results):
    before = dict(mpl.rcParams)
    sensitivity_figures.figures(results)
    assert dict(mpl.rcParams) == before
    assert not _pylab_helpers.Gcf.figs
