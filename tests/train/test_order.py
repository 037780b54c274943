"""The order of images: a permutation, cut alike for any number of processes."""

import pytest
import torch

from spatially.errors import UserError
from spatially.train.order import Order


def test_an_epoch_shows_each_image_once() -> None:
    order = Order(count=24, batch=6, seed=0)
    rows, state = order.epoch(0)
    assert rows.shape == state.shape == (4, 6)
    assert sorted(rows.flatten().tolist()) == list(range(24))
    other, _ = order.epoch(1)
    assert not torch.equal(rows, other)
    assert torch.equal(rows, order.epoch(0)[0])


def test_images_that_fill_no_batch_are_left_out() -> None:
    rows, _ = Order(count=25, batch=6, seed=0).epoch(3)
    assert rows.shape == (4, 6)
    assert len(rows.unique()) == 24


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_processes_share_each_batch(pairs: bool, world: int) -> None:
    alone, states = Order(count=40, batch=12, seed=5, pairs=pairs).epoch(2)
    places = []
    for rank in range(world):
        order = Order(count=40, batch=12, seed=5, pairs=pairs, rank=rank, world=world)
        rows, state = order.epoch(2)
        assert torch.equal(rows, alone[:, order.places()])
        assert torch.equal(state, states[:, order.places()])
        if pairs:
            assert torch.equal(order.places().flip(0), 11 - order.places())
        places += order.places().tolist()
    assert sorted(places) == list(range(12))


def test_repeats_stand_together_with_other_draws() -> None:
    """As many images an epoch as the set holds, each three times: timm's sampler, over all its processes."""
    rows, state = Order(count=30, batch=6, seed=0, repeats=3).epoch(0)
    assert rows.shape == (5, 6)
    assert len(rows.unique()) == 10
    assert (rows.view(-1, 3) == rows.view(-1, 3)[:, :1]).all()
    assert len(state.unique()) == 30


def test_timms_sampler_has_the_same_images_a_batch() -> None:
    from timm.data.distributed_sampler import RepeatAugSampler

    samplers = [
        RepeatAugSampler(range(30), num_replicas=2, rank=rank, num_repeats=3, selected_round=0) for rank in range(2)
    ]
    shown = [row for pair in zip(*samplers, strict=True) for row in pair]
    counts = torch.bincount(torch.bincount(torch.tensor(shown), minlength=30))
    ours = torch.bincount(
        torch.bincount(Order(count=30, batch=6, seed=0, repeats=3).epoch(0)[0].flatten(), minlength=30)
    )
    assert torch.equal(counts, ours)


def test_batches_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(UserError, match="at most the 10 training images"):
        Order(count=10, batch=11, seed=0)
    with pytest.raises(UserError, match="multiple of 2 for 2 processes"):
        Order(count=10, batch=5, seed=0, world=2)
    with pytest.raises(UserError, match="multiple of 4 for 2 processes that mix"):
        Order(count=10, batch=6, seed=0, world=2, pairs=True)
    assert Order(count=10, batch=5, seed=0, pairs=True).share == 5
