"""Figures and tables of the Fourier and variance probes say what was measured."""

import numpy as np
import pytest
import torch
import xarray as xr
from matplotlib.colors import to_hex

import spatially
from spatially.drawing.style import SHADES
from spatially.probes import Fourier, Variance


@pytest.fixture(scope="module")
def results() -> dict[str, dict[str, xr.Dataset]]:
    found: dict[str, dict[str, xr.Dataset]] = {"fourier": {}, "variance": {}}
    pixels = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    for name in ("pit_tiny", "resnet18"):
        torch.manual_seed(0)
        subject = spatially.load(name, pretrained=False, num_classes=4, device="cpu", input_size=64)
        images = spatially.open_images(pixels, subject, labels=[0, 1, 2, 3])
        for probe in (Fourier(), Variance()):
            found[probe.name][name] = probe.run(subject, images)
    return found


def test_spectra_and_highest_frequency(results: dict[str, dict[str, xr.Dataset]]) -> None:
    drawing = Fourier.drawing()
    figure = drawing.figures(results["fourier"])["spectra"]
    for row, dataset in enumerate(results["fourier"].values()):
        spectra, highest = figure.axes[2 * row : 2 * row + 2]
        assert len(spectra.lines) == dataset.sizes["layer"]
        last = dataset["log_amplitude"].isel(layer=-1).dropna("frequency")
        assert np.array_equal(spectra.lines[-1].get_ydata(), last.values)
        assert np.array_equal(spectra.lines[-1].get_xdata(), last["frequency"].values)
        drawn, values = highest.lines[0].get_ydata(), dataset["high_frequency"].values
        assert np.array_equal(drawn, values, equal_nan=True)
        assert np.array_equal(np.isnan(values), dataset["rows"].values < 3)


@pytest.mark.parametrize(("probe", "figure"), [(Fourier, "spectra"), (Variance, "depth")])
def test_shades_lie_where_attention_and_subsampling_are(
    probe: type[Fourier | Variance], figure: str, results: dict[str, dict[str, xr.Dataset]]
) -> None:
    drawn = probe.drawing().figures(results[probe.name])[figure]
    panels = drawn.axes[1::2] if probe is Fourier else drawn.axes
    for panel, dataset in zip(panels, results[probe.name].values(), strict=True):
        found = {(to_hex(patch.get_facecolor()), patch.get_x()) for patch in panel.patches}
        kinds = dataset["kind"].values
        expected = {(SHADES[kind], layer - 1) for layer, kind in enumerate(kinds) if kind in SHADES}
        assert found == expected
        assert expected


def test_tables_have_every_layer(results: dict[str, dict[str, xr.Dataset]]) -> None:
    table = Fourier.drawing().tables(results["fourier"])["high_frequency"]
    assert len(table) == sum(dataset.sizes["layer"] for dataset in results["fourier"].values())
    row = table[(table["model"] == "resnet18") & (table["layer"] == 3)].iloc[0]
    dataset = results["fourier"]["resnet18"]
    assert (row["name"], row["kind"], row["rows"]) == ("layer2.0", "subsampling", 8)
    assert row["value"] == float(dataset["high_frequency"][3])
    assert row["low"] <= row["value"] <= row["high"]
    table = Variance.drawing().tables(results["variance"])["variance"]
    assert table["variance"].tolist() == [
        value for dataset in results["variance"].values() for value in dataset["variance"].values
    ]


@pytest.mark.parametrize(("probe", "name"), [(Fourier, "fourier"), (Variance, "variance")])
def test_everything_has_a_caption(
    probe: type[Fourier | Variance], name: str, results: dict[str, dict[str, xr.Dataset]]
) -> None:
    drawing, found = probe.drawing(), results[name]
    captions = drawing.captions(found)
    assert set(captions) == {*drawing.figures(found), *drawing.tables(found)}
    for text in drawing.descriptions(found).values():
        assert "nan" not in text
        assert "pit_tiny" in text
        assert "resnet18" in text
        assert "subsampling" in text
