"""What the probes of the residual stream have in common: numbers of each image at each point, means over images."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from spatially.errors import UserError
from spatially.observe.stream import Place, stream
from spatially.perturb.pixels import as_float
from spatially.probes.ahead import Outcomes, read
from spatially.probes.base import Probe, Rows, image_coordinates
from spatially.probes.intervals import student
from spatially.probes.map_numbers import MapNumbers, Sums, finish, sum_up, takes

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject


class StreamProbe(Probe):
    """A measurement of the map at each point of the residual stream, one forward pass for all of them."""

    answers: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.settle()

    @property
    def passes(self) -> int:
        return 1

    @property
    def interval(self) -> str:
        return "95 % Student intervals of the mean over images"

    def check(self, subject: Subject, images: Images) -> None:
        stream(subject).places()

    @abstractmethod
    def numbers(self, map: Tensor) -> Tensor:
        """What is measured of a map (batch, channels, rows, columns) of any precision: (batch, numbers)."""

    @abstractmethod
    def chosen(self, numbers: MapNumbers) -> Tensor:
        """The same, of what a GPU found in one reading of the map."""

    @abstractmethod
    def outcomes_of(self, places: Sequence[Place], numbers: Sequence[NDArray[np.floating]]) -> dict[str, Any]:
        """The numbers of each place, (images, numbers), as variables of a Dataset; ``xr.Dataset``'s first argument."""

    @torch.inference_mode()
    def measure(
        self, subject: Subject, images: Images, rows: Rows, *, stopped: NDArray[np.bool_] | None = None
    ) -> Outcomes:
        places: list[Place] = []
        seen: list[Tensor | Sums] = []

        def look(place: Place, map: Tensor) -> None:
            with torch.autocast(map.device.type, enabled=False):
                places.append(place)
                seen.append(sum_up(map) if takes(map) else self.numbers(map))

        with stream(subject, look):
            subject(as_float(images.batch(rows, subject.device)[0]), overwrite=True)
        summed = iter(finish([one for one in seen if isinstance(one, Sums)]))
        found = [self.chosen(next(summed)) if isinstance(one, Sums) else one for one in seen]
        ends = np.cumsum([tensor.shape[1] for tensor in found])

        def outcomes(values: NDArray[np.floating]) -> xr.Dataset:
            parts = np.split(values, ends[:-1], axis=1)
            check_finite(subject, places, parts)
            variables = self.outcomes_of(places, parts)
            return xr.Dataset(variables).assign_coords(image_coordinates(images, rows) | layer_coordinates(places))

        return read(torch.cat(found, dim=1), outcomes)


class Centred(NamedTuple):
    """Maps without their mean over positions, in single precision at least: what hardly varies keeps its digits."""

    mean: Tensor  # (batch, channels, 1)
    rest: Tensor  # (batch, channels, positions)
    grid: tuple[int, int]


def centre(map: Tensor) -> Centred:
    """Of maps (batch, channels, rows, columns)."""
    rows, columns = map.shape[2:]
    flat = map.flatten(2)
    mean = flat.mean(dim=2, keepdim=True, dtype=torch.promote_types(map.dtype, torch.float32))
    return Centred(mean, flat - mean, (rows, columns))


def layer_coordinates(places: Sequence[Place]) -> dict[str, Any]:
    """What each layer is: its number, name, kind, grid and channels."""
    return {
        "layer": ("layer", np.arange(len(places))),
        "name": ("layer", [place.name for place in places]),
        "kind": ("layer", [place.kind for place in places]),
        "rows": ("layer", [place.grid[0] for place in places]),
        "columns": ("layer", [place.grid[1] for place in places]),
        "channels": ("layer", [place.channels for place in places]),
    }


def check_finite(subject: Subject, places: Sequence[Place], numbers: Sequence[NDArray[np.floating]]) -> None:
    """The first layer whose activations are NaN or infinite is named."""
    for place, values in zip(places, numbers, strict=True):
        bad = int((~np.isfinite(values)).any(axis=1).sum())
        if bad:
            half = subject.dtype in (torch.bfloat16, torch.float16)
            advice = "try --dtype float32" if half else "look at its weights"
            raise UserError(
                f"{subject.name}: activations after {place.name} (layer {place.index}, {place.kind}) are NaN or infinite "
                f"for {bad} image{'s' if bad > 1 else ''} of a chunk; {advice}"
            )


def mean_over_images(outcomes: xr.Dataset, name: str, result: str) -> xr.Dataset:
    """The mean of an outcome over images with the ends of its interval: ``result``, ``result_low``, ``result_high``."""
    values = outcomes[name].transpose("image", ...).astype(np.float64)
    count = outcomes.sizes["image"]
    mean = values.mean("image", skipna=False)
    deviation = values.std("image", ddof=1, skipna=False) if count > 1 else mean * np.nan
    low, high = student(mean.values, deviation.values, count, within=(-np.inf, np.inf))
    return xr.Dataset({result: mean, f"{result}_low": mean.copy(data=low), f"{result}_high": mean.copy(data=high)})
