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
