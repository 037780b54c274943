r"""Sensitivity to block shuffling and masking (Xu, section 4).

For each kind (shuffle, mask), block size k and ratio α of blocks, on the images perturbed so:

* ``accuracy``: top-1. The higher it stays, the less the model minds.
* ``average_confidence``: mean probability of the true class over the images classified correctly (AC, tables 1 and 2);
  undefined where none is.

And two summaries, with c the accuracy of chance:

* ``structure_reliance`` (shuffling), the share of the above-chance accuracy lost when every block is shuffled,
  :math:`1 - \frac{\mathrm{accuracy}(1) - c}{\mathrm{accuracy}(0) - c}` cut to 0..1. A bag of patches reads 0 at its own
  patch grid, a rigid template 1.
* ``sensitivity_area`` (both kinds), :math:`1 - \int_0^1 \frac{\mathrm{accuracy}(\alpha) - c}{\mathrm{accuracy}(0) - c}
  \mathrm d\alpha` by trapezoids: the earlier the collapse, the higher.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from spatially.errors import UserError, unknown
from spatially.perturb.blocks import Blocks, draw_blocks
from spatially.perturb.check import check_block, check_ratio
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
from spatially.probes.intervals import LEVEL, Interval, anytime, lost_share, student, wilson
from spatially.probes.stopping import Stopping, check_precision

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject

KINDS = ("shuffle", "mask")
POINT = ("kind", "block", "ratio")


@dataclass(frozen=True, kw_only=True)
class Sensitivity(Probe):
    """Accuracy and confidence as blocks are shuffled or masked.

    ``precision`` stops each point as soon as its accuracy is known to ± so much; its intervals are then valid at any
    stopping time.
    """

    name: ClassVar[str] = "sensitivity"
    title: ClassVar[str] = "Sensitivity to block shuffling and masking"
    paper: ClassVar[str] = (
        "Xu, Vision Transformer with High Spatial Structure Sensitivity, section 4, figures 3-14, tables 1-2"
    )
    definition: ClassVar[str] = (
        "Top-1 accuracy, and mean probability of the true class over correctly classified images, after a share of the "
        "k×k blocks of each image is permuted (shuffle) or replaced by noise of the image's own mean and deviation (mask)."
    )

    kinds: Sequence[str] = KINDS
    blocks: Sequence[int] = (8, 16, 24, 32)
    ratios: Sequence[float] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
    seed: int = 0
    precision: float | None = None

    def __post_init__(self) -> None:
        self.settle()
        for kind in several(self.kinds):
            if kind not in KINDS:
                raise unknown("kind", str(kind), KINDS)
        settings = {
            "kinds": tuple(kind for kind in KINDS if kind in several(self.kinds)),
            "blocks": tuple(sorted({check_block(block) for block in several(self.blocks)})),
            "ratios": tuple(sorted({check_ratio(ratio) for ratio in several(self.ratios)})),
            "precision": check_precision(self.precision),
        }
        for name, value in settings.items():
            if value == ():
                raise UserError(f"{name} must name at least one value")
            object.__setattr__(self, name, value)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Numbers of kinds, blocks and ratios."""
        return len(self.kinds), len(self.blocks), len(self.ratios)

    @property
    def passes(self) -> int:
        clean = int(0.0 in self.ratios)
        return (len(self.ratios) - clean) * len(self.blocks) * len(self.kinds) + clean

    @property
    def interval(self) -> str:
        if self.precision is None:
            return "95 % intervals over images: Wilson's for accuracy, Student's for confidence, Fieller's for the summaries"
        return (
            "95 % confidence sequences over images, valid at any stopping time (mixture of Bernoulli likelihood ratios); "
            "the summaries' combine those of their points by Bonferroni"
        )

    def check(self, subject: Subject, images: Images) -> None:
        check_answers(subject)
        for block in self.blocks:
            check_block(block, height=images.size[0], width=images.size[1])

    @torch.inference_mode()
    def measure(
        self, subject: Subject, images: Images, rows: Rows, *, stopped: NDArray[np.bool_] | None = None
    ) -> xr.Dataset:
        pixels, labels, index = images.batch(rows, subject.device)
        skip = np.zeros(self.shape, bool) if stopped is None else stopped
        prediction = torch.full((*self.shape, len(rows)), -1, dtype=torch.int32, device=pixels.device)
        probability = torch.full((*self.shape, len(rows)), torch.nan, device=pixels.device)
        clean: tuple[Tensor, Tensor] | None = None
        for i, kind in enumerate(self.kinds):
            for j, block in enumerate(self.blocks):
                draw = draw_blocks(pixels, kind=kind, block=block, index=index, seed=self.seed)
                for k, ratio in enumerate(self.ratios):
                    if skip[i, j, k]:
                        continue
                    # What leaves the image as it is needs one pass for all kinds and blocks.
                    if unchanged(draw, ratio):
                        clean = clean or answer(subject, as_float(pixels), labels)
                        prediction[i, j, k], probability[i, j, k] = clean
                    else:
                        prediction[i, j, k], probability[i, j, k] = answer(subject, draw.perturb(ratio), labels)
        outcomes = prediction.cpu().numpy(), probability.cpu().numpy()
        check_numbers(subject, outcomes[1][~skip])
        return self._part(images, rows, *outcomes, skip)

    def _part(
        self,
        images: Images,
        rows: Rows,
        prediction: NDArray[np.int32],
        probability: NDArray[np.float32],
        skip: NDArray[np.bool_],
    ) -> xr.Dataset:
        dims = ("image", *POINT)
        prediction, probability = np.moveaxis(prediction, -1, 0), np.moveaxis(probability, -1, 0)
        correct = prediction == images.labels[rows][:, None, None, None]
        outcomes = {
            "correct": correct
            if self.precision is None
            else np.where(skip, np.float32("nan"), correct.astype(np.float32)),
            "probability": probability,
            "prediction": prediction,
        }
        coordinates = {
            **image_coordinates(images, rows),
            "kind": list(self.kinds),
            "block": list(self.blocks),
            "ratio": list(self.ratios),
            "covered": ("block", [self._covered(images.size, block) for block in self.blocks]),
        }
        return xr.Dataset({name: (dims, values) for name, values in outcomes.items()}, coords=coordinates)

    @staticmethod
    def _covered(size: tuple[int, int], block: int) -> float:
        return (size[0] // block) * (size[1] // block) * block**2 / (size[0] * size[1])

    def stopping(self) -> Stopping | None:
        return None if self.precision is None else Stopping(self.precision, self.shape)

    def outcomes(self, part: xr.Dataset) -> NDArray[np.float64]:
        return part["correct"].values.astype(np.float64)

    def join(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        """As for any probe, without what was measured of a point after it had stopped."""
        stopping = self.stopping()
        if stopping is None:
            return super().join(parts)
        kept = []
        for part in parts:
            going = xr.DataArray(~stopping.stopped, dims=POINT)
            if not going.any():
                break
            stopping.update(self.outcomes(part))
            kept.append(
                part.assign(
                    correct=part["correct"].where(going),
                    probability=part["probability"].where(going),
                    prediction=part["prediction"].where(going, -1).astype(np.int32),
                )
            )
        return super().join(kept)

    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        correct = outcomes["correct"].transpose("image", *POINT).values.astype(np.float64)
        probability = outcomes["probability"].transpose("image", *POINT).values.astype(np.float64)
        measured = ~np.isnan(correct)
        count, right = measured.sum(axis=0), np.nansum(correct, axis=0)
        result = outcomes.assign(measured=(POINT, count))
        with np.errstate(invalid="ignore", divide="ignore"):
            accuracy = right / count
        spread = wilson(right, count) if self.precision is None else anytime(right, count)
        _assign(result, "accuracy", POINT, accuracy, spread)
        confidence, spread = self._confidence(np.where(correct == 1, probability, np.nan), right)
        _assign(result, "average_confidence", POINT, confidence, spread)
        area = [
            [self._lost(correct[:, i, j], chance, area=True) for j in range(self.shape[1])]
            for i in range(self.shape[0])
        ]
        _assign_triples(result, "sensitivity_area", ("kind", "block"), np.array(area))
        undefined = [(np.nan,) * 3] * len(self.blocks)
        if "shuffle" in self.kinds:
            i = list(self.kinds).index("shuffle")
            undefined = [self._lost(correct[:, i, j], chance, area=False) for j in range(self.shape[1])]
        _assign_triples(result, "structure_reliance", ("block",), np.array(undefined))
        return result

    def _confidence(
        self, probability: NDArray[np.float64], right: NDArray[np.float64]
    ) -> tuple[NDArray[np.float64], Interval]:
        """Mean over the correct images (NaN elsewhere in ``probability``), and its interval."""
        total = np.nansum(probability, axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = total / right
            deviation = np.sqrt(np.nansum((probability - mean) ** 2, axis=0) / (right - 1))
        if self.precision is None:
            return mean, student(mean, np.where(right > 1, deviation, np.nan), right)
        low, high = anytime(total, right)
        return mean, Interval(np.where(right > 0, low, np.nan), np.where(right > 0, high, np.nan))

    def _weights(self, *, area: bool) -> NDArray[np.float64] | None:
        """How much each ratio counts in a summary: the last alone, or by trapezoids over 0..1."""
        ratios = np.array(self.ratios)
        if ratios[0] != 0 or ratios[-1] != 1 or len(ratios) < 2:
            return None
        if not area:
            return np.eye(len(ratios))[-1]
        steps = np.diff(ratios)
        return (np.append(steps, 0) + np.insert(steps, 0, 0)) / 2

    def _lost(self, correct: NDArray[np.float64], chance: float, *, area: bool) -> tuple[float, float, float]:
        """A summary of one kind and block and its interval; NaN where ratios 0 and 1 are not both measured."""
        weights = self._weights(area=area)
        if weights is None:
            return np.nan, np.nan, np.nan
        if self.precision is None:
            return lost_share(correct @ weights, correct[:, 0], chance)
        return _lost_anytime(correct, weights, chance)

    @classmethod
    def drawing(cls) -> Drawing:
        from spatially.probes import sensitivity_figures

        return sensitivity_figures


def unchanged(draw: Blocks, ratio: float) -> bool:
    """Whether so few blocks are chosen that the images stay as they are: none, or one that can only stay in its place."""
    return draw.chosen(ratio) <= (1 if draw.kind == "shuffle" else 0)


def answer(subject: Subject, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The class the subject names and the probability it gives the true one, ``(B,)`` each. The images are used up."""
    logits = subject(images, overwrite=True)
    prediction = logits.argmax(dim=1).to(torch.int32)
    return prediction, logits.softmax(dim=1).gather(1, labels[:, None])[:, 0].to(torch.float32)


def _lost_anytime(
    correct: NDArray[np.float64], weights: NDArray[np.float64], chance: float
) -> tuple[float, float, float]:
    """The summary from points that stopped at different times: each point's interval, the error shared out evenly."""
    count, right = (~np.isnan(correct)).sum(axis=0), np.nansum(correct, axis=0)
    accuracy = right / np.maximum(count, 1)
    if count.min() == 0 or accuracy[0] <= chance:
        return np.nan, np.nan, np.nan
    used = weights > 0
    used[0] = True
    low, high = anytime(right, count, level=1 - (1 - LEVEL) / used.sum())
    base, above = low[0] - chance, high[0] - chance
    worst, best = (high @ weights - chance), (low @ weights - chance)
    estimate = 1 - (accuracy @ weights - chance) / (accuracy[0] - chance)
    # Dividing by the clean accuracy's nearer end widens a positive rest and narrows a negative one, and so cuts the right way.
    lowest = 1 - worst / (base if worst > 0 else above) if base > 0 else 0.0
    highest = 1 - best / (above if best > 0 else base) if base > 0 else 1.0
    low_end, middle, high_end = np.clip([lowest, estimate, highest], 0, 1)
    return float(middle), float(min(low_end, middle)), float(max(high_end, middle))


def _assign(result: xr.Dataset, name: str, dims: tuple[str, ...], value: NDArray[np.float64], spread: Interval) -> None:
    result[name] = dims, value
    result[f"{name}_low"], result[f"{name}_high"] = (dims, spread.low), (dims, spread.high)


def _assign_triples(result: xr.Dataset, name: str, dims: tuple[str, ...], triples: NDArray[np.float64]) -> None:
    _assign(result, name, dims, triples[..., 0], Interval(triples[..., 1], triples[..., 2]))
