"""The split by seed: every image once, every class alike, nothing else decides it."""

import numpy as np
import pytest

from spatially.train.split import split_rows

SHARES = (0.7, 0.15, 0.15)


def test_every_image_is_in_one_part_and_classes_are_cut_alike() -> None:
    labels = np.repeat(np.arange(5), [20, 40, 100, 3, 1])
    parts = split_rows(labels, SHARES, seed=3)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    counts = [np.bincount(labels[part], minlength=5).tolist() for part in parts]
    assert counts == [[14, 28, 70, 2, 1], [3, 6, 15, 1, 0], [3, 6, 15, 0, 0]]


def test_the_seed_decides_and_the_order_of_classes_does_not_move_an_image() -> None:
    labels = np.tile(np.arange(4), 50)
    first, second, other = (split_rows(labels, SHARES, seed=seed)[0] for seed in (0, 0, 1))
    assert first.tolist() == second.tolist()
    assert 40 < len(set(first.tolist()) & set(other.tolist())) < len(first)
    renamed = split_rows(3 - labels, SHARES, seed=0)[0]
    assert renamed.tolist() == first.tolist()


@pytest.mark.parametrize("shares", [(0.8, 0.2, 0.0), (0.5, 0.5, 0.0)])
def test_without_a_test_share_there_are_no_test_images(shares: tuple[float, float, float]) -> None:
    train, validation, test = split_rows(np.zeros(97, int), shares, seed=0)
    assert len(test) == 0
    assert len(train) == pytest.approx(97 * shares[0], abs=1)
    assert len(train) + len(validation) == 97


@pytest.mark.parametrize(
    ("shares", "images", "expected"),
    [
        (SHARES, 1, (1, 0, 0)),
        (SHARES, 2, (1, 1, 0)),
        (SHARES, 3, (2, 1, 0)),
        (SHARES, 4, (3, 1, 0)),
        (SHARES, 5, (3, 1, 1)),
        ((0.9, 0.1, 0.0), 4, (3, 1, 0)),
        ((0.5, 0.5, 0.0), 1, (1, 0, 0)),
        ((0.1, 0.2, 0.7), 4, (1, 1, 2)),
    ],
)
def test_small_classes_have_training_then_validation_then_test_images(
    shares: tuple[float, float, float], images: int, expected: tuple[int, int, int]
) -> None:
    parts = split_rows(np.repeat(np.arange(100), images), shares, seed=0)
    assert sorted(np.concatenate(parts).tolist()) == list(range(100 * images))
    for part, count in zip(parts, expected, strict=True):
        assert np.bincount(part // images, minlength=100).tolist() == [count] * 100
