"""The spectrum along the diagonal against NumPy's transform, closed forms, and models whose maps are known."""

import math

import numpy as np
import pytest
import torch
import xarray as xr
from torch import Tensor, nn

import spatially
from spatially.errors import NotApplicable, UserError
from spatially.probes import Fourier, Variance
from spatially.probes.fourier import frequencies, half_diagonal
from spatially.probes.layers import centre


def by_numpy(maps: np.ndarray) -> np.ndarray:
    """The whole transform, centred; the diagonal from the centre outward; a square map."""
    size = maps.shape[-1]
    spectrum = np.log(np.abs(np.fft.fftshift(np.fft.fft2(maps), axes=(-2, -1))) + 1e-6)
    diagonal = np.diagonal(spectrum, axis1=-2, axis2=-1)[..., size // 2 :].mean(1)
    return diagonal - diagonal[:, :1]


@pytest.mark.parametrize("size", [1, 2, 7, 8, 14, 27])
def test_the_diagonal_of_the_whole_transform(size: int) -> None:
    maps = np.random.default_rng(0).normal(0.3, 1, (3, 5, size, size))
    found = half_diagonal(centre(torch.from_numpy(maps)))
    assert found.shape == (3, len(frequencies((size, size))))
    np.testing.assert_allclose(found.numpy(), by_numpy(maps), atol=1e-10)
    single = half_diagonal(centre(torch.from_numpy(maps).float()))
    np.testing.assert_allclose(single.numpy(), by_numpy(maps), atol=1e-4)


def test_rectangles_against_the_transform() -> None:
    maps = np.random.default_rng(0).normal(size=(2, 4, 6, 9))
    spectrum = np.log(np.abs(np.fft.fft2(maps)) + 1e-6).mean(1)
    bins = [(0, 0), (1, 2), (2, 3)]  # the nearest column to 0, 1.5 (to the even one) and 3
    expected = np.stack([spectrum[:, down, across] - spectrum[:, 0, 0] for down, across in bins], axis=1)
    np.testing.assert_allclose(half_diagonal(centre(torch.from_numpy(maps))).numpy(), expected, atol=1e-10)
    np.testing.assert_allclose(
        half_diagonal(centre(torch.from_numpy(maps).transpose(2, 3))).numpy(), expected, atol=1e-10
    )
    exact = [math.sqrt(((2 * down / 6) ** 2 + (2 * across / 9) ** 2) / 2) for down, across in bins]
    assert frequencies((6, 9)) == pytest.approx(exact)


def test_frequencies_are_true() -> None:
    assert frequencies((14, 14))[-1] == pytest.approx(0.857, abs=5e-4)
    assert frequencies((7, 7))[-1] == pytest.approx(0.857, abs=5e-4)
    assert frequencies((56, 56))[-1] == pytest.approx(0.964, abs=5e-4)
    assert frequencies((1, 1)) == [0.0]
    for size in (1, 2, 7, 14, 27):
        bins = np.fft.fftshift(np.fft.fftfreq(size))[size // 2 :] * 2
        np.testing.assert_allclose(frequencies((size, size)), bins, atol=1e-15)


def test_white_noise_has_half_the_logarithm_of_two() -> None:
    maps = torch.from_numpy(np.random.default_rng(0).normal(size=(64, 256, 14, 14)))
    found = half_diagonal(centre(maps)).mean(0)
    assert found[0] == 0
    np.testing.assert_allclose(found[1:].numpy(), math.log(2) / 2, atol=0.03)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("value", [1.0, -0.375, 0.0])
def test_a_constant_map_in_closed_form(value: float, dtype: torch.dtype) -> None:
    found = half_diagonal(centre(torch.full((2, 3, 14, 14), value, dtype=dtype)))
    expected = math.log(1e-6) - math.log(abs(value) * 196 + 1e-6)
    np.testing.assert_allclose(found[:, 1:].numpy(), expected, rtol=1e-4)
    assert (found[:, 0] == 0).all()


class Patches(nn.Module):
    """Each pixel a token of its three colours; the middle of two layers blurs, all are bare additions."""

    num_classes = 4

    def __init__(self, *, blur: int = 1, nan: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 3, 1)
        self.blocks = nn.ModuleList(
            nn.Conv2d(3, 3, size, padding=size // 2, padding_mode="circular") for size in (1, blur, 1)
        )
        with torch.no_grad():
            self.stem.weight.copy_(torch.eye(3)[:, :, None, None])
            self.stem.bias.zero_()
            for block in self.blocks:
                block.weight.zero_()
                block.bias.zero_()
            box = torch.full((blur, blur), 1 / blur**2)
            box[blur // 2, blur // 2] -= 1
            self.blocks[1].weight.copy_(torch.einsum("ij,yx->ijyx", torch.eye(3), box))
            if nan:
                self.blocks[2].bias.fill_(float("nan"))

    def forward(self, images: Tensor) -> Tensor:
        maps = self.stem(images)
        for block in self.blocks:
            maps = maps + block(maps)
        return maps.mean((2, 3)) @ torch.eye(3, 4, dtype=maps.dtype)


def noise(subject: spatially.Subject, count: int = 40, size: tuple[int, int] = (16, 16)) -> spatially.data.Images:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, *size, 3), dtype=np.uint8)
    return spatially.open_images(pixels, subject, labels=generator.integers(0, 4, count))


def known(**options: bool | int) -> spatially.Subject:
    return spatially.load(
        Patches(**options), name="patches", input_size=16, mean=[0.5] * 3, std=[0.25] * 3, device="cpu"
    )


def test_noise_through_a_model_and_a_blur_that_lowers_both() -> None:
    subject = known(blur=3)
    images = noise(subject)
    spectra, variance = Fourier().run(subject, images, batch=16), Variance().run(subject, images, batch=16)
    assert list(spectra["kind"].values) == ["stem", "mlp", "convolution", "mlp"]
    np.testing.assert_allclose(spectra["log_amplitude"].values[0, 1:].mean(), math.log(2) / 2, atol=0.1)
    # The transfer function of a 3×3 box, and the variance that it leaves: a ninth.
    frequency = spectra["frequency"].values[1:]
    transfer = np.log(np.abs((1 + 2 * np.cos(np.pi * frequency)) / 3) ** 2)
    change = spectra["log_amplitude"].values[2, 1:] - spectra["log_amplitude"].values[1, 1:]
    np.testing.assert_allclose(change, transfer, atol=2e-3)
    np.testing.assert_allclose(variance["variance"].values[2] / variance["variance"].values[1], 1 / 9, rtol=0.03)
    assert spectra["high_frequency"].values[2] < spectra["high_frequency"].values[1]
    assert spectra["highest_frequency"].values == pytest.approx([14 / 16] * 4)
    assert (spectra["high_frequency"] == spectra["log_amplitude"].sel(frequency=14 / 16)).all()


def test_the_same_for_any_batch() -> None:
    torch.manual_seed(0)
    subject = spatially.load("swin_tiny", pretrained=False, num_classes=4, device="cpu", input_size=64)
    images = noise(subject, 7, (64, 64))
    for probe, name in ((Fourier(), "log_amplitude"), (Variance(), "variance")):
        one, three, all_at_once = (probe.run(subject, images, batch=batch) for batch in (1, 3, 64))
        for other in (one, three):
            xr.testing.assert_allclose(other[f"image_{name}"], all_at_once[f"image_{name}"], rtol=2e-4, atol=2e-5)
            xr.testing.assert_allclose(other[name], all_at_once[name], rtol=1e-4, atol=1e-5)


def test_layers_of_different_grids_share_one_axis_of_frequencies() -> None:
    torch.manual_seed(0)
    subject = spatially.load("resnet18", pretrained=False, num_classes=4, device="cpu", input_size=64)
    result = Fourier().run(subject, noise(subject, 3, (64, 64)))
    assert result["log_amplitude"].dims == ("layer", "frequency")
    for layer in range(result.sizes["layer"]):
        grid = int(result["rows"][layer]), int(result["columns"][layer])
        line = result["log_amplitude"].isel(layer=layer).dropna("frequency")
        assert list(line["frequency"].values) == frequencies(grid)
    assert result["name"].values[0] == "maxpool"
    assert result["log_amplitude_low"].notnull().sum() == result["log_amplitude"].notnull().sum()
    low, value, high = (result[f"log_amplitude{end}"] for end in ("_low", "", "_high"))
    assert bool(((low <= value) & (value <= high) | value.isnull()).all())


@pytest.mark.parametrize("probe", [Fourier(), Variance()])
def test_activations_that_are_no_numbers_are_named_by_layer(probe: Fourier | Variance) -> None:
    subject = known(nan=True)
    with pytest.raises(
        UserError, match=r"activations after blocks.2 \(layer 3, mlp\) are NaN or infinite for 4 images"
    ):
        probe.run(subject, noise(subject, 4))


@pytest.mark.parametrize("probe", [Fourier(), Variance()])
def test_no_map(probe: Fourier | Variance, subject: spatially.Subject, memory_images: spatially.data.Images) -> None:
    with pytest.raises(NotApplicable, match="small has no residual stream"):
        probe.check(subject, memory_images)


def test_labels_do_not_matter() -> None:
    subject = known()
    images = noise(subject, 4)
    other = spatially.data.Images(
        pixels=images.pixels,
        labels=images.labels * 1000,
        index=images.index,
        description="",
        fingerprint="",
        classes=tuple(f"unheard of {number}" for number in range(5000)),
    )
    assert Variance().run(subject, other)["variance"].notnull().all()


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_on_the_gpu() -> None:
    torch.manual_seed(0)
    on_cpu = spatially.load("resnet18", pretrained=False, num_classes=4, device="cpu", input_size=64)
    images = noise(on_cpu, 8, (64, 64))
    on_gpu = spatially.load(on_cpu.model, name="resnet18", device="cuda", input_size=64, dtype="float32")
    found = Fourier().run(on_gpu, images)
    on_cpu.model.cpu()
    expected = Fourier().run(on_cpu, images)
    xr.testing.assert_allclose(found["log_amplitude"], expected["log_amplitude"], atol=1e-2)
