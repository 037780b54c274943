"""RandAugment (Cubuk et al. 2020) by timm's names, for a batch on the device.

``rand-m9-n2-p0.5-mstd0.5-inc1``: n operations in turn, each drawn evenly from fifteen, applied with probability p, with a
magnitude drawn from a normal distribution of mean m and deviation mstd (evenly from 0 … m above 100) and held within
0 … mmax; ``inc1`` takes the forms whose effect grows with the magnitude. Defaults are timm's: m10, n2, p0.5, mstd0, mmax10.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from spatially import randomness
from spatially.errors import UserError
from spatially.train.augment.colour import recolour
from spatially.train.augment.geometry import matrices, transform
from spatially.train.augment.operations import NOTHING, OPERATIONS, arguments

DRAWS = 4  # numbers an operation: which, whether, how much, which way (and of the rest of that one, how smoothly)
COLUMNS = 9  # numbers of a plan for an operation: kind, argument, matrix, whether it is read bicubically
_OPTIONS = {
    "m": "magnitude",
    "n": "layers",
    "p": "probability",
    "mstd": "deviation",
    "mmax": "most",
    "inc": "increasing",
}


@dataclass(frozen=True)
class RandAugment:
    """What timm's name says."""

    magnitude: float = 10
    layers: int = 2
    probability: float = 0.5
    deviation: float = 0.0
    most: float = 10
    increasing: bool = False

    @classmethod
    def read(cls, name: str) -> RandAugment:
        """From timm's name.

        >>> RandAugment.read("rand-m9-mstd0.5-inc1")
        RandAugment(magnitude=9.0, layers=2, probability=0.5, deviation=0.5, most=10, increasing=True)
        """
        kind, *words = name.split("-")
        if kind != "rand":
            raise UserError(
                "augmentation.rand_augment must be timm's name for one, such as rand-m9-mstd0.5-inc1, "
                f"but came as {name!r}"
            )
        given = {}
        for word in words:
            match = re.fullmatch(r"([a-z]+)(\d+\.?\d*|\.\d+)", word)
            if match is None or match[1] not in _OPTIONS:
                known = ", ".join(_OPTIONS)
                raise UserError(
                    f"augmentation.rand_augment: {word!r} of {name!r} is not known; the options are {known}, each a number"
                )
            given[_OPTIONS[match[1]]] = float(match[2])
        whole = {"layers": int(given.pop("layers", 2)), "increasing": bool(given.pop("increasing", 0))}
        return cls(**given, **whole)  # type: ignore[arg-type]  # the two sets of names are disjoint

    @property
    def draws(self) -> int:
        """Uniform numbers an image."""
        return DRAWS * self.layers

    def layer(self, uniform: Tensor) -> tuple[Tensor, Tensor]:
        """Kind (int64) and argument of one operation an image, from numbers ``(B, 4)``."""
        which, whether, much, way = uniform.unbind(1)
        kind = (which * len(OPERATIONS)).long()
        kind = torch.where(whether < self.probability, kind, torch.full_like(kind, NOTHING))
        if self.deviation > 100:
            magnitude = much * self.magnitude
        else:
            # Equally likely levels of a normal distribution, as its table in `randomness` holds them.
            level = (torch.floor(much * 65536) - 32768).to(torch.int16)
            magnitude = self.magnitude + self.deviation * randomness.normal_values(level)
        return kind, arguments(kind, magnitude.clamp(0, self.most), way > 0.5, increasing=self.increasing)

    @property
    def columns(self) -> int:
        """Numbers of a plan."""
        return COLUMNS * self.layers

    def plan(self, uniform: Tensor, size: tuple[int, int]) -> Tensor:
        """Kind, argument, affine matrix and smoothness of every operation: float64 ``(B, columns)`` from ``(B, draws)``."""
        parts = []
        for numbers in uniform.split(DRAWS, dim=1):
            kind, argument = self.layer(numbers)
            smooth = (2 * numbers[:, 3]) % 1 >= 0.5  # halves of each of the two ways
            columns = [one.double()[:, None] for one in (kind, argument)]
            parts += [*columns, matrices(kind, argument, *size), smooth.double()[:, None]]
        return torch.cat(parts, dim=1)

    def __call__(self, pixels: Tensor, plan: Tensor, fill: Tensor, *, interpolation: str) -> Tensor:
        """Levels, float32 ``(B, 3, H, W)``, from levels, as a plan says; ``fill`` is ``(3, 1, 1)``.

        As in timm, what moves pixels reads them by the recipe's ``interpolation``; ``random`` draws it for each operation.
        """
        for part in plan.split(COLUMNS, dim=1):
            kind, argument, matrix, drawn = part.split([1, 1, 6, 1], dim=1)
            smooth = drawn[:, 0] > 0 if interpolation == "random" else interpolation == "bicubic"
            pixels = recolour(transform(pixels, matrix, fill, smooth), kind[:, 0], argument[:, 0].float())
        return pixels
