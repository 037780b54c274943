"""The Gaussian attention bias against its formula, written out pair by pair."""

import math

import pytest
import torch

from spatially.errors import UserError
from spatially.nn.gaussian_bias import GaussianBias


def pair_by_pair(grid: tuple[int, int], amplitude: float, sigma: float) -> torch.Tensor:
    places = [(y, x) for y in range(grid[0]) for x in range(grid[1])]
    return torch.tensor(
        [
            [amplitude**2 * math.exp(-((x - u) ** 2 + (y - v) ** 2) / (2 * sigma**2)) for v, u in places]
            for y, x in places
        ],
        dtype=torch.float64,
    )


def test_starts_at_the_paper_s_values():
    table = GaussianBias()((14, 14))
    assert table.shape == (1, 196, 196)
    assert table.dtype == torch.float32
    torch.testing.assert_close(table[0].diagonal(), torch.ones(196))
    for m, expected in ((1, 0.980199), (14, 0.980199), (195, 0.00115923)):
        assert table[0, 0, m].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("grid", [(1, 1), (1, 5), (4, 3), (3, 7)])
def test_any_grid_equals_a_double_loop_and_is_symmetric(grid: tuple[int, int]):
    bias = GaussianBias(amplitude=-1.5, sigma=0.8, dtype=torch.float64)
    torch.testing.assert_close(bias(grid)[0], pair_by_pair(grid, 1.5, 0.8))
    assert torch.equal(bias(grid), bias(grid).mT)


def test_no_amplitude_is_no_bias():
    assert not GaussianBias(amplitude=0.0)((3, 4)).any()


def test_each_head_has_its_own_where_asked():
    bias = GaussianBias(3, per_head=True, dtype=torch.float64)
    with torch.no_grad():
        bias.amplitude.copy_(torch.tensor([0.5, 1.0, 2.0]))
        bias.sigma.copy_(torch.tensor([1.0, 5.0, -3.0]))
    for head, (amplitude, sigma) in enumerate([(0.5, 1.0), (1.0, 5.0), (2.0, 3.0)]):
        torch.testing.assert_close(bias((2, 3))[head], pair_by_pair((2, 3), amplitude, sigma))
    assert GaussianBias(3)((2, 3)).shape == (1, 6, 6)


def test_a_square_holds_the_offsets_around_the_query():
    bias = GaussianBias(2, per_head=True, amplitude=1.3, sigma=1.7)
    centre = bias((5, 5))[:, 12].reshape(2, 5, 5)
    torch.testing.assert_close(bias.square(5), centre)
    torch.testing.assert_close(bias.square(3), centre[:, 1:4, 1:4])
    torch.testing.assert_close(bias.table((3, 2)), centre[:, :, 1:4])


def test_gradients():
    bias = GaussianBias(2, per_head=True, amplitude=0.9, sigma=1.4, dtype=torch.float64)

    def of(amplitude: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(bias, {"amplitude": amplitude, "sigma": sigma}, ((2, 3),))

    values = tuple(value.detach().clone().requires_grad_() for value in (bias.amplitude, bias.sigma))
    assert torch.autograd.gradcheck(of, values)
    assert torch.autograd.gradgradcheck(of, values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_rounds_once_and_survives_large_grids(dtype: torch.dtype):
    exact = GaussianBias(dtype=torch.float64)((6, 9))
    assert torch.equal(GaussianBias(dtype=dtype)((6, 9)), exact.to(dtype))
    bias = GaussianBias(dtype=dtype)
    bias.table((300, 1)).sum().backward()  # 299² is beyond float16
    assert bias.sigma.grad.isfinite().all()


def test_autocast_keeps_the_parameters_precision():
    bias = GaussianBias()
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(bias((4, 5)), GaussianBias()((4, 5)))


def test_mistakes_are_named():
    for make in (lambda: GaussianBias(sigma=0.0), lambda: GaussianBias(0), lambda: GaussianBias().square(4)):
        with pytest.raises(UserError, match=r"sigma|heads|window"):
            make()


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("name", ["sigma", "amplitude"])
def test_values_must_be_finite(name: str, value: float):
    with pytest.raises(UserError, match=f"{name} must be a finite number"):
        GaussianBias(**{name: value})


def test_squares_and_grids_that_are_none_are_named():
    for window in (7.5, 7.0, "7", True):
        with pytest.raises(UserError, match="window must be an odd positive whole number"):
            GaussianBias().square(window)
    with pytest.raises(UserError, match="grid"):
        GaussianBias()((0, 3))
