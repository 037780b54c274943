r"""Spectra of the Hessian's largest eigenvalues, one mini-batch after another (Park and Kim, figure 2).

For each mini-batch B of augmented training images, the eigenvalues of largest magnitude of

.. math:: \nabla^2_w \Big[ -\frac{1}{|B|} \sum_{(x, y) \in B} \log p_w(y \mid x) + \frac{\lambda}{2} \|w\|^2 \Big]
   = \nabla^2_w\, \mathrm{NLL} + \lambda I,

or the most positive and the most negative ones (``which="both ends"``). The spectrum is their histogram over batches. The
second term, weight decay, moves every eigenvalue by λ and nothing else: it is added to those of NLL, not computed.

They are found by Lanczos' method (:mod:`spatially.probes.lanczos`) on products of the Hessian with vectors
(:mod:`spatially.probes.hessian_vector`), the model in eval mode. Each comes with ``residual``, :math:`\|Hv - \lambda v\|` for
its unit vector v: an eigenvalue of the batch's Hessian lies no further away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import cross_entropy

from spatially import randomness
from spatially.errors import NotApplicable, UserError, unknown
from spatially.observe.finite import not_finite
from spatially.perturb.augment import check_augmentation, training_batch
from spatially.probes.base import Drawing, Probe, Rows, check_answers, check_switch, several
from spatially.probes.hessian_vector import HessianVector, only_these_learn, select_parameters, twice_differentiable
from spatially.probes.intervals import student, wilson
from spatially.probes.lanczos import BOTH_ENDS, MAGNITUDE, WHICH, Spectrum, lanczos, rounding

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject

DTYPES = {"float32": torch.float32, "float64": torch.float64}
# How much Hᵢⱼ and Hⱼᵢ may differ, relative to the largest eigenvalue, before one must be wrong. Models asked for float64 may
# still take some steps in float32.
_SYMMETRIC = {"float32": 0.02, "float64": 1e-3}
_PASSES = 200  # forward passes' worth of an image: about forty products at five each


@dataclass(frozen=True, kw_only=True)
class Hessian(Probe):
    """The largest eigenvalues of the Hessian of each mini-batch's loss.

    ``count`` eigenvalues of ``batch_size`` images each, over a ``share`` of the data. With ``which="both ends"`` the ``count``
    most positive and as many most negative. ``weight_decay`` is what the model was trained with. ``parameters`` takes patterns
    of names (``["head.*"]``); all by default. An eigenvalue is converged when its residual is at most ``tolerance`` times its
    magnitude; after ``products`` products with the Hessian the search ends in any case. ``basis`` bounds the
    vectors, as long as the weights, that are kept at a time. ``confirm`` looks for copies of multiple eigenvalues.
    """

    name: ClassVar[str] = "hessian"
    title: ClassVar[str] = "Hessian eigenvalue spectra"
    paper: ClassVar[str] = "Park and Kim, How Do Vision Transformers Work?, section 2, figures 2-3"
    definition: ClassVar[str] = (
        "The largest eigenvalues by magnitude (or the most positive and most negative) of the Hessian of NLL plus "
        "weight_decay/2·‖w‖² with respect to the weights, for each mini-batch of augmented training images, in eval mode."
    )
    lengthy: ClassVar[bool] = True

    count: int = 5
    which: str = MAGNITUDE
    batch_size: int = 16
    share: float = 0.1
    augmentation: str = "crop-flip"
    weight_decay: float = 1e-4
    parameters: Sequence[str] = ("*",)
    dtype: str = "float32"
    tolerance: float = 1e-3
    products: int = 200
    basis: int = 64
    confirm: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        self.settle()
        for name, value, allowed in (("which", self.which, WHICH), ("dtype", self.dtype, tuple(DTYPES))):
            if value not in allowed:
                raise unknown(name, str(value), allowed)
        check_augmentation(self.augmentation)
        _check_whole("count", self.count, 1)
        ranks = self.count if self.which == MAGNITUDE else 2 * self.count
        for name, least in (("batch_size", 1), ("products", ranks), ("basis", 2 * ranks + 2)):
            _check_whole(name, getattr(self, name), least)
        check_switch("confirm", self.confirm)
        for name, fits, words in (
            ("share", lambda x: 0 < x <= 1, "above 0 and at most 1"),
            ("tolerance", lambda x: 0 < x < 1, "between 0 and 1"),
            ("weight_decay", lambda x: 0 <= x < float("inf"), "of at least 0"),
        ):
            number = getattr(self, name)
            if isinstance(number, bool) or not isinstance(number, (int, float)) or not fits(number):
                raise UserError(f"{name} must be a number {words}, but came as {number!r}")
        patterns = tuple(several(self.parameters))
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            raise UserError(f"parameters must be patterns of names, such as ['*'], but came as {self.parameters!r}")
        object.__setattr__(self, "parameters", patterns)

    @property
    def passes(self) -> int:
        return ceil(self.share * _PASSES)

    @property
    def interval(self) -> str:
        return "95 % over mini-batches: Wilson score (negative_share), Student (largest)"

    def check(self, subject: Subject, images: Images) -> None:
        check_answers(subject)
        if len(images) < self.batch_size:
            raise UserError(
                f"a mini-batch takes {self.batch_size} images, but there are {len(images)}; "
                "give more, or set hessian.batch_size"
            )
        first = np.arange(1)
        view = subject.computing_in(DTYPES[self.dtype])
        with twice_differentiable():
            chosen = select_parameters(view.model, self.parameters)
            with only_these_learn(view.model, list(chosen.values())):
                pixels, targets = self._batch(view, images, first)
                product = self._product(view, pixels, targets, list(chosen.values()))[0]
                product(self._vector(0, product.dimension, images, first, view))

    def chunks(self, images: Images, *, batch: int) -> list[Rows]:
        """One chunk a mini-batch, whatever size the study cuts its other probes' images into."""
        order, size = images.order(self.seed), self.batch_size
        count = min(max(1, round(self.share * len(order) / size)), len(order) // size)
        return [order[size * number : size * (number + 1)] for number in range(count)]

    def measure(
        self, subject: Subject, images: Images, rows: Rows, *, stopped: NDArray[np.bool_] | None = None
    ) -> xr.Dataset:
        view = subject.computing_in(DTYPES[self.dtype])
        chosen = list(select_parameters(view.model, self.parameters).values())
        with twice_differentiable(), only_these_learn(view.model, chosen):
            pixels, targets = self._batch(view, images, rows)
            product, loss = self._product(view, pixels, targets, chosen)
            try:
                found = lanczos(
                    product,
                    lambda number: self._vector(number, product.dimension, images, rows, view),
                    count=self.count,
                    which=self.which,
                    shift=self.weight_decay,
                    tolerance=self.tolerance,
                    products=self.products,
                    room=self.basis,
                    confirm=self.confirm,
                )
            except FloatingPointError:
                raise not_finite(view, pixels, "the Hessian") from None
        if found.asymmetry > _SYMMETRIC[self.dtype]:
            digits = ", or float32 has too few digits (--set hessian.dtype=float64)" if self.dtype == "float32" else ""
            raise UserError(
                f"the Hessian of {subject.name} is not symmetric (by {found.asymmetry:.2g} of its largest eigenvalue): a "
                f"function in it has a second derivative that is wrong{digits}"
            )
        norm = sum(float(one.detach().double().square().sum()) for one in chosen)
        return self._outcomes(found, loss=loss, norm=norm, dimension=product.dimension, index=images.index[rows])

    def _batch(self, view: Subject, images: Images, rows: Rows) -> tuple[Tensor, Tensor]:
        pixels, labels, index = images.batch(rows, view.device)
        shown, targets = training_batch(
            pixels, labels, augmentation=self.augmentation, index=index, classes=view.answers, seed=self.seed
        )
        if len(shown) == 1 and view.device.type == "cpu":
            # PyTorch's backward of a batch norm in eval mode misreads a transposed gradient of a single image there.
            return shown.repeat(2, 1, 1, 1), torch.cat([targets, targets])
        return shown, targets

    def _product(
        self, view: Subject, pixels: Tensor, targets: Tensor, parameters: Sequence[Tensor]
    ) -> tuple[HessianVector, float]:
        logits = view(pixels)
        loss = cross_entropy(logits, targets.to(logits.dtype) if targets.is_floating_point() else targets)
        value = float(loss.detach())
        if not np.isfinite(value):
            raise not_finite(view, pixels, "the loss")
        if not loss.requires_grad:
            raise NotApplicable(f"{view.name} is not differentiable: no gradient of its loss reaches its weights")
        return HessianVector(loss, parameters), value

    def _vector(self, number: int, dimension: int, images: Images, rows: Rows, view: Subject) -> Tensor:
        """The random vector by its number, drawn for the mini-batch that begins with this image."""
        first = torch.from_numpy(images.index[rows[:1]]).to(view.device)
        noise = randomness.normal(randomness.stream(self.seed, "lanczos", number), first, (4, ceil(dimension / 4), 1))
        return noise.reshape(-1)[:dimension].to(DTYPES[self.dtype])

    def _outcomes(
        self, found: Spectrum, *, loss: float, norm: float, dimension: int, index: NDArray[np.int64]
    ) -> xr.Dataset:
        ends = [MAGNITUDE] * len(found.values)
        if self.which == BOTH_ENDS:
            ends = ["positive" if rank < (len(ends) + 1) // 2 else "negative" for rank in range(len(ends))]
        each = ("batch", "rank")
        return xr.Dataset(
            {
                "eigenvalue": (each, found.values[None] + self.weight_decay),
                "residual": (each, found.residuals[None]),
                "converged": (each, found.converged[None]),
                "products": ("batch", [found.products]),
                "asymmetry": ("batch", [found.asymmetry]),
                "nll": ("batch", [loss]),
                "image": (("batch", "member"), index[None]),
                "l2": self.weight_decay / 2 * norm,
                "weight_decay": float(self.weight_decay),
                "weights": dimension,
            },
            coords={"rank": np.arange(len(ends)), "end": ("rank", ends)},
        )

    def join(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """The mini-batches, in the order in which they were drawn."""
        if not parts:
            raise UserError("a Hessian needs at least one mini-batch")
        joined = xr.concat(parts, dim="batch", data_vars="minimal", coords="minimal", compat="override", join="exact")
        return joined.assign_coords(batch=np.arange(len(parts)))

    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        result = outcomes.copy()
        batches = result.sizes["batch"]
        for name, values in (
            ("negative_share", result["eigenvalue"]),
            ("negative_share_without_l2", result["eigenvalue"] - result["weight_decay"]),
        ):
            # Of a convex loss none is negative, though rounding puts zeros on either side.
            share = float((values < -rounding(DTYPES[self.dtype]) * abs(values).max("rank")).mean())
            # Eigenvalues of one batch are no independent draws: a batch counts once.
            low, high = wilson(share * batches, batches)
            result[name], result[f"{name}_low"], result[f"{name}_high"] = share, float(low), float(high)
        largest = result["eigenvalue"].max("rank").values
        spread = float(largest.std(ddof=1)) if batches > 1 else np.nan
        low, high = student(largest.mean(), spread, batches, within=(-np.inf, np.inf))
        result["largest"], result["largest_low"], result["largest_high"] = (
            float(largest.mean()),
            float(low),
            float(high),
        )
        result["converged_share"] = float(result["converged"].mean())
        result["eigenvalue"].attrs["includes"] = "weight_decay, which is added to every eigenvalue of NLL"
        return result

    @classmethod
    def drawing(cls) -> Drawing:
        from spatially.probes import hessian_figures

        return hessian_figures


def _check_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UserError(f"{name} must be a whole number of at least {least}, but came as {value!r}")
