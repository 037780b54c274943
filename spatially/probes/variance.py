r"""The variance probe (Park & Kim, figure 6): how much the map varies over positions at each point of a model.

.. math:: \frac{1}{C} \sum_c \frac{1}{hw - 1} \sum_{y, x} (x_{c y x} - \bar x_c)^2,

the unbiased variance over positions of each image and channel, then the mean over channels and images. Averaging, as
attention does, lowers it; convolutions and MLPs raise it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from spatially.observe.stream import Place
from spatially.probes.base import Drawing
from spatially.probes.layers import Centred, StreamProbe, centre, mean_over_images
from spatially.probes.map_numbers import MapNumbers


@dataclass(frozen=True, kw_only=True)
class Variance(StreamProbe):
    """Variance over positions of the map at each point of the residual stream."""

    name: ClassVar[str] = "variance"
    title: ClassVar[str] = "Variance of the feature map along the model"
    paper: ClassVar[str] = "Park & Kim, How Do Vision Transformers Work?, figure 6"
    definition: ClassVar[str] = (
        "Unbiased variance over positions of each channel of the map after the stem and after each residual addition; mean "
        "over channels and images."
    )

    seed: int = 0

    def numbers(self, map: Tensor) -> Tensor:
        return spatial_variance(centre(map))[:, None]

    def chosen(self, numbers: MapNumbers) -> Tensor:
        return numbers.variance[:, None]

    def outcomes_of(self, places: Sequence[Place], numbers: Sequence[NDArray[np.floating]]) -> dict[str, Any]:
        # A single position has no variance.
        one = np.array([place.grid == (1, 1) for place in places])
        values = np.where(one, np.nan, np.concatenate(numbers, axis=1))
        return {"image_variance": (("image", "layer"), values)}

    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        return outcomes.assign(mean_over_images(outcomes, "image_variance", "variance").data_vars)

    @classmethod
    def drawing(cls) -> Drawing:
        from spatially.probes import variance_figures

        return variance_figures


def spatial_variance(maps: Centred) -> Tensor:
    """The mean over channels of the unbiased variance over positions: (batch,)."""
    _, channels, positions = maps.rest.shape
    return torch.linalg.vector_norm(maps.rest, dim=(1, 2)).square() / (channels * max(positions - 1, 1))
