"""Accuracy by frequency for models whose answers are known, and the figure of it."""

from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from torch import nn

import spatially
from spatially.data import Images
from spatially.errors import UserError
from spatially.perturb.frequency import draw_noise
from spatially.probes import FrequencyNoise
from spatially.probes.intervals import wilson
from spatially.report.page import write_report

SIDE = 32


class Blind(nn.Module):
    """Always the first class, whatever it is shown."""

    num_classes = 2

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.new_tensor([1.0, 0.0]).expand(len(images), 2)


class Brightness(nn.Module):
    """The mean of all pixels, which no noise but that of frequency 0 can change."""

    num_classes = 2

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        mean = images.mean(dim=(1, 2, 3))
        return torch.stack([0.5 - mean, mean - 0.5], dim=1) * 100


class Stripes(nn.Module):
    """Whether columns alternate from pixel to pixel: the one bin of frequency π across."""

    num_classes = 2

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        alternating = 1 - 2 * (torch.arange(images.shape[3], device=images.device) % 2)
        size = (images * alternating).mean(dim=(1, 2, 3)).abs() * 100
        return torch.stack([torch.ones_like(size), size], dim=1)


def subject_of(model: nn.Module, **options: object) -> spatially.Subject:
    return spatially.load(model, name=type(model).__name__, input_size=SIDE, device="cpu", **options)


def images_of(subject: spatially.Subject, count: int = 40) -> Images:
    """Dark and bright, alternating columns in the bright ones."""
    labels = np.arange(count) % 2
    pixels = np.where(labels, 176, 96)[:, None, None, None].repeat(SIDE, 1).repeat(SIDE, 2).repeat(3, 3)
    pixels[1::2, :, ::2] += 24
    return spatially.open_images(pixels.astype(np.uint8), subject, labels=labels)


def test_a_model_that_ignores_the_image_loses_nothing() -> None:
    subject = subject_of(Blind())
    result = FrequencyNoise(size=1.0).run(subject, images_of(subject), batch=7)
    assert (result["accuracy"] == 0.5).all()
    assert (result["drop"] == 0).all()
    assert result["clean_accuracy"] == 0.5
    assert result["frequency"].attrs["units"] == "π"
    assert (result["drop_low"] < 0).all()
    assert (result["drop_high"] > 0).all()


def test_noise_hits_the_model_that_looks_at_its_frequency() -> None:
    subject = subject_of(Stripes())
    result = FrequencyNoise(size=1.0, frequencies=[0.2, 0.5, 1.0]).run(subject, images_of(subject), batch=40)
    assert result["clean_accuracy"] == 1
    assert result["accuracy"].values[:2].tolist() == [1, 1]
    assert result["accuracy"].values[2] < 0.8
    subject = subject_of(Brightness())
    result = FrequencyNoise(size=1.0, frequencies=[0.0, 0.2, 1.0]).run(subject, images_of(subject))
    assert result["accuracy"].values[1:].tolist() == [1, 1]
    assert result["accuracy"].values[0] < 0.8


def test_numbers_are_those_of_the_outcomes() -> None:
    subject = subject_of(Stripes())
    images = images_of(subject)
    result = FrequencyNoise(size=1.0, frequencies=[0.5, 1.0]).run(subject, images, batch=16)
    correct = result["prediction"].values == images.labels[:, None]
    assert np.array_equal(result["correct"], correct)
    np.testing.assert_allclose(result["accuracy"], correct.mean(axis=0))
    np.testing.assert_allclose(result["drop"], 1 - correct.mean(axis=0))
    low, high = wilson(correct.sum(axis=0), 40)
    assert np.array_equal(result["accuracy_low"], low)
    assert np.array_equal(result["accuracy_high"], high)
    assert (result["drop_low"] <= result["drop"]).all()
    assert (result["drop_high"] >= result["drop"]).all()
    assert result["image"].values.tolist() == list(range(40))


@pytest.mark.parametrize("style", ["round", "authors"])
def test_batches_do_not_matter(style: str, subject: spatially.Subject, memory_images: Images) -> None:
    probe = FrequencyNoise(frequencies=[0.2, 0.9], style=style)
    first, second = (probe.run(subject, memory_images, batch=batch) for batch in (50, 3))
    assert np.array_equal(first["prediction"], second["prediction"])
    np.testing.assert_allclose(first["probability"], second["probability"], atol=1e-5)


