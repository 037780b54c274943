"""Peak memory of networks small enough to follow by hand."""

import pytest
import torch
from torch import nn

from spatially.observe.live_memory import LiveStorages, peak_memory

CPU = torch.device("cpu")


@torch.no_grad()
def test_a_chain_keeps_two_layers_at_a_time() -> None:
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 500), nn.ReLU(), nn.Linear(500, 3))
    images = torch.zeros(4, 10)
    wide = 4 * 500 * 4
    assert peak_memory(lambda: model(images), CPU) == 2 * wide
    in_place = nn.Sequential(nn.Linear(10, 500), nn.ReLU(inplace=True), nn.Linear(500, 3))
    assert peak_memory(lambda: in_place(images), CPU) == wide + 4 * 3 * 4


@torch.no_grad()
def test_a_residual_connection_is_held() -> None:
    first, second = nn.Conv2d(2, 2, 1, bias=False), nn.Conv2d(2, 2, 1, bias=False)
    images = torch.zeros(1, 2, 8, 8)
    one = 2 * 64 * 4

    def code() -> torch.Tensor:
        held = first(images)
        return held + second(held)

    assert peak_memory(code, CPU) == 3 * one


def test_training_keeps_activations_and_gradients() -> None:
    """Forward keeps x·A, its square and the sum; backward adds gradients one after another."""
    weight = torch.ones(6, 1000, requires_grad=True)
    images = torch.zeros(5, 6)
    layer, gradient = 5 * 1000 * 4, 6 * 1000 * 4

    def code() -> None:
        (images @ weight).square().sum().backward()
        weight.grad = None

    peak = peak_memory(code, CPU)
    # The activation, its gradient and the weight's gradient are there together; nothing else is of that size but one factor.
    assert layer + layer + gradient <= peak <= 3 * layer + gradient + 64


def test_views_and_what_was_there_before_are_free() -> None:
    before = torch.zeros(100)
    with LiveStorages() as storages:
        before.view(10, 10).t()[0].add_(1)
    assert (storages.now, storages.peak) == (0, 0)
    with LiveStorages() as storages:
        made = before * 2
        part = made[:5].view(5, 1)
        assert storages.now == 400
        del made
        assert storages.now == 400
        del part
        assert storages.now == 0
    assert storages.peak == 400


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@torch.no_grad()
def test_the_allocator_on_cuda_agrees_for_a_chain() -> None:
    model = nn.Sequential(*(nn.Sequential(nn.ReLU(), nn.Tanh()) for _ in range(3)))
    images = torch.zeros(16, 2**18)
    here = peak_memory(lambda: model(images), CPU)
    images = images.cuda()
    assert peak_memory(lambda: model(images), images.device) == here
