"""RandAugment's operations against timm's on Pillow's pictures at the same magnitude; colour jitter against torchvision's."""

import random

import pytest
import torch
from PIL import Image
from timm.data.auto_augment import AugmentOp
from torch import Tensor
from torchvision.transforms.functional import adjust_brightness, adjust_contrast, adjust_saturation, pil_to_tensor

from spatially.errors import UserError
from spatially.train.augment.colour import jitter, jitter_plan, recolour
from spatially.train.augment.geometry import GEOMETRIC, matrices, transform
from spatially.train.augment.operations import NOTHING, NUMBER, OPERATIONS, arguments
from spatially.train.augment.rand_augment import RandAugment

FILL = (124, 116, 104)
MAGNITUDES = (0.0, 2.0, 4.5, 7.25, 9.0, 10.0)
INCREASING = ("Posterize", "Solarize", "Color", "Contrast", "Brightness", "Sharpness")


def picture(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.to(torch.uint8).permute(1, 2, 0).numpy())


def samples() -> Tensor:
    """A smooth image, a noisy one, one of low contrast, one of a single colour, and one of two: float levels."""
    generator = torch.Generator().manual_seed(3)
    smooth = (
        torch.nn.functional.interpolate(torch.rand(1, 3, 5, 5, generator=generator), (28, 36), mode="bilinear") * 255
    )
    noise = torch.rand(1, 3, 28, 36, generator=generator) * 255
    plain = torch.tensor([200.0, 10.0, 90.0])[None, :, None, None].expand(1, 3, 28, 36)
    two = torch.where(torch.arange(36) < 7, 30.0, 220.0).expand(1, 3, 28, 36)
    return torch.cat([smooth, noise, 90 + smooth / 5, plain, two]).floor()


def theirs(
    name: str,
    magnitude: float,
    negative: bool,
    pixels: Tensor,
    monkeypatch: pytest.MonkeyPatch,
    reading: Image.Resampling = Image.Resampling.BILINEAR,
) -> Tensor:
    operation = AugmentOp(name, prob=1.0, magnitude=magnitude, hparams={"img_mean": FILL, "interpolation": reading})
    monkeypatch.setattr(random, "random", lambda: 0.9 if negative else 0.1)
    if name.startswith("Posterize") and operation.level_fn(magnitude, {})[0] == 0:
        return torch.zeros_like(pixels)  # no bit is kept; newer versions of Pillow refuse to do it
    return torch.stack([pil_to_tensor(operation(picture(one))) for one in pixels]).float()


def ours(
    name: str, magnitude: float, negative: bool, increasing: bool, pixels: Tensor, smooth: Tensor | bool = False
) -> Tensor:
    count = len(pixels)
    kind = torch.full((count,), NUMBER[name])
    told = arguments(kind, torch.full((count,), magnitude), torch.full((count,), negative), increasing=increasing)
    fill = torch.tensor(FILL, dtype=torch.float32)[:, None, None]
    return recolour(transform(pixels, matrices(kind, told, *pixels.shape[2:]), fill, smooth), kind, told)


