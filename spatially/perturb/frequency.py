r"""Random noise of one frequency (Park & Kim, figure 5).

White noise :math:`z` is filtered to a ring of frequencies f ± s and added to the image,

.. math:: n_f = \mathcal F^{-1}\left(m_f \cdot \mathcal F z\right), \qquad
          m_f(k) = \left[\,|r(k) - f| \le s\,\right], \quad
          r(k) = \sqrt{(2 k_y / H)^2 + (2 k_x / W)^2},

with f and s in units of π: each axis has its own frequencies, up to 1 (a change of sign from pixel to pixel), so that a ring is
round in frequency whatever the image's shape. It is its own mirror image, so :math:`n_f` is real. :math:`n_f` is scaled to
one root mean square over the pixels and channels of the image, the same at every f: ``size``, in pixel values 0..1. Nothing
is cut to 0..1, which would spread the noise over other frequencies.

``style="authors"`` is what the authors' code does. The ring is the difference of two squares of
:math:`2\lfloor (f \pm s)H/2 \rfloor` bins, from :math:`-\lfloor\cdot\rfloor` up to but without
:math:`+\lfloor\cdot\rfloor`; z is ±``size``; what passes the filter keeps its energy, three times as much at the highest
frequencies as at the lowest. The squares are not their own mirror image, and of the complex result the real part is taken.

The draw of an image is a pure function of (seed, image number), the same for every f. z is the same bits everywhere; the
Fourier transform differs in the last bits between devices and libraries, and so does the noise (about 1e-7).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from math import floor, pi, sqrt
from numbers import Real

import torch
from torch import Tensor

from spatially import randomness
from spatially.errors import UserError, unknown
from spatially.perturb.check import check_images, check_index

STYLES = ("round", "authors")
HALF_WIDTH = 0.2 / pi  # 0.2 radians a pixel, as in the authors' code
SIZES = {"round": 0.1, "authors": 1.0}


def add_frequency_noise(
    images: Tensor,
    *,
    frequency: float,
    index: Tensor | Sequence[int],
    seed: int = 0,
    half_width: float = HALF_WIDTH,
    size: float = SIZES["round"],
) -> Tensor:
    """The images with noise of the root mean square ``size`` at ``frequency`` ± ``half_width``, in units of π.

    >>> images = torch.rand(2, 3, 32, 32)
    >>> noise = add_frequency_noise(images, frequency=0.5, index=[0, 1]) - images
    >>> noise.square().mean(dim=(1, 2, 3)).sqrt()
    tensor([0.1000, 0.1000])
    """
    check_images(images)
    draw = draw_noise(
        tuple(images.shape[1:]), index=check_index(index, count=len(images), device=images.device), seed=seed
    )
    return images + draw.at(frequency, half_width=half_width, size=size).to(images.dtype)


def draw_noise(shape: Sequence[int], *, index: Tensor, seed: int = 0, style: str = "round") -> Noise:
    """The draw for a batch of images of one ``shape`` (C, H, W), from which the noise of every frequency is made."""
    if style not in STYLES:
        raise unknown("style", str(style), STYLES)
    channels, height, width = shape
    return Noise(shape=(channels, height, width), index=index, seed=seed, style=style)


@dataclass(frozen=True, eq=False)
class Noise:
    """White noise of a batch and its spectrum."""

    shape: tuple[int, int, int]
    index: Tensor
    seed: int
    style: str

    @cached_property
    def _spectrum(self) -> Tensor:
        white = randomness.normal(randomness.stream(self.seed, "frequency"), self.index, self.shape)
        return torch.fft.rfft2(white) if self.style == "round" else torch.fft.fft2(white.sign())

    def at(self, frequency: float, *, half_width: float = HALF_WIDTH, size: float | None = None) -> Tensor:
        """Noise of one frequency, float32 ``(B, C, H, W)``; ``size`` is its root mean square, or the authors' ε."""
        size = check_size(SIZES[self.style] if size is None else size)
        grid = self.shape[1:]
        mask = ring(grid, check_frequency(frequency), check_half_width(half_width), style=self.style)
        mask = mask.to(self._spectrum.device)
        if self.style == "authors":
            return torch.fft.ifft2(self._spectrum * mask).real * size
        noise = torch.fft.irfft2(self._spectrum * mask[:, : grid[1] // 2 + 1], s=grid)
        norm = noise.square().mean(dim=(1, 2, 3), keepdim=True, dtype=torch.float64).sqrt()
        return noise.mul_((size / norm).to(noise.dtype))


def ring(grid: tuple[int, int], frequency: float, half_width: float, *, style: str = "round") -> Tensor:
    """Which bins of the Fourier transform of a ``grid`` pass, in the transform's own order: bool ``(H, W)``."""
    rows, columns = (torch.fft.fftfreq(side, dtype=torch.float64) * 2 for side in grid)
    if style == "round":
        # Bins that lie on the edge but for rounding belong to the ring.
        mask = (torch.hypot(rows[:, None], columns) - frequency).abs() <= half_width + 1e-12
    else:
        mask = _square(grid, frequency + half_width) & ~_square(grid, frequency - half_width)
    if not mask.any():
        raise UserError(
            f"an image of {grid[0]}×{grid[1]} pixels has no frequency at {frequency:g}π ± {half_width:.3g}π; "
            "choose a larger half_width or another frequency"
        )
    return mask


def _square(grid: tuple[int, int], frequency: float) -> Tensor:
    """The bins of the square that ends at a frequency, with its lower edges and without its upper ones."""
    inside = []
    for side in grid:
        half = max(0, floor(frequency * side / 2))
        bins = (torch.fft.fftfreq(side, dtype=torch.float64) * side).round()
        inside.append((bins >= -half) & (bins < half) if 2 * half < side else torch.ones(side, dtype=torch.bool))
    return inside[0][:, None] & inside[1]


def check_frequency(frequency: float) -> float:
    """From 0 to the corner of the spectrum, in units of π."""
    if isinstance(frequency, bool) or not isinstance(frequency, Real) or not 0 <= frequency <= sqrt(2):
        raise UserError(f"frequency must lie in 0..1.41, in units of π, but came as {frequency!r}")
    return float(frequency)


def check_half_width(half_width: float) -> float:
    """Above 0, in units of π."""
    if isinstance(half_width, bool) or not isinstance(half_width, Real) or not 0 < half_width <= 2:
        raise UserError(f"half_width must lie above 0 and at most at 2, in units of π, but came as {half_width!r}")
    return float(half_width)


def check_size(size: float) -> float:
    """A finite size of at least 0."""
    if isinstance(size, bool) or not isinstance(size, Real) or not 0 <= size < float("inf"):
        raise UserError(f"size must be a number of at least 0, but came as {size!r}")
    return float(size)
