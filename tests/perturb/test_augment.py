"""Crops against torchvision's resize, draws that depend on nothing but the image, and mixing whose targets add up."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torchvision.transforms import functional

from spatially.errors import UserError
from spatially.perturb import augment, mix, training_batch
from spatially.perturb.augment import AUGMENTATIONS, draw_boxes, resize_boxes


def pictures(count: int, height: int = 24, width: int = 32) -> torch.Tensor:
    return torch.rand(count, 3, height, width, generator=torch.Generator().manual_seed(0))


def test_crops_are_torchvisions() -> None:
    images = pictures(40)
    boxes = draw_boxes(torch.arange(40), size=(24, 32), scale=(0.08, 1.0), seed=3)
    resized = resize_boxes(images, boxes)
    for image, box, found in zip(images, boxes.tolist(), resized, strict=True):
        wanted = functional.resized_crop(image, *box, size=[24, 32], antialias=True)
        assert (wanted - found).abs().max() < 1e-4  # fixed point: 2⁻¹⁴ a weight


def test_the_whole_image_stays() -> None:
    images = pictures(3)
    boxes = torch.tensor([[0, 0, 24, 32]] * 3)
    assert (resize_boxes(images, boxes) - images).abs().max() <= 2**-17


def test_boxes_are_drawn_as_the_recipe_says() -> None:
    count = 4000
    top, left, height, width = draw_boxes(torch.arange(count), size=(224, 224), scale=(0.08, 1.0), seed=0).T.double()
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (top + height <= 224).all()
    assert (left + width <= 224).all()
    area, aspect = height * width / 224**2, (width / height).log()
    assert 0.075 < area.min() < 0.09
    assert aspect.abs().max() < torch.tensor(4 / 3).log() + 0.02
    # What fits is biased towards small areas as in every library; below a half nearly all fits, and is uniform.
    small = area[area < 0.5].numpy()
    assert stats.kstest(small, stats.uniform(small.min(), 0.5 - small.min()).cdf).pvalue > 1e-3
    narrow = (height < 112) & (width < 112)
    place = (top / (224 - height + 1))[narrow].numpy()
    assert stats.kstest(place, "uniform").pvalue > 1e-3


@settings(max_examples=15, deadline=None)
@given(order=st.permutations(range(6)), seed=st.integers(0, 5))
def test_a_draw_does_not_depend_on_the_batch(order: list[int], seed: int) -> None:
    images, index = pictures(6), torch.tensor([7, 0, 3, 100, 9, 12])
    whole = augment(images, index=index, seed=seed)
    assert torch.equal(augment(images[order], index=index[order], seed=seed), whole[order])
    assert torch.equal(augment(images[:1], index=index[:1], seed=seed), whole[:1])


def test_half_are_flipped() -> None:
    images = pictures(1).expand(2000, -1, -1, -1)
    turned = augment(images, index=range(2000), crop=None)
    same, flipped = ((turned == one).all(dim=(1, 2, 3)) for one in (images, images.flip(3)))
    assert (same ^ flipped).all()
    assert 0.45 < flipped.double().mean() < 0.55


def test_values_stay_in_range_and_dtype() -> None:
    for dtype in (torch.float32, torch.float64):
        found = augment(torch.ones(8, 3, 17, 19, dtype=dtype), index=range(8))
        assert found.dtype == dtype
        assert torch.equal(found, torch.ones_like(found))
    found = augment(pictures(20), index=range(20))
    assert 0 <= found.min() <= found.max() <= 1


def test_mixup_is_a_mean_of_two() -> None:
    images, labels = pictures(6), torch.tensor([0, 1, 2, 3, 0, 1])
    mixed, targets = mix(images, labels, index=range(6), classes=4, mixup=0.8)
    for i in range(6):
        share = 1.0 if labels[i] == labels[5 - i] else float(targets[i, labels[i]])
        wanted = share * images[i] + (1 - share) * images[5 - i]
        if labels[i] != labels[5 - i]:
            assert (mixed[i] - wanted).abs().max() < 1e-6
            assert float(targets[i, labels[5 - i]]) == pytest.approx(1 - share, abs=1e-6)
    assert targets.sum(dim=1).tolist() == pytest.approx([1] * 6)


def test_shares_of_mixup_follow_their_beta() -> None:
    images, labels = torch.zeros(2000, 3, 1, 1), torch.arange(2000) // 1000
    _, targets = mix(images, labels, index=range(2000), classes=2, mixup=0.8)
    own = targets.gather(1, labels[:, None])[:, 0].double().numpy()
    assert stats.kstest(own, stats.beta(0.8, 0.8).cdf).pvalue > 1e-3


def test_cutmix_counts_its_pixels() -> None:
    images = torch.arange(8.0).view(8, 1, 1, 1).expand(8, 3, 20, 30) / 8
    labels = torch.arange(8)
    mixed, targets = mix(images, labels, index=range(8), classes=8, cutmix=1.0)
    for i in range(8):
        own = (mixed[i, 0] == images[i, 0]).double().mean()
        assert float(targets[i, i]) == pytest.approx(float(own), abs=1e-6)
        assert ((mixed[i] == images[i]) | (mixed[i] == images[7 - i])).all()


@pytest.mark.parametrize("name", AUGMENTATIONS)
def test_a_training_batch_by_name(name: str) -> None:
    pixels = (pictures(4) * 255).to(torch.uint8)
    labels = torch.tensor([0, 1, 2, 1])
    images, targets = training_batch(pixels, labels, augmentation=name, index=range(4), classes=3)
    again, _ = training_batch(pixels, labels, augmentation=name, index=range(4), classes=3)
    assert torch.equal(images, again)
    assert images.shape == (4, 3, 24, 32)
    if name in ("mixup", "cutmix"):
        assert targets.shape == (4, 3)
    else:
        assert torch.equal(targets, labels)
    if name == "none":
        assert torch.equal(images, pixels.float() / 255)


def test_mistakes_are_named() -> None:
    with pytest.raises(UserError, match="unknown augmentation 'crop_flip': did you mean 'crop-flip'"):
        training_batch(pictures(1), torch.zeros(1), augmentation="crop_flip", index=[0], classes=2)
    with pytest.raises(UserError, match="crop must be two shares"):
        augment(pictures(1), index=[0], crop=(0.5, 0.1))
    with pytest.raises(UserError, match="one of mixup and cutmix"):
        mix(pictures(1), torch.zeros(1), index=[0], classes=2)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_same_bits_on_a_gpu() -> None:
    images = pictures(32, 224, 224)
    assert torch.equal(augment(images.cuda(), index=range(32)).cpu(), augment(images, index=range(32)))
