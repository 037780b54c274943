r"""The loss along the straight line from a model's weights to another checkpoint's.

At :math:`w(t) = (1 - t)\,w_0 + t\,w_1`, 0 the model itself and 1 the checkpoint, over the images as training sees them:
``nll``, ``l2``, ``accuracy`` and ``loss`` = nll + l2 at every t (Goodfellow, Vinyals and Saxe 2015). And ``barrier``, how far
the loss rises between the two above the straight line through their own losses (Frankle et al. 2020),

.. math:: \max_{0 \le t \le 1} L(w(t)) - (1 - t)\,L(w_0) - t\,L(w_1),

about 0 where both lie in one basin. t = 0 and t = 1 are always measured.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import xarray as xr
from numpy.typing import NDArray
from torch import nn

from spatially.errors import NotApplicable, UserError
from spatially.perturb.augment import check_augmentation
from spatially.probes.ahead import Outcomes
from spatially.probes.base import Drawing, Measurer, Probe, Rows, check_answers, short_path
from spatially.probes.weight_losses import Batches
from spatially.probes.weight_paths import Line, check_line, check_real
from spatially.probes.weight_points import Measuring, check_range, check_weight_decay, even, with_intervals
from spatially.subject.checkpoint import load_checkpoint

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Interpolation(Probe):
    """NLL, L2 term and accuracy along the line to the weights in a file.

    ``towards`` names the file; ``{model}`` in it stands for the model's name, where several models go to one each.
    """

    name: ClassVar[str] = "interpolation"
    title: ClassVar[str] = "Between two checkpoints"
    paper: ClassVar[str] = "Goodfellow et al., Qualitatively Characterizing Neural Network Optimization Problems"
    definition: ClassVar[str] = (
        "NLL, weight_decay/2·‖w‖² and accuracy at (1 − t)·w0 + t·w1, over augmented images; w0 the model's weights, w1 "
        "those of another checkpoint of the same model. Running statistics follow, with t cut to 0..1."
    )

    towards: str | None = None
    points: int = 21
    extent: Sequence[float] = (-0.5, 1.5)
    weight_decay: float = 1e-4
    augmentation: str = "crop-flip"
    seed: int = 0

    def __post_init__(self) -> None:
        self.settle()
        check_augmentation(self.augmentation)
        if self.towards is not None and not isinstance(self.towards, (str, Path)):
            raise UserError(f"towards must be a file of weights, but came as {self.towards!r}")
        if isinstance(self.points, bool) or not isinstance(self.points, int) or self.points < 2:
            raise UserError(f"points must be a whole number of at least 2, but came as {self.points!r}")
        object.__setattr__(self, "towards", None if self.towards is None else str(self.towards))
        object.__setattr__(self, "extent", check_range(self.extent))
        object.__setattr__(self, "weight_decay", check_weight_decay(self.weight_decay))

    @property
    def places(self) -> list[tuple[float]]:
        """Every t, the two models' own among them."""
        low, high = self.extent
        return [(t,) for t in sorted({0.0, 1.0, *even(low, high, self.points)})]

    @property
    def passes(self) -> int:
        return len(self.places)

    @property
    def interval(self) -> str:
        return "95 % intervals over images: Student's for NLL, Wilson's for accuracy"

    def chunks(self, images: Images, *, batch: int) -> list[Rows]:
        """One point each, over all images; the model's own first."""
        own = self.places.index((0.0,))
        return [np.array([number]) for number in (own, *(n for n in range(len(self.places)) if n != own))]

    def check(self, subject: Subject, images: Images) -> None:
        check_answers(subject)
        if self.towards is None:
            raise NotApplicable("there is no second checkpoint; name it: --set interpolation.towards=FILE")
        check_real(subject.model)
        check_line(subject.model, self._other(subject))

    def facts(self, subject: Subject, images: Images) -> dict[str, Any]:
        return {"towards_fingerprint": blake2b(self._file(subject).read_bytes(), digest_size=16).hexdigest()}

    def options(self) -> dict[str, Any]:
        """The options by name; of the file the last two names: its content has a fingerprint among the facts."""
        return super().options() | ({} if self.towards is None else {"towards": short_path(self.towards)})

    def measurer(self, subject: Subject, images: Images, *, batch: int) -> Measurer:
        return Measuring(
            subject,
            Batches(subject, images, batch=batch, seed=self.seed, augmentation=self.augmentation),
            path=lambda: Line(subject.model, self._other(subject)),
            places=self.places,
            weight_decay=self.weight_decay,
        )

    def measure(
        self, subject: Subject, images: Images, rows: Rows, *, stopped: NDArray[np.bool_] | None = None
    ) -> Outcomes:
        """The points with the numbers in ``rows``; :meth:`measurer` keeps what they share."""
        return self.measurer(subject, images, batch=64)(rows)

    def _file(self, subject: Subject) -> Path:
        return Path(str(self.towards).replace("{model}", subject.name)).expanduser()

    def _other(self, subject: Subject) -> nn.Module:
        """The same model with the other weights."""
        other = copy.deepcopy(subject.model)
        load_checkpoint(other, self._file(subject))
        return other

    def join(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        points = xr.concat(parts, dim="point").sortby("point")
        return points.rename_dims(point="t").drop_vars("point").assign_coords(t=[t for (t,) in self.places])

    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        result = with_intervals(outcomes)
        t, loss = result["t"], result["loss"]
        above = loss - (1 - t) * loss.sel(t=0.0).values - t * loss.sel(t=1.0).values
        between = above.sel(t=slice(0.0, 1.0)).values
        result["barrier"] = ((), float(between.max()))  # NaN if the loss is anywhere between
        result["barrier_t"] = (
            (),
            float("nan") if np.isnan(between).any() else float(t.sel(t=slice(0, 1))[between.argmax()]),
        )
        return result

    @classmethod
    def drawing(cls) -> Drawing:
        from spatially.probes import interpolation_figures

        return interpolation_figures
