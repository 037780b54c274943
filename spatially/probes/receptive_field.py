r"""Effective receptive fields: which pixels a position of a feature map listens to (Kim, section 2, figures 1-4).

For the target y, a position of the last feature map after the final norm (:mod:`spatially.observe.feature_map`), or of any
point of the residual stream, with D channels, an image x with C colours, and a set S of images:

* ``style="kim"``: :math:`R = \frac{1}{|S|} \sum_{x \in S} \mathrm{ReLU}\Big(\frac{1}{C} \sum_c
  \frac{\partial}{\partial x_c} \frac{1}{D} \sum_d y_d\Big)`;
* ``style="luo"``: the plain gradient, :math:`R = \Big|\frac{1}{|S|} \sum_{x \in S} \frac{1}{C} \sum_c
  \frac{\partial}{\partial x_c} \frac{1}{D} \sum_d y_d\Big|`;
* ``style="replknet"``: :math:`R = \frac{1}{|S|} \sum_{x \in S} \sum_c \mathrm{ReLU}\Big(\frac{\partial}{\partial x_c} \sum_d
  \mathrm{ReLU}(y_d)\Big)`,

normalised to sum 1. The gradient is with respect to the image as the model takes it, after normalisation. One backward pass
serves a whole batch, since in eval mode no image's target depends on another image.

Reported with it: ``side`` of the smallest square that holds a share of the mass, centred where the
target comes from in the image, the Gaussian
fit (:mod:`spatially.probes.gaussian_fit`), and ``change``: half the summed difference of the fields of two halves of the
images, the share of the mass that would lie elsewhere had the other half been used. The field of all images is off by about
half of that; it is ``converged`` when ``change`` is at most ``tolerance``.

After a norm whose weights are all equal, as in an untrained ViT, the mean over channels is the same for every image, and its
gradient is rounding error. ``signal``, how much the target varies over images relative to how much channels do, tells: below
1e-5 the field is not to be trusted, and NaN where not even rounding is left. ``style="replknet"``, or a layer before the norm,
has no such blind spot.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor, nn

from spatially import randomness
from spatially.errors import NotApplicable, UserError, unknown
from spatially.observe.feature_map import FINAL, FoundMap, feature_map
from spatially.observe.finite import not_finite
from spatially.observe.parts import walk
from spatially.observe.position import as_position, centre, check_place
from spatially.observe.stream import Place
from spatially.perturb.pixels import as_float
from spatially.probes.ahead import Outcomes, read
from spatially.probes.base import Drawing, Measurer, Probe, Rows, several
from spatially.probes.gaussian_fit import BASELINES, fit_gaussian
from spatially.probes.variants import GIVEN, VARIANTS, check_variant, variant

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject

KIM, LUO, REPLKNET = "kim", "luo", "replknet"
STYLES = (KIM, LUO, REPLKNET)
CENTRE, LOWER_RIGHT = "centre", "lower_right"
SHARES = (0.2, 0.3, 0.5, 0.99)
NOISE = 1e-5  # of ``signal``: what is left of a constant in single precision
_MOMENTS = 4  # numbers that `_moments` gives


@dataclass(frozen=True, kw_only=True)
class ReceptiveField(Probe):
    """The effective receptive field of one position of one layer.

    ``layer`` is "final", or a point of the residual stream by name or number. ``position`` is "centre" (of an even grid the
    upper left of the central four), "lower_right" (the lower right of them), or a row and a column. ``variants`` are any of
    given, untrained and reset; with several, results have the dimension ``variant``. ``reset`` says whether absolute positions
    are drawn anew or set to zero for the variant of that name.
    """

    name: ClassVar[str] = "receptive_field"
    title: ClassVar[str] = "Effective receptive field"
    paper: ClassVar[str] = (
        "Kim, Understanding Gaussian Attention Bias of Vision Transformers Using Effective Receptive Fields, "
        "section 2, figures 1-4"
    )
    definition: ClassVar[str] = (
        "The gradient of one position of a feature map, mean over channels, with respect to the pixels, mean over colours, "
        "ReLU, mean over images, normalised to sum 1 (style kim; luo and replknet as their authors have it)."
    )
    answers: ClassVar[bool] = False

    style: str = KIM
    layer: str | int = FINAL
    position: str | Sequence[int] = CENTRE
    variants: Sequence[str] = (GIVEN,)
    reset: str = "draw"
    baseline: str = "free"
    tolerance: float = 0.05
    seed: int = 0

    def __post_init__(self) -> None:
        self.settle()
        for name, value, allowed in (
            ("style", self.style, STYLES),
            ("reset", self.reset, ("draw", "zero")),
            ("baseline", self.baseline, BASELINES),
        ):
            if value not in allowed:
                raise unknown(name, str(value), allowed)
        wanted = tuple(several(self.variants))
        for one in wanted:
            if one not in VARIANTS:
                raise unknown("variant", str(one), VARIANTS)
        if not wanted:
            raise UserError(f"variants must name at least one of {', '.join(VARIANTS)}")
        if isinstance(self.layer, bool) or not isinstance(self.layer, (str, int)):
            raise UserError(f"layer must be {FINAL!r}, a name or a number, but came as {self.layer!r}")
        if isinstance(self.tolerance, bool) or not isinstance(self.tolerance, (int, float)) or not self.tolerance > 0:
            raise UserError(f"tolerance must be a number above 0, but came as {self.tolerance!r}")
        object.__setattr__(self, "variants", tuple(one for one in VARIANTS if one in wanted))
        object.__setattr__(self, "position", as_position(self.position, CENTRE, LOWER_RIGHT))

    @property
    def passes(self) -> int:
        return 3 * len(self.variants)  # a backward pass costs about two forward ones

    @property
    def interval(self) -> str:
        return "none; change compares two halves of the images"

    def check(self, subject: Subject, images: Images) -> None:
        if not len(images):
            raise UserError("a receptive field needs at least one image")
        self.target(subject)
        for name in self.variants:
            check_variant(subject, name)
        pixels = as_float(images.batch(np.arange(1), subject.device)[0])
        with observed(subject, self.layer, lambda map: map.sum()) as run:
            total, _ = run(pixels)
        if not total.requires_grad:
            raise NotApplicable(
                f"{subject.name} is not differentiable: no gradient of {self.target(subject)[0].name} reaches the image"
            )

    def target(self, subject: Subject) -> tuple[Place, tuple[int, int]]:
        """The layer, and the row and column of the position."""
        place = feature_map(subject, layer=self.layer).place()
        return place, self._position(place)

    def _position(self, place: Place) -> tuple[int, int]:
        if self.position == CENTRE:
            return centre(place.grid)
        if self.position == LOWER_RIGHT:
            return place.grid[0] // 2, place.grid[1] // 2
        assert not isinstance(self.position, str)
        return check_place(self.position, place.grid, what=f"position (in {place.name})")

    def measure(
        self, subject: Subject, images: Images, rows: Rows, *, stopped: NDArray[np.bool_] | None = None
    ) -> Outcomes:
        return self.measurer(subject, images, batch=len(rows))(rows, stopped=stopped)

    def measurer(self, subject: Subject, images: Images, *, batch: int) -> Measurer:
        """With the place found once for all chunks: what is asked between two passes keeps a GPU waiting."""
        found = feature_map(subject, layer=self.layer).found()
        place = found.spot.place
        row, column = self._position(place)
        source = found.source(row, column)
        constants = {
            "variant": list(self.variants),
            "name": place.name,
            "kind": place.kind,
            "row": row,
            "column": column,
            "rows": place.grid[0],
            "columns": place.grid[1],
            "source_y": source[0],
            "source_x": source[1],
        }
        coordinates = xr.Dataset(coords=constants).coords

        def measure(rows: Rows, *, stopped: NDArray[np.bool_] | None = None) -> Outcomes:
            pixels, _, index = images.batch(rows, subject.device)
            size = tuple(pixels.shape[2:])

            def finish(numbers: NDArray[np.float64]) -> xr.Dataset:
                if not np.isfinite(numbers).all():
                    raise self._not_finite(subject, pixels, numbers)
                moments, counts, sums = np.split(numbers, [_MOMENTS, _MOMENTS + 2], axis=1)
                outcomes = {
                    "total": (("variant", "half", "y", "x"), sums.reshape(-1, 2, *size)),
                    "moments": (("variant", "moment"), moments),
                    "count": ("half", counts[-1].astype(np.int64)),
                }
                return xr.Dataset(outcomes, coords=coordinates)

            return read(self._sums(subject, as_float(pixels), index, row, column, found), finish)

        return measure

    def _sums(self, subject: Subject, pixels: Tensor, index: Tensor, row: int, column: int, found: FoundMap) -> Tensor:
        """For each variant the moments, the number of images in either half, and the sum of the fields of each half."""
        sums = []
        for name in self.variants:
            with variant(subject, name, seed=self.seed, zero=self.reset == "zero") as one:
                known = found if one.model is subject.model else None
                fields, features = self.fields(one, pixels, row, column, found=known)
                # After the pass, so that a GPU is busy while this is asked of it.
                second = (randomness.image_bits(randomness.stream(self.seed, "halves"), index) & 1).bool()
                members = torch.stack([~second, second]).double()
                total = members @ fields.flatten(1).double()
                spread = _moments(features.relu() if self.style == REPLKNET else features)
                sums.append(torch.cat([spread, members.sum(1), total.flatten()]))
        return torch.stack(sums)

    def _not_finite(self, subject: Subject, pixels: Tensor, numbers: NDArray[np.float64]) -> UserError:
        """The error that names the layer, in the first variant whose numbers are not finite."""
        first = self.variants[int((~np.isfinite(numbers)).any(axis=1).argmax())]
        with variant(subject, first, seed=self.seed, zero=self.reset == "zero") as one:
            return not_finite(one, as_float(pixels), "the receptive field")

    def fields(
        self, subject: Subject, pixels: Tensor, row: int, column: int, *, found: FoundMap | None = None
    ) -> tuple[Tensor, Tensor]:
        """One map an image, (batch, height, width), and the target's channels, (batch, channels)."""
        if len(pixels) == 1 and subject.device.type == "cpu":
            # PyTorch's backward of a batch norm in eval mode misreads a transposed gradient of a single image there.
            both = self.fields(subject, pixels.repeat(2, 1, 1, 1), row, column, found=found)
            return both[0][:1], both[1][:1]
        with observed(subject, self.layer, lambda map: map[:, :, row, column], found=found) as run:
            features, shown = run(pixels)
            accurate = features.to(torch.promote_types(features.dtype, torch.float32))
            # Each image's target depends on that image alone, so the gradient of their sum is the gradient of each.
            target = accurate.relu().sum() if self.style == REPLKNET else accurate.mean(1).sum()
            (gradient,) = torch.autograd.grad(target, shown)
        accurate = accurate.detach()
        plain = gradient.sum(1) if self.style == REPLKNET else gradient.mean(1)
        # 0, or NaN where anything is not finite, also what a ReLU would hide.
        nothing = 0 * (plain.sum((1, 2)) + accurate.sum(1))[:, None, None]
        if self.style == REPLKNET:
            return gradient.relu().sum(1) + nothing, accurate
        return (plain if self.style == LUO else plain.relu()) + nothing, accurate

    def join(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """The chunks' sums, added in the order of the chunks."""
        if not parts:
            raise UserError("a receptive field needs at least one image")
        joined = parts[0].drop_attrs().copy(deep=True)
        for part in parts[1:]:
            for name in ("total", "moments", "count"):
                joined[name] = joined[name] + part[name]
        return joined

    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        several = "variant" in outcomes.dims
        sums = outcomes if several else outcomes.expand_dims("variant")
        totals = sums["total"].transpose("variant", "half", "y", "x").values
        counts = sums["count"].values.reshape(-1)[:2]
        signals = [_signal(one) for one in sums["moments"].values]
        each = [
            self._numbers(outcomes, name, halves, counts, signal)
            for name, halves, signal in zip(self.variants, totals, signals, strict=True)
        ]
        result = xr.concat(each, dim="variant").assign_coords(variant=list(self.variants))
        result["signal"] = "variant", signals
        result["images"] = int(counts.sum())
        scalars = ("name", "kind", "row", "column", "rows", "columns", "source_y", "source_x")
        result = result.assign_coords({name: outcomes[name].values[()] for name in scalars})
        return result.squeeze("variant") if len(self.variants) == 1 else result

    def _numbers(
        self, outcomes: xr.Dataset, name: str, halves: NDArray[np.float64], counts: NDArray[np.int64], signal: float
    ) -> xr.Dataset:
        whole = np.abs(halves.sum(0))
        if not whole.sum() > 0 and not signal < NOISE:
            raise UserError(
                f"the gradient of {outcomes['name'].values!s} is 0 at every pixel ({name}): its mean over channels does not "
                "depend on the image; style replknet, or an earlier layer, may see more"
            )
        # Of a target that is the same for every image there is no field, not even of rounding errors: NaN.
        field = whole / (whole.sum() or np.nan)
        height, width = field.shape
        middle = float(outcomes["source_y"]), float(outcomes["source_x"])
        fit = fit_gaussian(field, baseline=self.baseline)
        change = _change(*np.abs(halves)) if (counts > 0).all() else np.nan
        numbers = {
            "r_squared": fit.r_squared,
            "sigma_x": fit.sigma_x,
            "sigma_y": fit.sigma_y,
            "amplitude": fit.amplitude,
            "centre_x": fit.x,
            "centre_y": fit.y,
            "change": change,
            "converged": bool(change <= self.tolerance),
        }
        return xr.Dataset(
            {
                "receptive_field": (("y", "x"), field),
                "side": (
                    "share",
                    squares(field, middle, SHARES) if np.isfinite(field).all() else [np.nan] * len(SHARES),
                ),
                **{key: ((), value) for key, value in numbers.items()},
            },
            coords={"y": np.arange(height), "x": np.arange(width), "share": list(SHARES)},
        )

    @classmethod
    def drawing(cls) -> Drawing:
        from spatially.probes import receptive_field_figures

        return receptive_field_figures


def squares(
    field: NDArray[np.float64], middle: tuple[float, float], shares: Sequence[float] = SHARES
) -> NDArray[np.float64]:
    """Sides, in pixels, of the smallest squares around ``middle`` that hold these shares of the mass.

    A pixel is in a square with all of its area; the square may reach over the image's border.

    >>> squares(np.ones((10, 10)), (5, 5), [0.04, 0.3, 1])
    array([ 2.,  6., 10.])
    """
    height, width = field.shape
    down = np.abs(np.arange(height) + 0.5 - middle[0])[:, None] + 0.5
    across = np.abs(np.arange(width) + 0.5 - middle[1])[None, :] + 0.5
    sides = 2 * np.maximum(down, across).ravel()
    order = np.argsort(sides, kind="stable")
    held = np.cumsum(field.ravel()[order])
    held /= held[-1]
    # Rounding must not ask for one more ring of pixels.
    places = [min(int(np.searchsorted(held, share - 1e-9)), held.size - 1) for share in shares]
    return sides[order][places]


@contextmanager
def observed(subject: Subject, layer: str | int, take: Any, *, found: FoundMap | None = None) -> Iterator[Any]:
    """A function of pixels that runs the subject and gives what ``take`` takes of the layer's map, and the normalised images
    that it can be differentiated by. The weights need no gradients meanwhile, which saves time and memory."""

    def run(pixels: Tensor) -> tuple[Tensor, Tensor]:
        shown = subject.normalise(pixels).detach().requires_grad_()
        taken: list[Tensor] = []
        # The model may overwrite its map later on: the copy is of one position.
        watch = feature_map(subject, lambda place, map: taken.append(take(map).clone()), layer=layer, found=found)
        with watch, subject.precision():
            subject.model(shown)
        return taken[0], shown

    with frozen(subject.model), torch.inference_mode(False), torch.enable_grad():
        yield run


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """No parameter asks for a gradient while this lasts."""
    # `model.parameters()` takes a millisecond of a ResNet-50's pass, since it names them and looks for those that are shared.
    everything = (one for module in walk(model) for one in module._parameters.values())
    asking = [one for one in everything if one is not None and one.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in asking:
            parameter.requires_grad_(True)


def _moments(features: Tensor) -> Tensor:
    """What ``signal`` needs, as sums over images: their number, the targets, their squares, the spread of the channels."""
    values = features.double()
    means = values.mean(1)
    spread = values.std(1) if values.shape[1] > 1 else means.abs()
    sums = (means.new_tensor(len(means)), means.sum(), means.square().sum(), spread.sum())
    return torch.stack(sums)


def _signal(moments: NDArray[np.float64]) -> float:
    """Standard deviation of the target over images, relative to the mean spread of channels; NaN for fewer than two."""
    count, total, squares_, spread = moments
    if count < 2 or spread <= 0:
        return float("nan")
    return float(np.sqrt(max(squares_ / count - (total / count) ** 2, 0.0)) / (spread / count))


def _change(one: NDArray[np.float64], other: NDArray[np.float64]) -> float:
    """Half the summed difference of two fields, each normalised."""
    if not (one.sum() > 0 and other.sum() > 0):
        return float("nan")
    return float(np.abs(one / one.sum() - other / other.sum()).sum() / 2)
