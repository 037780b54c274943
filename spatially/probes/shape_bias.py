r"""Shape bias (Geirhos et al. 2019): when shape and texture disagree, which of the two does a model name?

On cue-conflict images, such as a cat with the skin of an elephant, answered among sixteen classes,

.. math:: \text{shape bias} = \frac{\#\{\text{answer} = \text{shape}\}}{\#\{\text{answer} = \text{shape}\} +
          \#\{\text{answer} = \text{texture}\}}.

A model of ImageNet's 1000 classes answers with the class whose members have the largest mean probability, as in the
published evaluation; a model of the sixteen answers for itself. Images with the texture of their own shape are left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray

from spatially.data.cue_conflict import textures
from spatially.data.sources import digest_of
from spatially.errors import NotApplicable, UserError
from spatially.perturb.pixels import as_float
from spatially.probes.base import Drawing, Probe, Rows, cut, image_coordinates
from spatially.probes.intervals import wilson
from spatially.probes.published_tests import answers
from spatially.subject.classes import Alignment
from spatially.subject.imagenet_classes import SIXTEEN, imagenet_places

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject

CLASSES = tuple(SIXTEEN)
DECISIONS = ("shape", "texture", "other")


@dataclass(frozen=True, kw_only=True)
class ShapeBias(Probe):
    """How often a model names the shape of a cue-conflict image, of the times that it names its shape or its texture."""

    name: ClassVar[str] = "shape_bias"
    title: ClassVar[str] = "Shape or texture"
    paper: ClassVar[str] = (
        "Geirhos et al., ImageNet-trained CNNs are biased towards texture; increasing shape bias improves accuracy and "
        "robustness, figure 4"
    )
    definition: ClassVar[str] = (
        "Of the cue-conflict images whose shape or texture is the answer among sixteen classes, the share whose shape is; "
        "a class of several ImageNet classes has the mean of their probabilities."
    )

    seed: int = 0

    def __post_init__(self) -> None:
        self.settle()

    @property
    def passes(self) -> int:
        return 1

    def view(self, subject: Subject, images: Images) -> Subject:
        """The subject answering in the sixteen classes, in the order of their names."""
        textures(images, CLASSES)
        if subject.class_map is not None:
            return subject.align(images.classes, images.labels)
        own = subject.own()
        named = {name.casefold(): place for place, name in enumerate(own.class_names or ())}
        if set(CLASSES) <= set(named):
            return subject.answering(Alignment("names", CLASSES, tuple((named[name],) for name in CLASSES)))
        if own.answers == len(CLASSES) and own.class_names is None:
            return subject.answering(Alignment("identity", CLASSES))
        places = imagenet_places(subject, purpose="shape bias")
        members = tuple(tuple(places[number] for number in numbers) for numbers in SIXTEEN.values())
        return subject.answering(Alignment("sixteen classes", CLASSES, members, average=True))

    def check(self, subject: Subject, images: Images) -> None:
        if subject.answers != len(CLASSES):
            raise NotApplicable(f"{subject.name} does not answer in the {len(CLASSES)} classes of the cue conflict")
        if not len(self._rows(images)):
            raise UserError(
                f"in {images.description} every image has the texture of its own shape: there is no conflict"
            )

    def _rows(self, images: Images) -> Rows:
        """The images whose texture is not that of their shape."""
        return np.flatnonzero(textures(images, CLASSES) != images.labels)

    def chunks(self, images: Images, *, batch: int) -> list[Rows]:
        conflicting = self._rows(images)
        chunks = (rows[np.isin(rows, conflicting)] for rows in cut(images, batch=batch, seed=self.seed))
        return [rows for rows in chunks if len(rows)]

    @torch.inference_mode()
    def measure(
        self, subject: Subject, images: Images, rows: Rows, *, stopped: NDArray[np.bool_] | None = None
    ) -> xr.Dataset:
        answer = answers(subject, as_float(images.batch(rows, subject.device)[0])).cpu().numpy()
        shape, texture = images.labels[rows], textures(images, CLASSES)[rows]
        decision = np.select([answer == shape, answer == texture], DECISIONS[:2], DECISIONS[2])
        return xr.Dataset(
            {"decision": ("image", decision), "answer": ("image", answer)},
            coords={
                **image_coordinates(images, rows),
                "shape": ("image", shape),
                "texture": ("image", texture),
                "file": ("image", images.names(rows) or []),
            },
        )

    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        decision, shape = outcomes["decision"].values, outcomes["shape"].values
        by_shape, by_texture = decision == DECISIONS[0], decision == DECISIONS[1]
        result = outcomes.assign_coords({"class": list(CLASSES)})
        count = len(decision)
        result = _with_share(result, "shape_bias", by_shape.sum(), (by_shape | by_texture).sum())
        result = _with_share(result, "decided", (by_shape | by_texture).sum(), count)
        result = _with_share(result, "shape_rate", by_shape.sum(), count)
        result = _with_share(result, "texture_rate", by_texture.sum(), count)
        shapes, both = (
            np.array([np.sum(chosen & (shape == number)) for number in range(len(CLASSES))])
            for chosen in (by_shape, by_shape | by_texture)
        )
        result = _with_share(result, "class_shape_bias", shapes, both, dimensions=("class",))
        return result.assign(class_decided=("class", both))

    def facts(self, subject: Subject, images: Images) -> dict[str, Any]:
        """Textures are in the names of the files, which the images' own fingerprint does not cover."""
        return {"textures_fingerprint": digest_of(textures(images, CLASSES).tolist())}

    @classmethod
    def drawing(cls) -> Drawing:
        from spatially.probes import shape_bias_figures

        return shape_bias_figures


def _with_share(
    result: xr.Dataset, name: str, part: NDArray[Any], whole: NDArray[Any] | int, *, dimensions: tuple[str, ...] = ()
) -> xr.Dataset:
    """A share with its interval; NaN where there is nothing to share."""
    low, high = wilson(part, whole)
    with np.errstate(invalid="ignore", divide="ignore"):
        share = np.asarray(part, float) / np.asarray(whole, float)
    found = {name: share, f"{name}_low": low, f"{name}_high": high}
    return result.assign({key: (dimensions, value) for key, value in found.items()})
