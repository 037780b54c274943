r"""The spatial interaction ratio (Heo et al., section 3.3, figure 5): how much of the image interacts in one layer.

With :math:`A^h_{nm}` the attention of query n to key m in head h, N keys, and a threshold t,

.. math:: r = \left\langle \frac1N \#\{m : \#\{h : A^h_{nm} > t\} \ge \mathrm{min\_heads}\} \right\rangle_n .

Tokens without a position are no queries and no keys. A row of weights sums to 1, so that a query reaches at most heads/t
positions. A k×k convolution on a map of H×W positions counts k²/(H·W).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor

from spatially.errors import NotApplicable, UserError, unknown
from spatially.observe.attention import Layer, Weights, absent, attention
from spatially.observe.attention_trace import ALIKE, Convolution, Trace
from spatially.perturb.pixels import as_float
from spatially.probes.ahead import Outcomes, read
from spatially.probes.base import Drawing, Probe, Rows, check_switch, image_coordinates, several
from spatially.probes.layers import mean_over_images

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject

CONVOLUTIONS = ("auto", "all", "none")
UNRECOGNISED = "multiplies maps as attention does, in a form that is not recognised"
CHANGED = "changes its weights after the softmax, and is shown as it was before"


@dataclass(frozen=True, kw_only=True)
class InteractionRatio(Probe):
    """The share of positions that each layer's queries attend to by more than a threshold.

    `min_heads`: how many heads must exceed the threshold at a position. `renormalise`: whether weights are first scaled to sum
    to 1 over positions, without the class token's share. `convolutions`: "auto" counts them in models without attention,
    "all" always (kernels above 1×1), "none" never.
    """

    name: ClassVar[str] = "interaction_ratio"
    title: ClassVar[str] = "Spatial interaction by layer"
    paper: ClassVar[str] = "Heo et al., Rethinking Spatial Dimensions of Vision Transformers, section 3.3 and figure 5"
    definition: ClassVar[str] = (
        "Share of key positions whose attention after softmax exceeds the threshold in at least min_heads heads; mean over "
        "queries, then images. Tokens without a position do not count. A k×k convolution counts k²/(H·W)."
    )
    answers: ClassVar[bool] = False

    thresholds: tuple[float, ...] = (0.01, 0.1)
    min_heads: int = 1
    renormalise: bool = False
    convolutions: str = "auto"
    seed: int = 0

    def __post_init__(self) -> None:
        self.settle()
        check_switch("renormalise", self.renormalise)
        wanted = several(self.thresholds)
        if not wanted or not all(isinstance(one, (int, float)) and 0 < one < 1 for one in wanted):
            raise UserError(f"thresholds must be numbers between 0 and 1, but came as {self.thresholds!r}")
        object.__setattr__(self, "thresholds", tuple(float(one) for one in wanted))
        if len(set(self.thresholds)) < len(self.thresholds):
            raise UserError(f"thresholds must differ, but came as {self.thresholds!r}")
        if isinstance(self.min_heads, bool) or not isinstance(self.min_heads, int) or self.min_heads < 1:
            raise UserError(f"min_heads must be a whole number from 1 on, but came as {self.min_heads!r}")
        if self.convolutions not in CONVOLUTIONS:
            raise unknown("choice of convolutions", str(self.convolutions), CONVOLUTIONS)

    @property
    def passes(self) -> int:
        return 1

    @property
    def interval(self) -> str:
        return "95 % Student intervals of the mean over images"

    def check(self, subject: Subject, images: Images) -> None:
        self.layers(subject)

    def facts(self, subject: Subject, images: Images) -> dict[str, Any]:
        """Attention that the layers do not show: of channels or of a class token alone, or in a form that is not recognised."""
        found = attention(subject).trace()
        left: dict[str, list[str]] = {}
        for module, reason in found.others.items():
            left.setdefault(reason, []).append(module)
        if found.unrecognised:
            left[UNRECOGNISED] = found.unrecognised
        if found.changed:
            left[CHANGED] = list(found.changed)
        words = "; ".join(f"{', '.join(modules)} ({reason})" for reason, modules in left.items())
        return {"attention_left_out": words} if left else {}

    def layers(self, subject: Subject) -> list[Layer | Convolution]:
        """What is measured, in the order in which it runs."""
        found = attention(subject).trace()
        attending = [layer for layer in found.layers if layer.grid[0]]
        kernels = self._convolutions(found, attending)
        layers: list[Layer | Convolution] = []
        for layer in attending:
            layers += [one for one in kernels if one.before == layer.index]
            kernels = [one for one in kernels if one.before != layer.index]
            layers.append(layer)
        layers += kernels
        if layers:
            return layers
        if any(layer.kind == "class" for layer in found.layers):
            reason = "; ".join(f"{name} {why}" for name, why in list(found.others.items())[:1])
            raise NotApplicable(
                f"{subject.name}: only class tokens attend to positions" + (f", and {reason}" if reason else "")
            )
        raise NotApplicable(absent(subject.name, found))

    def _convolutions(self, found: Trace, attending: list[Layer]) -> list[Convolution]:
        others = any(reason != ALIKE for reason in found.others.values())
        attends = bool(attending or found.layers or others or found.products)
        if self.convolutions == "none" or (self.convolutions == "auto" and attends):
            return []
        return [one for one in found.convolutions if max(one.kernel) > 1]

    @torch.inference_mode()
    def measure(
        self, subject: Subject, images: Images, rows: Rows, *, stopped: NDArray[np.bool_] | None = None
    ) -> Outcomes:
        layers = self.layers(subject)
        found: list[Tensor] = []

        def look(layer: Layer, weights: Weights) -> None:
            if layer.grid[0]:
                found.append(self.reached(weights))

        attends = np.array([isinstance(layer, Layer) for layer in layers])
        values = np.empty((len(rows), len(self.thresholds), len(layers)), dtype=np.float32)
        values[:] = [0 if isinstance(layer, Layer) else kernel_share(layer) for layer in layers]

        def finish(ratios: NDArray[np.floating]) -> xr.Dataset:
            values[:, :, attends] = ratios
            if np.isnan(values).any():
                first = layers[int(np.isnan(values).any(axis=(0, 1)).argmax())]
                raise UserError(f"{subject.name}: the attention of {first.name} is NaN; look at its weights")
            outcomes = {"image_interaction_ratio": (("image", "threshold", "layer"), values)}
            return xr.Dataset(outcomes).assign_coords(image_coordinates(images, rows) | self._coordinates(layers))

        if not attends.any():
            return finish(values[:, :, attends])
        with attention(subject, look):
            subject(as_float(images.batch(rows, subject.device)[0]), overwrite=True)
        return read(torch.stack(found, dim=-1), finish)

    def reached(self, weights: Weights) -> Tensor:
        """The ratio of each image at each threshold: (images, thresholds); NaN where the weights are."""
        layer, arrangement = weights.layer, weights.arrangement
        asking = arrangement.queries.position >= layer.prefix  # (windows, n)
        asked = arrangement.keys.position >= layer.key_prefix  # (windows, m)
        pairs = asking[:, :, None] & asked[:, None, :]
        total = asking.sum() * (layer.key_grid[0] * layer.key_grid[1])
        ratios = []
        for _, local in weights.local_parts():
            if self.renormalise:
                local = local / (local * asked[:, None, None]).sum(-1, keepdim=True)
            strongest = self._strongest(local)  # (images, windows, n, m)
            counts = [((strongest > one) & pairs).flatten(1).sum(1) for one in self.thresholds]
            sums = strongest.flatten(1).sum(1, keepdim=True)
            ratio = torch.stack(counts, 1) / total
            ratios.append(torch.where(sums.isnan(), torch.nan, ratio))
        return torch.cat(ratios)

    def _strongest(self, local: Tensor) -> Tensor:
        """The weight that at least `min_heads` heads reach."""
        if self.min_heads == 1:
            return local.amax(2)
        if self.min_heads > local.shape[2]:
            return torch.zeros_like(local[:, :, 0])
        return local.topk(self.min_heads, dim=2).values[:, :, -1]

    def _coordinates(self, layers: list[Layer | Convolution]) -> dict[str, Any]:
        attends = [isinstance(layer, Layer) for layer in layers]
        grids = [layer.key_grid if isinstance(layer, Layer) else layer.grid for layer in layers]
        fields = [layer.kind if isinstance(layer, Layer) else "×".join(map(str, layer.kernel)) for layer in layers]
        bounds = [[self._bound(layer, one) for layer in layers] for one in self.thresholds]
        return {
            "threshold": ("threshold", list(self.thresholds)),
            "layer": ("layer", np.arange(len(layers))),
            "name": ("layer", [layer.name for layer in layers]),
            "kind": ("layer", ["attention" if one else "convolution" for one in attends]),
            "field": ("layer", fields),
            "rows": ("layer", [grid[0] for grid in grids]),
            "columns": ("layer", [grid[1] for grid in grids]),
            "heads": ("layer", [layer.heads if isinstance(layer, Layer) else 0 for layer in layers]),
            "bound": (("threshold", "layer"), bounds),
        }

    def _bound(self, layer: Layer | Convolution, threshold: float) -> float:
        """What the ratio cannot exceed: heads/(min_heads·t) positions, and those that a query sees at all."""
        if not isinstance(layer, Layer):
            return kernel_share(layer)
        most = layer.heads / (self.min_heads * threshold)
        return min(most, layer.reach) / (layer.key_grid[0] * layer.key_grid[1])

    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        found = mean_over_images(outcomes, "image_interaction_ratio", "interaction_ratio")
        return outcomes.assign(found.clip(0, 1).data_vars)

    @classmethod
    def drawing(cls) -> Drawing:
        from spatially.probes import interaction_ratio_figures

        return interaction_ratio_figures


def kernel_share(layer: Convolution) -> float:
    """k²/(H·W), at most all.

    >>> kernel_share(Convolution("conv", (3, 3), (14, 14), 0)) == 9 / 196
    True
    """
    (down, across), (height, width) = layer.kernel, layer.grid
    return min(down, height) * min(across, width) / (height * width)
