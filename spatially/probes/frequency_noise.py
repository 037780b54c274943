r"""Noise of one frequency (Park & Kim, figure 5): how much accuracy a model loses to it.

For each frequency f, noise of the ring f ± s is added to every image (:mod:`spatially.perturb.frequency`), and

.. math:: \mathrm{drop}(f) = \mathrm{accuracy} - \mathrm{accuracy}(f).

The noise has the same norm at every f. Vision transformers are said to mind low frequencies, convolutional networks high ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from spatially.errors import UserError, unknown
from spatially.perturb.frequency import (
    HALF_WIDTH,
    SIZES,
    STYLES,
    check_frequency,
    check_half_width,
    check_size,
    draw_noise,
    ring,
)
from spatially.perturb.pixels import as_float
from spatially.probes.base import (
    Drawing,
    Probe,
    Rows,
    check_answers,
    check_numbers,
    image_coordinates,
    several,
)
from spatially.probes.intervals import difference, wilson
from spatially.probes.sensitivity import answer

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject


@dataclass(frozen=True, kw_only=True)
class FrequencyNoise(Probe):
    """Accuracy under random noise of one frequency after another.

    ``frequencies`` and ``half_width`` are in units of π. ``size`` is the noise's root mean square in pixel values 0..1
    (0.1 by default); in the authors' style the size of its signs before the filter, in normalised values (1 by default).
    """

    name: ClassVar[str] = "frequency_noise"
    title: ClassVar[str] = "Noise of one frequency"
    paper: ClassVar[str] = "Park & Kim, How Do Vision Transformers Work?, figure 5"
    definition: ClassVar[str] = (
        "Top-1 accuracy, and how much of it is lost, after random noise restricted to a ring of frequencies f ± s is added to "
        "each image: round rings and the same norm at every f, or as the authors' code has it (style authors)."
    )

    frequencies: Sequence[float] = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    half_width: float = HALF_WIDTH
    size: float | None = None
    style: str = "round"
    seed: int = 0

    def __post_init__(self) -> None:
        self.settle()
        if self.style not in STYLES:
            raise unknown("style", str(self.style), STYLES)
        frequencies = tuple(sorted({check_frequency(one) for one in several(self.frequencies)}))
        if not frequencies:
            raise UserError("frequencies must name at least one value")
        object.__setattr__(self, "frequencies", frequencies)
        object.__setattr__(self, "half_width", check_half_width(self.half_width))
        object.__setattr__(self, "size", check_size(SIZES[self.style] if self.size is None else self.size))

    @property
    def passes(self) -> int:
        return len(self.frequencies) + 1

    @property
    def interval(self) -> str:
        return "95 % intervals over images: Wilson's for accuracy, Agresti and Min's of paired shares for the drop"

    def check(self, subject: Subject, images: Images) -> None:
        check_answers(subject)
        for frequency in self.frequencies:
            ring(images.size, frequency, self.half_width, style=self.style)

    @torch.inference_mode()
    def measure(
        self, subject: Subject, images: Images, rows: Rows, *, stopped: NDArray[np.bool_] | None = None
    ) -> xr.Dataset:
        pixels, labels, index = images.batch(rows, subject.device)
        clean = as_float(pixels)
        draw = draw_noise(tuple(clean.shape[1:]), index=index, seed=self.seed, style=self.style)
        found = [answer(subject, clean.clone(), labels)]
        for frequency in self.frequencies:
            noise = draw.at(frequency, half_width=self.half_width, size=self.size)
            found.append(answer(subject, noise.mul_(self.unit(subject, noise)).add_(clean), labels))
        prediction, probability = (torch.stack(one, dim=1).cpu().numpy() for one in zip(*found, strict=True))
        check_numbers(subject, probability)
        return self._part(images, rows, prediction, probability)

    def unit(self, subject: Subject, like: Tensor) -> Tensor:
        """What the noise is measured in, in pixel values: the authors add theirs after normalisation."""
        values = subject.preprocessing.std if self.style == "authors" else (1.0, 1.0, 1.0)
        return torch.tensor(values, dtype=like.dtype, device=like.device).view(3, 1, 1)

    def _part(
        self, images: Images, rows: Rows, prediction: NDArray[np.int32], probability: NDArray[np.float32]
    ) -> xr.Dataset:
        outcomes = {"correct": prediction == images.labels[rows][:, None], "probability": probability}
        outcomes["prediction"] = prediction
        variables: dict[str, Any] = {}
        for name, values in outcomes.items():
            variables[f"clean_{name}"] = "image", values[:, 0]
            variables[name] = ("image", "frequency"), values[:, 1:]
        about = {"units": "π", "long_name": "middle of the ring of frequencies", "half_width": self.half_width}
        coordinates = {**image_coordinates(images, rows), "frequency": ("frequency", list(self.frequencies), about)}
        return xr.Dataset(variables, coords=coordinates)

    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        correct = outcomes["correct"].transpose("image", "frequency").values
        clean = outcomes["clean_correct"].values
        numbers = (
            ("accuracy", "frequency", correct.mean(axis=0), wilson(correct.sum(axis=0), len(correct))),
            ("clean_accuracy", (), clean.mean(), wilson(clean.sum(), len(clean))),
            ("drop", "frequency", clean.mean() - correct.mean(axis=0), difference(clean[:, None], correct)),
        )
        result = outcomes.copy()
        for name, dimension, value, (low, high) in numbers:
            result[name], result[f"{name}_low"], result[f"{name}_high"] = (
                (dimension, one) for one in (value, low, high)
            )
        return result

    @classmethod
    def drawing(cls) -> Drawing:
        from spatially.probes import frequency_noise_figures

        return frequency_noise_figures
