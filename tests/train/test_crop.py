"""Crops against torchvision's on Pillow's pictures, and their distribution against timm's."""

import random

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import ks_2samp
from timm.data.transforms import RandomResizedCropAndInterpolation
from torch import Tensor
from torchvision.transforms.functional import InterpolationMode, hflip, pad, pil_to_tensor, resized_crop

from spatially.train.augment.crop import RESIZED_DRAWS, Boxes, cut, resized_boxes, shift, weights, whole

BOXES = [(0, 0, 48, 40), (5, 7, 20, 13), (10, 3, 9, 30), (1, 2, 46, 37)]


def pictures(count: int, height: int, width: int) -> Tensor:
    """Smooth shapes with noise, bytes."""
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(count, 3, 6, 6, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, (height, width), mode="bicubic").clamp(0, 1)
    noise = torch.rand(count, 3, height, width, generator=generator)
    return ((0.7 * smooth + 0.3 * noise) * 255).to(torch.uint8)


def picture(pixels: Tensor) -> Image.Image:
    return Image.fromarray(pixels.permute(1, 2, 0).numpy())


@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(32, 32), (12, 20), (64, 56)])
def test_cut_is_pillows_resized_crop(mode: str, size: tuple[int, int]) -> None:
    pixels = pictures(len(BOXES), 48, 40)
    top, left, height, width = torch.tensor(BOXES, dtype=torch.float64).unbind(1)
    mirror = torch.tensor([False, True, False, True])
    smooth = torch.full((len(BOXES),), mode == "bicubic")
    ours = cut(pixels, Boxes(top, left, height, width), size, mirror, smooth)
    # Which way Pillow resizes first depends on its version and on the sizes; a transposed picture goes the other way.
    upright = Boxes(left, top, width, height)
    other = cut(pixels.mT, upright, size[::-1], torch.zeros_like(mirror), smooth).mT
    other = torch.where(mirror[:, None, None, None], other.flip(3), other)
    for row, box in enumerate(BOXES):
        theirs = resized_crop(picture(pixels[row]), *box, list(size), InterpolationMode(mode))
        theirs = pil_to_tensor(hflip(theirs) if mirror[row] else theirs)
        differences = [(one[row] - theirs.float()).abs() for one in (ours, other)]
        assert differences[0].max() <= 1
        # Pillow's weights are fixed-point numbers: a value halfway between two levels may fall to either.
        assert min((one > 0).float().mean() for one in differences) < 0.02


def test_cut_of_everything_at_its_own_size_changes_nothing() -> None:
    pixels = pictures(2, 17, 23)
    sizes = torch.tensor([17.0, 17.0], dtype=torch.float64), torch.tensor([23.0, 23.0], dtype=torch.float64)
    for smooth in (False, True):
        ours = cut(pixels, whole(*sizes), (17, 23), torch.zeros(2, dtype=torch.bool), torch.full((2,), smooth))
        assert torch.equal(ours, pixels.float())


def test_a_stretched_image_is_cropped_at_the_same_place() -> None:
    """A crop of a picture that was stored stretched shows what a crop of the original shows."""
    coarse = torch.rand(1, 3, 4, 4, generator=torch.Generator().manual_seed(0))
    original = torch.nn.functional.interpolate(coarse, (60, 90), mode="bicubic").clamp(0, 1) * 255
    original = original.to(torch.uint8)
    stored = pil_to_tensor(picture(original[0]).resize((70, 70), Image.Resampling.BICUBIC))[None]
    box = Boxes(*(torch.tensor([side], dtype=torch.float64) for side in (6.0, 30.0, 40.0, 50.0)))
    none = torch.zeros(1, dtype=torch.bool)
    direct = cut(original, box, (32, 32), none, none)
    factors = torch.tensor([70 / 60], dtype=torch.float64), torch.tensor([70 / 90], dtype=torch.float64)
    found = cut(stored, box.stretched(*factors), (32, 32), none, none)
    assert (direct - found).abs().mean() < 1.0
    elsewhere = Boxes(box.top, box.left - 10, box.height, box.width).stretched(*factors)
    assert (direct - cut(stored, elsewhere, (32, 32), none, none)).abs().mean() > 5


