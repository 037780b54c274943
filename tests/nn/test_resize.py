"""Resized tables against `F.interpolate`."""

import pytest
import torch
import torch.nn.functional as F

from spatially.nn.resize import resize


@pytest.mark.parametrize("grid", [(5, 9), (13, 4), (20, 20), (3, 3)])
@pytest.mark.parametrize("antialias", [False, True])
def test_equals_bicubic_interpolation(grid, antialias):
    table = torch.randn(2, 7, 8, dtype=torch.float64)
    expected = F.interpolate(table[None], size=grid, mode="bicubic", antialias=antialias)[0]
    torch.testing.assert_close(resize(table, grid, antialias=antialias), expected)


def test_own_grid_costs_nothing_and_dtype_stays():
    table = torch.randn(2, 7, 8, dtype=torch.bfloat16)
    assert resize(table, (7, 8)) is table
    assert resize(table, (3, 5)).dtype == torch.bfloat16


def test_compiles_for_changing_grids_with_gradients():
    table = torch.randn(2, 7, 7, requires_grad=True)
    compiled = torch.compile(lambda table, like: resize(table, like.shape).sum(), fullgraph=True, backend="aot_eager")
    for grid in ((5, 6), (9, 4), (11, 12)):
        like = torch.zeros(grid)
        (measured,) = torch.autograd.grad(compiled(table, like), table)
        (expected,) = torch.autograd.grad(resize(table, grid).sum(), table)
        torch.testing.assert_close(measured, expected)
