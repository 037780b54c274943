r"""The Fourier probe (Park & Kim, figure 4): how much high frequency is left in the map at each point of a model.

For a map :math:`x` of :math:`h \times w` positions, along the half diagonal from the lowest frequency outward,

.. math:: \Delta(k) = \left\langle \log(|\hat x_{k}| + 10^{-6}) - \log(|\hat x_{0}| + 10^{-6}) \right\rangle, \qquad
          \hat x_{k} = \sum_{y, x} x_{yx}\, e^{-2\pi i (k_y y / h + k_x x / w)},

the mean over channels and images of the logarithm. :math:`k_y = k_x = k` on a square map; on any other, k counts along the
shorter side and the other takes its nearest bin. Frequencies are what they are, in units of π: ``2 k / h``, whose last is
short of 1. White noise reads ½ ln 2 everywhere but at 0.

Only the diagonal is computed: one product of the maps with a few waves, no transform of the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, pi, sqrt
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from spatially.observe.stream import Place
from spatially.probes.base import Drawing
from spatially.probes.layers import Centred, StreamProbe, centre, mean_over_images
from spatially.probes.map_numbers import SMALLEST, MapNumbers


@dataclass(frozen=True, kw_only=True)
class Fourier(StreamProbe):
    """Relative log amplitude of the map at each point of the residual stream, by frequency."""

    name: ClassVar[str] = "fourier"
    title: ClassVar[str] = "Frequencies along the model"
    paper: ClassVar[str] = "Park & Kim, How Do Vision Transformers Work?, figure 4"
    definition: ClassVar[str] = (
        "log(|FFT2| + 1e-6) of each channel of the map after the stem and after each residual addition, along the half "
        "diagonal, minus its value at frequency 0; mean over channels and images. Frequencies are true, in units of π."
    )

    seed: int = 0

    def numbers(self, map: Tensor) -> Tensor:
        return half_diagonal(centre(map))

    def chosen(self, numbers: MapNumbers) -> Tensor:
        return numbers.log_amplitude

    def outcomes_of(self, places: Sequence[Place], numbers: Sequence[NDArray[np.floating]]) -> dict[str, Any]:
        own = [frequencies(place.grid) for place in places]
        axis = sorted({frequency for one in own for frequency in one})
        where = {frequency: number for number, frequency in enumerate(axis)}
        values = np.full((len(numbers[0]), len(places), len(axis)), np.nan, dtype=np.float32)
        for layer, (one, found) in enumerate(zip(own, numbers, strict=True)):
            values[:, layer, [where[frequency] for frequency in one]] = found
        return {
            "image_log_amplitude": (("image", "layer", "frequency"), values),
            "frequency": ("frequency", axis, {"units": "π"}),
        }

    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        found = mean_over_images(outcomes, "image_log_amplitude", "log_amplitude")
        grids = zip(outcomes["rows"].values, outcomes["columns"].values, strict=True)
        highest = xr.DataArray([frequencies((int(rows), int(columns)))[-1] for rows, columns in grids], dims="layer")
        at_highest = found.sel(frequency=highest).drop_vars("frequency")
        at_highest = at_highest.where(highest > 0)  # a map of 2×2 has no frequency but 0
        names = {name: str(name).replace("log_amplitude", "high_frequency") for name in at_highest.data_vars}
        result = outcomes.assign(found.data_vars).assign(at_highest.rename(names).data_vars)
        return result.assign_coords(highest_frequency=highest.assign_attrs(units="π"))

    @classmethod
    def drawing(cls) -> Drawing:
        from spatially.probes import fourier_figures

        return fourier_figures


def half_diagonal(maps: Centred) -> Tensor:
    """Δ at each of `frequencies`, mean over channels: (batch, frequencies)."""
    mean, rest, grid = maps
    # Frequencies other than 0 do not see the mean.
    waves = waves_of(grid, rest.dtype, rest.device).expand(len(rest), -1, -1)
    real, imaginary = torch.bmm(waves, rest.transpose(1, 2)).chunk(2, dim=1)
    others = torch.hypot(real, imaginary).add_(SMALLEST).log_().mean(dim=2)
    lowest = (mean[..., 0].abs() * (grid[0] * grid[1]) + SMALLEST).log().mean(dim=1, keepdim=True)
    return torch.cat([lowest - lowest, others - lowest], dim=1)


def frequencies(grid: tuple[int, int]) -> list[float]:
    """The frequencies of the half diagonal of a grid, in units of π: the root mean square of both axes'.

    >>> [round(frequency, 3) for frequency in frequencies((7, 7))]
    [0.0, 0.286, 0.571, 0.857]
    """
    pairs = [(2 * down / grid[0], 2 * across / grid[1]) for down, across in _bins(grid)]
    return [down if down == across else sqrt((down**2 + across**2) / 2) for down, across in pairs]


def _bins(grid: tuple[int, int]) -> list[tuple[int, int]]:
    shorter = min(grid)
    return [(round(k * grid[0] / shorter), round(k * grid[1] / shorter)) for k in range(ceil(shorter / 2))]


@lru_cache(maxsize=64)
def waves_of(grid: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Cosines, then sines, of every frequency but 0 at every position: (2·frequencies, positions)."""
    bins = torch.tensor(_bins(grid)[1:], dtype=torch.float64).view(-1, 2)
    down, across = (torch.arange(side, dtype=torch.float64) / side for side in grid)
    turns = bins[:, :1, None] * down[:, None] + bins[:, 1:, None] * across
    angles = 2 * pi * turns.flatten(1)
    with torch.inference_mode(False):
        return torch.cat([angles.cos(), angles.sin()]).to(device=device, dtype=dtype)