@pytest.mark.parametrize("smooth", [False, True])
@pytest.mark.parametrize(("height", "width"), [(37, 1), (400, 1), (500, 3), (1000, 5), (1, 400), (2, 3000)])
def test_a_crop_of_less_than_a_stored_pixel_shows_the_nearest_ones(height: int, width: int, smooth: bool) -> None:
    stored, count = 36, 500
    uniform = torch.rand(count, RESIZED_DRAWS, generator=torch.Generator().manual_seed(3))
    sides = [torch.full((count,), float(side), dtype=torch.float64) for side in (height, width)]
    boxes = resized_boxes(uniform, *sides, (0.08, 1.0), (3 / 4, 4 / 3)).stretched(stored / sides[0], stored / sides[1])
    for start, length in ((boxes.top, boxes.height), (boxes.left, boxes.width)):
        found = weights(start, length, stored, 32, smooth)
        torch.testing.assert_close(found.sum(2), torch.ones(count, 32))
        near = (torch.arange(stored) + 0.5 - (start + length / 2)[:, None]).abs()
        reach = length[:, None] / 2 + (2 if smooth else 1) * (length[:, None] / 32).clamp(min=1)
        assert not found.abs().amax(1)[near > reach].any()
        within = (near < length[:, None] / 2).sum(1, keepdim=True) > 0
        assert not found.abs().amax(1)[within & (near >= length[:, None] / 2)].any()
    pixels = pictures(1, stored, stored).expand(count, -1, -1, -1)
    shown = cut(pixels, boxes, (32, 32), torch.zeros(count, dtype=torch.bool), smooth)
    assert torch.isfinite(shown).all()


def test_a_crop_between_two_pixels_is_interpolated_from_them() -> None:
    start, length = (torch.tensor([side], dtype=torch.float64) for side in (2.7, 0.5))
    first = torch.tensor([0.2 - 0.125, 0.2 + 0.125]) + 0.25  # how far a result's centre lies beyond that of pixel 2
    expected = torch.zeros(1, 2, 6)
    expected[0, :, 2], expected[0, :, 3] = 1 - first, first
    torch.testing.assert_close(weights(start, length, 6, 2, False), expected)


@pytest.mark.parametrize(("height", "width"), [(64, 64), (48, 100), (20, 200)])
def test_boxes_are_distributed_as_timms(height: int, width: int) -> None:
    scale, ratio, count = (0.08, 1.0), (3 / 4, 4 / 3), 4000
    uniform = torch.rand(count, RESIZED_DRAWS, generator=torch.Generator().manual_seed(1))
    sides = (torch.full((count,), float(side), dtype=torch.float64) for side in (height, width))
    ours = resized_boxes(uniform, *sides, scale, ratio)
    random.seed(2)
    blank = Image.new("RGB", (width, height))
    get = RandomResizedCropAndInterpolation.get_params
    theirs = np.array([get(blank, scale, ratio) for _ in range(count)], dtype=np.float64)
    for mine, other in zip((ours.top, ours.left, ours.height, ours.width), theirs.T, strict=True):
        assert ks_2samp(mine.numpy(), other, method="asymp").pvalue > 0.001
    assert ks_2samp((ours.height * ours.width).numpy(), theirs[:, 2] * theirs[:, 3], method="asymp").pvalue > 0.001
    assert ks_2samp((ours.width / ours.height).numpy(), theirs[:, 3] / theirs[:, 2], method="asymp").pvalue > 0.001
    assert (ours.top >= 0).all()
    assert (ours.left >= 0).all()
    assert (ours.top + ours.height <= height).all()
    assert (ours.left + ours.width <= width).all()


def test_shift_is_padding_and_cropping() -> None:
    pixels = pictures(6, 16, 12)
    top, left = torch.tensor([-4, 4, 0, 3, -1, 2]), torch.tensor([4, -4, 0, -2, 1, 3])
    mirror = torch.tensor([False, True, True, False, True, False])
    ours = shift(pixels, top, left, mirror, torch.zeros(3, 1, 1))
    for row in range(6):
        padded = pad(pixels[row], [4])
        theirs = padded[:, 4 + top[row] : 20 + top[row], 4 + left[row] : 16 + left[row]]
        theirs = theirs.flip(2) if mirror[row] else theirs
        assert torch.equal(ours[row], theirs.float())