def test_authors_noise_is_added_after_normalisation() -> None:
    seen = []

    class Recorder(Blind):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            seen.append(images.clone())
            return super().forward(images)

    subject = subject_of(Recorder(), mean=[0.5, 0.4, 0.3], std=[0.1, 0.2, 0.4])
    images = images_of(subject, 6)
    seen.clear()
    FrequencyNoise(frequencies=[0.4], style="authors", size=0.7, seed=3).run(subject, images)
    clean, noisy = seen[-2:]
    index = torch.from_numpy(images.index[images.order(3)])
    expected = draw_noise((3, SIDE, SIDE), index=index, style="authors", seed=3).at(0.4, size=0.7)
    torch.testing.assert_close(noisy - clean, expected, rtol=0, atol=1e-5)


def test_answers_of_nan_are_an_error() -> None:
    class Broken(Blind):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images) * torch.nan

    subject = subject_of(Broken())
    with pytest.raises(UserError, match=r"Broken answers with NaN to .* images of a chunk; look at its weights"):
        FrequencyNoise().run(subject, images_of(subject))


def test_bad_options() -> None:
    for options, message in (
        ({"frequencies": []}, "at least one"),
        ({"frequencies": [2.0]}, "0..1.41"),
        ({"style": "square"}, "unknown style 'square'"),
    ):
        with pytest.raises(UserError, match=message):
            FrequencyNoise(**options)
    subject = subject_of(Blind())
    with pytest.raises(UserError, match="32×32 pixels has no frequency"):
        FrequencyNoise(half_width=0.001, frequencies=[0.33]).run(subject, images_of(subject))


def test_figure_table_and_page(tmp_path: Path, subject: spatially.Subject, memory_images: Images) -> None:
    probe = FrequencyNoise(frequencies=[0.2, 0.6, 1.0], size=0.3)
    blind = subject_of(Blind())
    results = {"small": probe.run(subject, memory_images), "blind": probe.run(blind, images_of(blind))}
    drawing = FrequencyNoise.drawing()
    drops, accuracies = drawing.figures(results)["drop"].axes
    for name, dataset in results.items():
        for panel, variable in ((drops, "drop"), (accuracies, "accuracy")):
            (line,) = (one for one in panel.lines if one.get_label() == name)
            assert np.array_equal(line.get_ydata(), dataset[variable])
            assert np.array_equal(line.get_xdata(), [0.2, 0.6, 1.0])
    table = drawing.tables(results)["accuracy"]
    assert len(table) == 6
    assert table["drop"].tolist() == [value for dataset in results.values() for value in dataset["drop"].values]
    assert "root mean square 0.3" in drawing.captions(results)["drop"]
    found = {"frequency_noise": results}
    page = write_report(
        tmp_path, results=found, examples=examples_of(memory_images), figures_for={"frequency_noise": drawing}
    )
    assert "frequency_noise_images" in page.read_text()
    for name in ("drop", "images"):
        assert (tmp_path / "figures" / f"frequency_noise_{name}.pdf").exists()


def examples_of(images: Images) -> xr.Dataset:
    pixels = ("example", "channel", "y", "x"), images.pixels[:1]
    return xr.Dataset({"pixels": pixels}, coords={"index": ("example", images.index[:1])})


def test_images_on_the_page_carry_the_very_noise() -> None:
    subject = subject_of(Blind(), mean=[0.5] * 3, std=[0.25] * 3)
    images = images_of(subject, 4)
    result = FrequencyNoise(frequencies=[0.5], style="authors", size=1.0).run(subject, images)
    figure = FrequencyNoise.drawing().shown({"blind": result}, examples_of(images))["images"]
    noise = draw_noise((3, SIDE, SIDE), index=torch.tensor([0]), style="authors").at(0.5, size=1.0)[0] * 0.25
    expected = (torch.from_numpy(images.pixels[0]) / 255 + noise).clamp(0, 1).permute(1, 2, 0)
    panel = next(axes for axes in figure.axes if axes.get_title(loc="center") == "0.5π")
    np.testing.assert_allclose(panel.images[0].get_array(), expected, atol=1e-6)


@pytest.mark.parametrize(("models", "banded"), [(6, True), (7, False)])
def test_bands_are_left_to_the_table_where_many_would_hide_each_other(models: int, banded: bool) -> None:
    subject = subject_of(Blind())
    result = FrequencyNoise(frequencies=[0.2, 1.0]).run(subject, images_of(subject))
    drawing, results = FrequencyNoise.drawing(), {f"model {number}": result for number in range(models)}
    figure = drawing.figures(results)["drop"]
    assert [bool(panel.collections) for panel in figure.axes] == [banded, banded]
    assert ("Bands are 95 %" in drawing.captions(results)["drop"]) == banded
    assert ("95 % interval" in [text.get_text() for text in figure.legends[0].get_texts()]) == banded
