"""Relative position biases against timm's layers, and at grids that timm's cannot take against loops."""

import pytest
import torch
import torch.nn.functional as F
from timm.layers import RelPosBias as TimmBias
from timm.layers import RelPosMlp as TimmMlp

from spatially.errors import UserError
from spatially.nn.relative_position import RelPosBias, RelPosMlp, pairs, resize_table

GRIDS = [(3, 3), (2, 5), (4, 1)]


@pytest.mark.parametrize("grid", GRIDS)
def test_pairs_take_the_value_of_their_offset(grid: tuple[int, int]):
    height, width = grid
    table = torch.randn(2, 2 * height - 1, 2 * width - 1, dtype=torch.float64, requires_grad=True)
    spread = pairs(table)
    places = [(y, x) for y in range(height) for x in range(width)]
    for n, (y, x) in enumerate(places):
        for m, (v, u) in enumerate(places):
            assert torch.equal(spread[:, n, m], table[:, y - v + height - 1, x - u + width - 1])
    assert torch.autograd.gradcheck(pairs, table)


@pytest.mark.parametrize("grid", GRIDS)
def test_biases_equal_timm_s(grid: tuple[int, int]):
    for ours, timms in (
        (RelPosBias(4, grid=grid), TimmBias(window_size=grid, num_heads=4)),
        (RelPosMlp(4).eval(), TimmMlp(window_size=grid, num_heads=4).eval()),
    ):
        ours.load_state_dict(timms.state_dict())
        torch.testing.assert_close(ours(grid), timms.get_bias()[0], atol=1e-6, rtol=0)


def test_one_network_serves_every_grid():
    network = RelPosMlp(3, hidden=8, dtype=torch.float64).eval()
    large, small = network.table((6, 4)), network.table((3, 2))
    torch.testing.assert_close(large[:, 3:8, 2:5], small)


def test_a_table_is_resized_around_offset_zero():
    bias = RelPosBias(2, grid=(3, 4), dtype=torch.float64)
    table = bias.table((3, 4))
    for grid in ((3, 5), (6, 2), (1, 1)):
        expected = F.interpolate(table[None], size=(2 * grid[0] - 1, 2 * grid[1] - 1), mode="bicubic")[0]
        torch.testing.assert_close(bias.table(grid), expected)
        assert bias(grid).shape == (2, grid[0] * grid[1], grid[0] * grid[1])
    torch.testing.assert_close(bias.table((1, 1))[:, 0, 0], table[:, 2, 3])
    assert resize_table(table, (3, 4)) is table


def test_mistakes_are_named():
    with pytest.raises(UserError, match="grid"):
        RelPosBias(2, grid=(0, 3))
    for bias in (RelPosMlp(2), RelPosBias(2, grid=(2, 3))):
        with pytest.raises(UserError, match="grid"):
            bias((3, 0))
