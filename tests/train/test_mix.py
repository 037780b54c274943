"""Mixup, CutMix, smoothing and erasing against timm's: exactly where the draw can be given, else by distribution."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import beta, ks_2samp, kstest
from timm.data.mixup import Mixup
from timm.data.random_erasing import RandomErasing

from spatially.train.augment.draws import Draws, states
from spatially.train.augment.erase import DRAWS, erase, inside, rectangles
from spatially.train.augment.mix import mix, mixing, targets


def settings(**changes: float) -> SimpleNamespace:
    return SimpleNamespace(**({"mixup": 0.8, "cutmix": 1.0, "mix_probability": 1.0, "mix_switch": 0.5} | changes))


@pytest.mark.parametrize("kind", ["mixup", "cutmix", "nothing"])
def test_mixing_is_timms(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """timm's class, told the λ and the place that ours drew."""
    images = torch.randn(8, 3, 20, 24, generator=torch.Generator().manual_seed(0))
    labels = torch.tensor([0, 1, 2, 3, 4, 0, 1, 1])
    own, centre = 0.64, [13, 5]  # √(1 − 0.64) = 0.6: a box of 12 × 14 pixels
    theirs = Mixup(0.8 * (kind == "mixup"), 1.0 * (kind != "mixup"), prob=kind != "nothing", num_classes=5)
    monkeypatch.setattr(np.random, "beta", lambda *_: own)
    monkeypatch.setattr(np.random, "randint", lambda *_, **__: centre.pop(0))
    expected, expected_targets = theirs(images.clone(), labels)
    row = torch.tensor([own, own, 0, 0, 0, 0])
    if kind == "cutmix":
        row = torch.tensor([1 - 12 * 12 / 480, 1.0, 7, 19, 0, 12])
    if kind == "nothing":
        row = torch.tensor([1.0, 1.0, 0, 0, 0, 0])
    assert torch.allclose(mix(images, row), expected, atol=1e-6)
    assert torch.allclose(targets(labels, 5, 0.1, row), expected_targets, atol=1e-6)


def test_draws_are_distributed_as_timms() -> None:
    steps, size = 4000, (32, 32)
    table = mixing(0, 3, steps, size, settings()).double().numpy()
    cut = table[:, 1] == 1
    assert abs(cut.mean() - 0.5) < 0.03
    assert kstest(table[~cut, 0], beta(0.8, 0.8).cdf).pvalue > 0.001
    assert (table[~cut, 0] == table[~cut, 1]).all()
    np.random.seed(0)  # noqa: NPY002  what timm draws from
    theirs = []
    for _ in range(steps // 2):
        mixer = Mixup(0.0, 1.0, num_classes=2)
        images = torch.zeros(2, 1, *size)
        images[1] = 1
        theirs.append(1 - float(mixer(images, torch.tensor([0, 1]))[0][0].mean()))
    assert ks_2samp(table[cut, 0], np.array(theirs), method="asymp").pvalue > 0.001
    _, _, top, bottom, left, right = table[cut].T
    assert np.allclose(table[cut, 0], 1 - (bottom - top) * (right - left) / 1024, atol=1e-6)


def test_probability_and_single_kinds() -> None:
    table = mixing(0, 0, 3000, (16, 16), settings(mix_probability=0.3))
    untouched = (table[:, 0] == 1) & (table[:, 1] == 1) & (table[:, 2:].sum(1) == 0)
    assert abs(untouched.double().mean() - 0.7) < 0.05
    assert (mixing(0, 0, 500, (16, 16), settings(cutmix=0.0))[:, 1] < 1).all()
    assert (mixing(0, 0, 500, (16, 16), settings(mixup=0.0))[:, 1] == 1).all()
    assert torch.equal(mixing(0, 0, 5, (16, 16), settings(mixup=0, cutmix=0))[:, :2], torch.ones(5, 2))


def test_draws_depend_on_seed_epoch_and_step_alone() -> None:
    whole = mixing(1, 2, 40, (16, 16), settings())
    assert torch.equal(whole[:10], mixing(1, 2, 10, (16, 16), settings()))
    assert not torch.equal(whole, mixing(1, 3, 40, (16, 16), settings()))
    assert not torch.equal(whole, mixing(2, 2, 40, (16, 16), settings()))


def test_targets_without_mixing_are_smoothed() -> None:
    soft = targets(torch.tensor([1, 0]), 4, 0.1)
    assert torch.allclose(soft, torch.tensor([[0.025, 0.925, 0.025, 0.025], [0.925, 0.025, 0.025, 0.025]]))


def measured(erased: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Heights and widths of the rectangles in masks (B, H, W)."""
    return erased.any(2).sum(1).numpy(), erased.any(1).sum(1).numpy()


def test_rectangles_are_distributed_as_timms() -> None:
    count, height, width = 3000, 40, 56
    uniform = torch.rand(count, DRAWS, generator=torch.Generator().manual_seed(4))
    ours = inside(rectangles(uniform, 1.0, height, width), height, width)
    random.seed(5)
    torch.manual_seed(6)
    theirs = RandomErasing(1.0, mode="pixel", device="cpu")(torch.zeros(count, 1, height, width))[:, 0] != 0
    for mine, other in zip(measured(ours), measured(theirs), strict=True):
        assert ks_2samp(mine, other, method="asymp").pvalue > 0.001
    shares = [one.double().mean((1, 2)).numpy() for one in (ours, theirs)]
    assert ks_2samp(*shares, method="asymp").pvalue > 0.001
    middles = [one.any(2).double().argmax(1).numpy() for one in (ours, theirs)]
    assert ks_2samp(*middles, method="asymp").pvalue > 0.001
    assert abs(shares[0].mean() - (0.02 + 1 / 3) / 2) < 0.01


def test_erasing_changes_its_share_of_images_and_only_rectangles() -> None:
    state = states(0, 1, torch.arange(2000))
    numbers = Draws(0, {"erase": DRAWS})(state)["erase"]
    images = torch.zeros(2000, 3, 16, 16)
    erased = erase(images, rectangles(numbers, 0.25, 16, 16), state, 0)
    changed = erased.flatten(1).any(1)
    assert abs(changed.double().mean() - 0.25) < 0.03
    noise = erased[erased != 0]
    assert abs(noise.mean()) < 0.02
    assert abs(noise.std() - 1) < 0.02
    touched = (erased != 0).any(1)
    height, width = measured(touched)
    area = touched.sum((1, 2)).numpy()
    assert ((area == height * width) | (area >= 0.97 * height * width)).all()  # level 0 of the noise is no change


def test_draws_of_a_purpose_do_not_depend_on_others() -> None:
    state = states(3, 0, torch.arange(5))
    alone = Draws(3, {"flip": 1})(state)["flip"]
    among = Draws(3, {"crop": 22, "nothing": 0, "flip": 1, "erase": 23})(state)
    assert torch.equal(alone, among["flip"])
    assert "nothing" not in among
    assert not torch.equal(alone, Draws(4, {"flip": 1})(state)["flip"])


def test_states_differ_between_epochs_images_and_repeats() -> None:
    index = torch.arange(100)
    every = [states(0, 0, index), states(0, 1, index), states(1, 0, index)]
    every += [states(0, 0, index, torch.full((100,), repeat)) for repeat in range(3)]
    assert len(torch.cat(every).unique()) == 600
