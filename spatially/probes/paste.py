"""The paste probe (Xu, figure 2): a shuffled host with a clean guest in its centre. Which of the two does a model name?

Each image is host once. Its guest is an image of another class, drawn from the whole set by (seed, the host's number).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray

from spatially import randomness
from spatially.errors import UserError
from spatially.perturb.check import check_block
from spatially.perturb.paste import paste
from spatially.perturb.pixels import as_float
from spatially.probes.base import Drawing, Probe, Rows, check_answers, check_numbers, image_coordinates
from spatially.probes.intervals import student, wilson

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject


@dataclass(frozen=True, kw_only=True)
class Paste(Probe):
    """How often a shuffled host outweighs a clean guest pasted into its centre."""

    name: ClassVar[str] = "paste"
    title: ClassVar[str] = "A clean guest in a shuffled host"
    paper: ClassVar[str] = "Xu, Vision Transformer with High Spatial Structure Sensitivity, figure 2"
    definition: ClassVar[str] = (
        "Every k×k block of a host image is shuffled and a clean image of another class, resized to a share of the side, is "
        "laid over its centre: the probability of both labels and how often each is the answer."
    )

    block: int = 16
    scale: float = 0.5
    seed: int = 0

    def __post_init__(self) -> None:
        self.settle()
        check_block(self.block)
        if isinstance(self.scale, bool) or not isinstance(self.scale, (int, float)) or not 0 < self.scale <= 1:
            raise UserError(f"scale must lie above 0 and at most at 1, but came as {self.scale!r}")

    @property
    def passes(self) -> int:
        return 1

    def check(self, subject: Subject, images: Images) -> None:
        check_answers(subject)
        check_block(self.block, height=images.size[0], width=images.size[1])
        if len(np.unique(images.labels)) < 2:
            raise UserError("the paste probe needs images of at least two classes")

    def guests(self, images: Images, rows: Rows) -> Rows:
        """The row of each host's guest: the other classes' images, one drawn evenly."""
        key = randomness.stream(self.seed, "paste", "guest")
        bits = randomness.image_bits(key, torch.from_numpy(images.index[rows]))
        by_label = np.argsort(images.labels, kind="stable")
        sorted_labels = images.labels[by_label]
        first, last = (np.searchsorted(sorted_labels, images.labels[rows], side) for side in ("left", "right"))
        others = len(images) - (last - first)
        number = (randomness.below(bits, 1 << 31).numpy() * others) >> 31
        # Count past the host's own class.
        return by_label[np.where(number < first, number, number + (last - first))]

    @torch.inference_mode()
    def measure(
        self, subject: Subject, images: Images, rows: Rows, *, stopped: NDArray[np.bool_] | None = None
    ) -> xr.Dataset:
        host, label, index = images.batch(rows, subject.device)
        guests = self.guests(images, rows)
        guest, guest_label, _ = images.batch(guests, subject.device)
        pasted = paste(as_float(host), as_float(guest), block=self.block, index=index, seed=self.seed, scale=self.scale)
        logits = subject(pasted, overwrite=True)
        named, probability = logits.argmax(dim=1), logits.softmax(dim=1)
        check_numbers(subject, probability.float().cpu().numpy())
        outcomes = {
            "host_probability": probability.gather(1, label[:, None])[:, 0].to(torch.float32),
            "guest_probability": probability.gather(1, guest_label[:, None])[:, 0].to(torch.float32),
            "host_wins": named == label,
            "guest_wins": named == guest_label,
        }
        coordinates = {
            **image_coordinates(images, rows),
            "guest": ("image", images.index[guests]),
            "guest_label": ("image", images.labels[guests]),
        }
        return xr.Dataset(
            {name: ("image", value.cpu().numpy()) for name, value in outcomes.items()}, coords=coordinates
        )

    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        result = outcomes.copy()
        count = outcomes.sizes["image"]
        host, guest = outcomes["host_wins"].values, outcomes["guest_wins"].values
        for name, wins in (("host_rate", host), ("guest_rate", guest), ("neither_rate", ~(host | guest))):
            low, high = wilson(wins.sum(), count)
            result[name], result[f"{name}_low"], result[f"{name}_high"] = wins.mean(), low, high
        for name in ("host_probability", "guest_probability"):
            values = outcomes[name].values.astype(np.float64)
            deviation = values.std(ddof=1) if count > 1 else np.nan
            low, high = student(values.mean(), deviation, count)
            result[f"mean_{name}"], result[f"mean_{name}_low"], result[f"mean_{name}_high"] = values.mean(), low, high
        return result

    @classmethod
    def drawing(cls) -> Drawing:
        from spatially.probes import paste_figures

        return paste_figures