@pytest.mark.parametrize("increasing", [False, True])
@pytest.mark.parametrize("name", OPERATIONS)
def test_operation_is_timms(name: str, increasing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = samples()
    for magnitude in MAGNITUDES:
        for negative in (False, True):
            timms = f"{name}Increasing" if increasing and name in INCREASING else name
            expected = theirs(timms, magnitude, negative, pixels, monkeypatch)
            difference = (ours(name, magnitude, negative, increasing, pixels) - expected).abs()
            # Colours are exact. A moved pixel is a float that Pillow computes in float64 before it cuts the decimals off.
            assert difference.max() <= (1 if name in GEOMETRIC else 0), (magnitude, negative)
            assert (difference > 0).float().mean() < 0.02, (magnitude, negative)


@pytest.mark.parametrize("name", GEOMETRIC)
def test_bicubic_operation_is_timms(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = samples()
    for magnitude in MAGNITUDES:
        for negative in (False, True):
            expected = theirs(name, magnitude, negative, pixels, monkeypatch, Image.Resampling.BICUBIC)
            found = ours(name, magnitude, negative, True, pixels, smooth=True)
            difference = (found - expected).abs()
            assert difference.max() <= 1, (magnitude, negative)
            assert (difference > 0).float().mean() < 0.02, (magnitude, negative)
            mixed = ours(name, magnitude, negative, True, pixels, smooth=torch.tensor([True, False, True, False, True]))
            assert torch.equal(mixed[::2], found[::2])
            assert torch.equal(mixed[1::2], ours(name, magnitude, negative, True, pixels)[1::2])


def test_pixels_are_read_as_the_recipe_interpolates() -> None:
    """timm hands the recipe's interpolation on to RandAugment, and draws one for each operation where it is random."""
    pixels = samples()[:1].expand(400, -1, -1, -1)
    rand_augment = RandAugment.read("rand-m9-n1-p1")
    uniform = torch.rand(400, 4, generator=torch.Generator().manual_seed(0))
    uniform[:, 0] = (NUMBER["Rotate"] + 0.5) / len(OPERATIONS)
    plan, fill = rand_augment.plan(uniform, (28, 36)), torch.zeros(3, 1, 1)
    found = {name: rand_augment(pixels, plan, fill, interpolation=name) for name in ("bilinear", "bicubic", "random")}
    alike = {name: (found["random"] == found[name]).flatten(1).all(1) for name in ("bilinear", "bicubic")}
    assert (alike["bilinear"] ^ alike["bicubic"]).all()
    assert abs(alike["bicubic"].double().mean() - 0.5) < 0.1
    turned = uniform[:, 3] > 0.5
    assert abs(alike["bicubic"][turned].double().mean() - 0.5) < 0.15  # whichever way it is turned


def test_nothing_changes_nothing() -> None:
    pixels = samples()
    kind = torch.full((len(pixels),), NOTHING)
    told = arguments(kind, torch.full((len(pixels),), 9.0), torch.zeros(len(pixels), dtype=torch.bool), increasing=True)
    moved = transform(pixels, matrices(kind, told, 28, 36), torch.zeros(3, 1, 1))
    assert torch.equal(moved, pixels)
    assert torch.equal(transform(pixels, matrices(kind, told, 28, 36), torch.zeros(3, 1, 1), True), pixels)
    assert torch.equal(recolour(moved, kind, told), pixels)


def test_images_of_a_batch_get_each_their_own() -> None:
    """All operations in one batch give what each gives alone."""
    pixels = samples()[:1].expand(len(OPERATIONS), -1, -1, -1)
    kind = torch.arange(len(OPERATIONS))
    negative = kind % 2 == 0
    told = arguments(kind, torch.full((len(kind),), 8.0), negative, increasing=True)
    fill = torch.tensor(FILL, dtype=torch.float32)[:, None, None]
    together = recolour(transform(pixels, matrices(kind, told, 28, 36), fill), kind, told)
    for number, name in enumerate(OPERATIONS):
        assert torch.equal(together[number], ours(name, 8.0, bool(negative[number]), True, pixels[:1])[0])


def test_rand_augment_draws_what_its_name_says() -> None:
    rand_augment = RandAugment.read("rand-m9-n3-p0.5-mstd1.0-inc1")
    assert rand_augment.draws == 12
    uniform = torch.rand(30_000, 4, generator=torch.Generator().manual_seed(0))
    kind, told = rand_augment.layer(uniform)
    counts = torch.bincount(kind, minlength=NOTHING + 1).double() / len(kind)
    assert abs(counts[NOTHING] - 0.5) < 0.01
    assert (counts[:NOTHING] - 0.5 / 15).abs().max() < 0.006
    rotation = told[kind == NUMBER["Rotate"]].abs() / 3
    # A normal variable of mean 9 and deviation 1, held below 10, has this mean and share at 10.
    assert abs(rotation.mean() - 8.917) < 0.1
    assert abs((rotation > 9.9999).double().mean() - 0.1587) < 0.03
    assert abs((told[kind == NUMBER["Rotate"]] < 0).double().mean() - 0.5) < 0.05


def test_rand_augment_without_deviation_has_its_magnitude() -> None:
    kind, told = RandAugment.read("rand-m5-p1").layer(torch.rand(2000, 4, generator=torch.Generator().manual_seed(0)))
    assert torch.allclose(told[kind == NUMBER["Rotate"]].abs(), torch.tensor(15.0))
    assert (kind < NOTHING).all()


def test_rand_augment_evenly_below_its_magnitude() -> None:
    kind, told = RandAugment.read("rand-m10-p1-mstd101").layer(
        torch.rand(20_000, 4, generator=torch.Generator().manual_seed(0))
    )
    turned = told[kind == NUMBER["Rotate"]].abs() / 3
    assert abs(turned.mean() - 5) < 0.3
    assert turned.min() < 0.3


@pytest.mark.parametrize("name", ["rand-k3", "rand-m9-tweights", "augmix-m3", "rand-m", "rand-m9..5", "ran-m9"])
def test_unknown_names_are_refused(name: str) -> None:
    with pytest.raises(UserError, match="rand_augment"):
        RandAugment.read(name)


def test_jitter_is_torchvisions() -> None:
    pixels = samples()
    uniform = torch.rand(len(pixels), 6, generator=torch.Generator().manual_seed(5))
    result = jitter(pixels, jitter_plan(uniform, 0.4))
    change = (adjust_brightness, adjust_contrast, adjust_saturation)
    for row, image in enumerate(pixels):
        expected = picture(image)
        for step in uniform[row, 3:].argsort().tolist():
            expected = change[step](expected, 0.6 + 0.8 * float(uniform[row, step]))
        assert (result[row] - pil_to_tensor(expected).float()).abs().max() <= 1
