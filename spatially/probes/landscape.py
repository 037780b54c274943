r"""The loss landscape around a model's weights (Park & Kim, figure 1; Li et al. 2018).

On the plane :math:`w + a\,d_1 + b\,d_2` of two filter-normalised Gaussian directions (:mod:`spatially.probes.weight_paths`),
over the images as training sees them, their augmentation drawn once for all points:

* ``nll``, ``l2`` and ``accuracy`` at every (a, b), and ``loss`` = nll + l2 (:mod:`spatially.probes.weight_losses`);
* ``rise (radius)``: the mean of loss(a, b) over the circle of that radius, minus the loss at the origin, with the least and
  the most; ``ring_accuracy (radius)``, the mean accuracy there; between points of the grid both are interpolated linearly;
* ``curvature``: the mean over both axes of the second difference at the origin,
  :math:`(L(h) - 2 L(0) + L(-h)) / h^2`, h the step of the grid;
* ``half_radius``: where ``ring_accuracy`` has fallen half-way from the origin's to chance.

Batch norm takes its running statistics. The origin is the plain loss, whether it lies on the grid or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, cast

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from scipy.interpolate import RegularGridInterpolator

from spatially.errors import NotApplicable, UserError, unknown
from spatially.perturb.augment import check_augmentation
from spatially.probes.ahead import Outcomes
from spatially.probes.base import Drawing, Measurer, Probe, Rows, check_answers
from spatially.probes.weight_losses import Batches
from spatially.probes.weight_paths import STYLES, Plane, check_real, moved_parameters
from spatially.probes.weight_points import Measuring, check_range, check_weight_decay, even, with_intervals

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject


Values = NDArray[np.float64]
_ANGLES = 72


@dataclass(frozen=True, kw_only=True)
class Landscape(Probe):
    """NLL, L2 term and accuracy over a filter-normalised plane through the weights.

    ``points`` and ``extent`` are one for both axes or one for each: ``points=(21, 11)``, ``extent=((-1, 1), (0, 2))``.
    """

    name: ClassVar[str] = "landscape"
    title: ClassVar[str] = "Loss landscape"
    paper: ClassVar[str] = (
        "Park & Kim, How Do Vision Transformers Work?, figure 1; Li et al., Visualizing the Loss Landscape of Neural Nets"
    )
    definition: ClassVar[str] = (
        "NLL, weight_decay/2·‖w‖² and accuracy at w + a·d1 + b·d2, over augmented images; d1 and d2 Gaussian, each filter "
        "scaled to the norm of the filter it moves; parameters of one dimension and positions stay."
    )
    lengthy: ClassVar[bool] = True

    points: int | Sequence[int] = 21
    extent: Sequence[float] | Sequence[Sequence[float]] = (-1.0, 1.0)
    weight_decay: float = 1e-4
    augmentation: str = "crop-flip"
    style: str = "filter"
    seed: int = 0

    def __post_init__(self) -> None:
        self.settle()
        check_augmentation(self.augmentation)
        if self.style not in STYLES:
            raise unknown("style", str(self.style), STYLES)
        settings: dict[str, Any] = {
            "points": _pair(self.points, "points"),
            "extent": tuple(check_range(one) for one in _pair(self.extent, "extent")),
            "weight_decay": check_weight_decay(self.weight_decay),
        }
        for count in settings["points"]:
            if isinstance(count, bool) or not isinstance(count, int) or count < 2:
                raise UserError(f"points must be whole numbers of at least 2, but came as {self.points!r}")
        for name, value in settings.items():
            object.__setattr__(self, name, value)

    @property
    def axes(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """The values of a and of b."""
        points, extent = cast(Any, self.points), cast(Any, self.extent)
        return even(extent[0][0], extent[0][1], points[0]), even(extent[1][0], extent[1][1], points[1])

    @property
    def places(self) -> list[tuple[float, float]]:
        """Every point as (a, b): the grid's, row by row, and the origin after them where it is none of them."""
        grid = [(a, b) for a in self.axes[0] for b in self.axes[1]]
        return grid if (0.0, 0.0) in grid else [*grid, (0.0, 0.0)]

    @property
    def passes(self) -> int:
        return len(self.places)

    def chunks(self, images: Images, *, batch: int) -> list[Rows]:
        """One point each, over all images; the origin first, whose loss everything else is compared with."""
        origin = self.places.index((0.0, 0.0))
        order = [origin, *(number for number in range(len(self.places)) if number != origin)]
        return [np.array([number]) for number in order]

    @property
    def interval(self) -> str:
        return "95 % intervals over images: Student's for NLL, Wilson's for accuracy"

    def check(self, subject: Subject, images: Images) -> None:
        check_answers(subject)
        check_real(subject.model)
        if not moved_parameters(subject.model):
            raise NotApplicable(f"{subject.name} has no weights of two dimensions or more beside positions")

    def measurer(self, subject: Subject, images: Images, *, batch: int) -> Measurer:
        return Measuring(
            subject,
            Batches(subject, images, batch=batch, seed=self.seed, augmentation=self.augmentation),
            path=lambda: Plane(subject.model, seed=self.seed, style=self.style),
            places=self.places,
            weight_decay=self.weight_decay,
            style=self.style,
        )

    def measure(
        self, subject: Subject, images: Images, rows: Rows, *, stopped: NDArray[np.bool_] | None = None
    ) -> Outcomes:
        """The points with the numbers in ``rows``; :meth:`measurer` keeps what they share."""
        return self.measurer(subject, images, batch=64)(rows)

    def join(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """The points' numbers over (a, b), and the origin's by themselves."""
        points = xr.concat(parts, dim="point").sortby("point")
        a, b = self.axes
        count = len(a) * len(b)
        origin = points.isel(point=self.places.index((0.0, 0.0)))
        result = xr.Dataset(coords={"a": list(a), "b": list(b)})
        for name in points.data_vars:
            result[name] = (("a", "b"), points[name].values[:count].reshape(len(a), len(b)))
            result[f"origin_{name}"] = origin[name].drop_vars("point")
        return result

    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        result = with_intervals(outcomes)
        a, b = (outcomes[name].values for name in "ab")
        loss, origin = result["loss"].values, float(result["origin_loss"])
        step = max(float(axis[1] - axis[0]) for axis in (a, b))
        reach = min(-a[0], a[-1], -b[0], b[-1])
        radii = (np.arange(1, int(reach / step + 1e-9) + 1) * step).round(12)
        rings = [on_circle(a, b, loss, radius) - origin for radius in radii]
        rises = np.array([[0.0] * 3, *([f(ring) for f in (np.mean, np.min, np.max)] for ring in rings)])
        shares = [float(on_circle(a, b, result["accuracy"].values, radius).mean()) for radius in radii]
        accuracy = [float(result["origin_accuracy"]), *shares]
        result = result.assign_coords(radius=[0.0, *radii])
        for name, values in zip(("rise", "rise_least", "rise_most"), rises.T, strict=True):
            result[name] = ("radius", values)
        result["ring_accuracy"] = ("radius", accuracy)
        result["curvature"] = ((), _curvature(result, origin))
        result["half_radius"] = ((), _half_radius(result["radius"].values, np.array(accuracy), chance))
        return result

    @classmethod
    def drawing(cls) -> Drawing:
        from spatially.probes import landscape_figures

        return landscape_figures


def on_circle(a: Values, b: Values, values: Values, radius: float) -> Values:
    """Values (a, b) of a grid at even steps around the origin, interpolated linearly.

    >>> on_circle(np.array([-1.0, 0.0, 1.0]), np.array([-2.0, 2.0]), np.ones((3, 2)), 0.5).mean()
    np.float64(1.0)
    """
    angles = np.arange(_ANGLES) * (2 * np.pi / _ANGLES)
    places = np.stack([radius * np.cos(angles), radius * np.sin(angles)], axis=1)
    return RegularGridInterpolator((a, b), values)(places.clip((a[0], b[0]), (a[-1], b[-1])))


def _pair(value: Any, name: str) -> tuple[Any, Any]:
    """One for both axes, or one for each."""
    if name == "points" and isinstance(value, int):
        return value, value
    both = tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else ()
    if len(both) != 2:
        raise UserError(f"{name} must be one for both axes or one for each, but came as {value!r}")
    return (both, both) if name == "extent" and not isinstance(both[0], Sequence) else (both[0], both[1])


def _curvature(result: xr.Dataset, origin: float) -> float:
    """Mean second difference at the origin; NaN where it has no neighbours on both sides of both axes."""
    found = []
    for axis, other in (("a", "b"), ("b", "a")):
        values = result[axis].values
        if 0.0 not in values[1:-1] or 0.0 not in result[other].values:
            return float("nan")
        place = int(np.flatnonzero(values == 0.0)[0])
        line = result["loss"].sel({other: 0.0}).values
        found.append((line[place - 1] - 2 * origin + line[place + 1]) / (values[place + 1] - values[place]) ** 2)
    return float(np.mean(found))


def _half_radius(radii: NDArray[np.float64], accuracy: NDArray[np.float64], chance: float) -> float:
    """Where the accuracy first is half-way down to chance, by a straight line between rings; NaN if it is nowhere."""
    level = (accuracy[0] + chance) / 2
    below = np.flatnonzero(accuracy <= level)
    if not accuracy[0] > chance or not below.size:
        return float("nan")
    last = int(below[0])
    share = (accuracy[last - 1] - level) / (accuracy[last - 1] - accuracy[last])
    return float(radii[last - 1] + share * (radii[last] - radii[last - 1]))
