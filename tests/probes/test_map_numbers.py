"""The kernel's numbers are those of the operations written out; in Triton's interpreter where there is no GPU."""

import pytest
import torch

from spatially.probes.fourier import half_diagonal
from spatially.probes.layers import centre
from spatially.probes.map_numbers import finish, map_numbers, sum_up
from spatially.probes.variance import spatial_variance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("grid", [(14, 14), (7, 7), (2, 2), (1, 3), (6, 12), (15, 5), (20, 20)])
@pytest.mark.parametrize("layout", ["nchw", "tokens"])
def test_both_numbers(grid, layout):
    generator = torch.Generator().manual_seed(0)
    map = torch.randn(2, 40, *grid, generator=generator) * 0.1 + 3 * torch.randn(2, 40, 1, 1, generator=generator)
    map = map.to(DEVICE)
    if layout == "tokens":
        tokens = torch.cat([torch.full((2, 1, 40), 1e4, device=DEVICE), map.flatten(2).transpose(1, 2)], dim=1)
        map = tokens[:, 1:].transpose(1, 2).unflatten(2, grid)
    found = map_numbers(map)
    exact = centre(map.double())
    torch.testing.assert_close(found.log_amplitude.double(), half_diagonal(exact), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.variance.double(), spatial_variance(exact), rtol=1e-4, atol=1e-6)


def test_a_constant_map_has_no_wave_and_no_variance():
    map = torch.full((2, 20, 6, 6), 0.1, device=DEVICE)
    found = map_numbers(map)
    assert (found.variance == 0).all()
    exact = centre(map.double())
    torch.testing.assert_close(found.log_amplitude.double(), half_diagonal(exact), rtol=1e-4, atol=1e-4)


def test_maps_are_finished_together_as_alone():
    generator = torch.Generator().manual_seed(0)
    maps = [torch.randn(2, 20, side, side, generator=generator).to(DEVICE) for side in (4, 6, 4)]
    for one, alone in zip(finish([sum_up(map) for map in maps]), map(map_numbers, maps), strict=True):
        assert all(torch.equal(*pair) for pair in zip(one, alone, strict=True))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_no_number_is_not_hidden(bad):
    """The layer in which it began is to be named."""
    maps = torch.randn(3, 20, 4, 4, generator=torch.Generator().manual_seed(0))
    maps[1, 2, 3, 0] = bad
    maps[2] = bad
    found = map_numbers(maps.to(DEVICE))
    for numbers in (found.variance[:, None], found.log_amplitude):
        assert numbers[0].isfinite().all()
        assert not numbers[1:].isfinite().any(dim=1).any()
