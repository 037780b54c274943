"""Where the spectrum of the noise lies, how large it is, and what the authors' code makes of it."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spatially.errors import UserError
from spatially.perturb import add_frequency_noise
from spatially.perturb.frequency import HALF_WIDTH, draw_noise, ring

FREQUENCIES = (0.1, 0.25, 0.5, 0.75, 1.0, 1.3)


def energy_outside(noise: torch.Tensor, frequency: float, half_width: float) -> float:
    """By NumPy in double precision, from the definition alone."""
    spectrum = np.abs(np.fft.fft2(noise.double().numpy())) ** 2
    down, across = (2 * np.fft.fftfreq(side) for side in noise.shape[2:])
    radius = np.sqrt(down[:, None] ** 2 + across**2)
    return float(spectrum[..., np.abs(radius - frequency) > half_width + 1e-9].sum() / spectrum.sum())


@settings(max_examples=25, deadline=None)
@given(
    height=st.integers(16, 70),
    width=st.integers(16, 70),
    frequency=st.floats(0, 1),
    half_width=st.floats(0.13, 0.5),
    size=st.floats(1e-3, 1),
    seed=st.integers(0, 5),
)
def test_noise_is_real_in_its_ring_and_of_its_size(
    height: int, width: int, frequency: float, half_width: float, size: float, seed: int
) -> None:
    draw = draw_noise((3, height, width), index=torch.tensor([3, 10**9]), seed=seed)
    noise = draw.at(frequency, half_width=half_width, size=size)
    assert noise.shape == (2, 3, height, width)
    assert noise.dtype == torch.float32
    assert energy_outside(noise, frequency, half_width) < 1e-6
    np.testing.assert_allclose(noise.double().square().mean(dim=(1, 2, 3)).sqrt(), size, rtol=1e-5)
    assert not torch.equal(noise[0], noise[1])


@pytest.mark.parametrize("shape", [(64, 64), (48, 80), (33, 57)])
def test_norm_is_the_same_at_every_frequency(shape: tuple[int, int]) -> None:
    images = torch.rand(2, 3, *shape)
    noises = [add_frequency_noise(images, frequency=one, index=[0, 1]) - images for one in FREQUENCIES]
    norms = torch.stack([noise.flatten(1).norm(dim=1) for noise in noises])
    np.testing.assert_allclose(norms, 0.1 * math.sqrt(3 * shape[0] * shape[1]), rtol=1e-4)


def test_every_bin_of_the_ring_and_every_channel_is_filled_evenly() -> None:
    """Mean energy over many images is flat over the ring, as for white noise."""
    noise = draw_noise((3, 32, 32), index=torch.arange(400)).at(0.5, half_width=0.1)
    energy = torch.fft.fft2(noise.double()).abs().square().mean(dim=0)
    inside = energy[:, ring((32, 32), 0.5, 0.1)]
    assert (inside / inside.mean() - 1).abs().max() < 0.3
    channels = noise.permute(1, 0, 2, 3).flatten(1)
    assert (torch.corrcoef(channels) - torch.eye(3)).abs().max() < 0.02


def test_ring_of_a_rectangle_is_an_ellipse_of_bins() -> None:
    """Frequencies are per axis: half a turn a pixel is bin 8 of 16 rows and bin 16 of 32 columns."""
    mask = ring((16, 32), 0.5, 0.01)
    assert mask[4, 0]
    assert mask[0, 8]
    assert not mask[8, 0]
    assert not mask[0, 4]


def authors(noise: torch.Tensor, f: float, s: float) -> torch.Tensor:
    """The filter as their text and numbers have it: square boxes of even width around the middle of a shifted spectrum."""
    side = noise.shape[-1]
    middle = side // 2
    spectrum = torch.fft.fftshift(torch.fft.fft2(noise.double()), dim=(-2, -1))
    kept = torch.zeros(side, side, dtype=torch.bool)
    for edge, value in ((f + s, True), (f - s, False)):
        half = min(max(int(edge * side / (2 * math.pi)), 0), middle)
        kept[middle - half : middle + half, middle - half : middle + half] = value
    return torch.fft.ifft2(torch.fft.ifftshift(spectrum * kept, dim=(-2, -1)))


@pytest.mark.parametrize(
    ("frequency", "filtered", "added"), [(0.1, 0.157, 0.154), (0.9, 0.472, 0.464)], ids=["0.1π", "0.9π"]
)
def test_authors_energy(frequency: float, filtered: float, added: float) -> None:
    """What passes their filter has these root mean squares; its real part, which they add, a little less."""
    draw = draw_noise((3, 224, 224), index=torch.arange(4), style="authors")
    noise = draw.at(frequency, size=0.3)
    signs = draw_noise((3, 224, 224), index=torch.arange(4), style="authors").at(0.5, half_width=2, size=1)
    assert set(signs.round().unique().tolist()) == {-1.0, 1.0}
    expected = authors(signs.round(), frequency * math.pi, 0.2)
    assert expected.abs().square().mean().sqrt().item() == pytest.approx(filtered, abs=1e-3)
    assert noise.square().mean().sqrt().item() / 0.3 == pytest.approx(added, abs=1e-3)
    np.testing.assert_allclose(noise, 0.3 * expected.real, atol=1e-6)
    assert ring((224, 224), frequency, HALF_WIDTH, style="authors").double().mean().sqrt().item() == pytest.approx(
        filtered, abs=6e-4
    )


@pytest.mark.parametrize("style", ["round", "authors"])
@pytest.mark.parametrize("shape", [(32, 32), (24, 31)])
def test_an_image_has_its_own_noise_in_every_batch(style: str, shape: tuple[int, int]) -> None:
    whole = draw_noise((3, *shape), index=torch.arange(20), seed=1, style=style).at(0.4)
    for numbers in ([7], [19, 0, 7]):
        part = draw_noise((3, *shape), index=torch.tensor(numbers), seed=1, style=style).at(0.4)
        torch.testing.assert_close(part, whole[numbers], rtol=0, atol=1e-6)
    other = draw_noise((3, *shape), index=torch.arange(20), seed=2, style=style).at(0.4)
    assert (other - whole).abs().max() > 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"frequency": 1.5}, "frequency must lie in 0..1.41"),
        ({"frequency": float("nan")}, "frequency must lie in 0..1.41"),
        ({"frequency": 0.5, "half_width": 0}, "half_width must lie above 0"),
        ({"frequency": 0.5, "size": -1.0}, "size must be a number of at least 0"),
        ({"frequency": 0.1, "half_width": 0.01}, "8×8 pixels has no frequency at 0.1π"),
    ],
)
def test_what_makes_no_noise(options: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=message):
        add_frequency_noise(torch.rand(1, 3, 8, 8), index=[0], **options)


def test_no_noise_is_the_image() -> None:
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(add_frequency_noise(images, frequency=0.5, index=[0, 1], size=0.0), images)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("style", ["round", "authors"])
def test_same_noise_on_cuda_but_for_rounding(style: str) -> None:
    index = torch.arange(5)
    here = draw_noise((3, 96, 80), index=index, style=style).at(0.3)
    there = draw_noise((3, 96, 80), index=index.cuda(), style=style).at(0.3)
    torch.testing.assert_close(there.cpu(), here, rtol=0, atol=2e-6)
