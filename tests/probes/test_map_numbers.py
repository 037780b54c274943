"""The kernel's numbers are those of the operations written out; in Triton's interpreter where there is no GPU."""

import pytest
import torch

from spatially.probes.fourier import half_diagonal, waves_of
from spatially.probes.layers import centre
from spatially.probes.map_numbers import map_numbers
from spatially.probes.variance import spatial_variance

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("grid", [(14, 14), (7, 7), (2, 2), (1, 3), (9, 12)])
@pytest.mark.parametrize("layout", ["nchw", "tokens"])
def test_both_numbers(grid, layout):
    generator = torch.Generator().manual_seed(0)
    map = torch.randn(2, 40, *grid, generator=generator) * 0.1 + 3 * torch.randn(2, 40, 1, 1, generator=generator)
    map = map.to(DEVICE)
    if layout == "tokens":
        tokens = torch.cat([torch.full((2, 1, 40), 1e4, device=DEVICE), map.flatten(2).transpose(1, 2)], dim=1)
        map = tokens[:, 1:].transpose(1, 2).unflatten(2, grid)
    found = map_numbers(map, waves_of(grid, torch.float32, map.device))
    exact = centre(map.double())
    torch.testing.assert_close(found.log_amplitude.double(), half_diagonal(exact), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.variance.double(), spatial_variance(exact), rtol=1e-4, atol=1e-6)
