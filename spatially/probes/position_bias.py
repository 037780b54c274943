r"""What a model's positions say of nearness, layer by layer, and how far that is a Gaussian (Kim, figures 5-6, table 1).

For a layer that adds a bias to its attention logits, the bias of the query n against every key m, mean over heads,

.. math:: \bar B[m] = \frac{1}{H} \sum_h B_h[n, m],

shaped as the grid (Swin's: of a window), and fitted by a two-dimensional Gaussian: ``r_squared``, ``sigma_x``, ``sigma_y``
(:mod:`spatially.probes.gaussian_fit`). Several biases of a layer are added, as the layer does. Embeddings that are added to
the patches have a row of their own (ours): the cosine of the query's embedding with every other.

Only the weights are looked at; images are neither needed nor used. Beside the bias stands the same after the positions were
drawn anew, for models whose initialiser :mod:`spatially.surgery` knows: the second row of figure 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import xarray as xr
from numpy.typing import NDArray

from spatially.errors import NotApplicable, UserError, unknown
from spatially.observe.position import Position, as_position, centre, check_place
from spatially.observe.positions import positions
from spatially.probes.base import Drawing, Probe, Rows, check_switch
from spatially.probes.gaussian_fit import BASELINES, fit_gaussian
from spatially.surgery import reset_positions

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject

CENTRE = "centre"
MOST_QUERIES = 16  # down and across, of the first layer's maps that are kept


@dataclass(frozen=True)
class LayerBias:
    """All that adds to one layer's logits, or one embedding."""

    name: str
    kind: str
    parts: tuple[Position, ...]

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the queries."""
        grid = self.parts[0].grid
        assert grid is not None
        return grid

    def map(self, query: tuple[int, int]) -> NDArray[np.float64]:
        """The mean over heads, of one query against all keys."""
        if self.parts[0].is_bias:
            return sum(part.bias(query).mean("head").values.astype(np.float64) for part in self.parts)  # type: ignore[return-value]
        return self.parts[0].similarity(query).values


def layer_biases(subject: Subject) -> list[LayerBias]:
    """Embeddings, then layers in their order."""
    found = positions(subject)
    embeddings = [one for one in found if "embedding" in one.arrays and one.kind in ("absolute", "sinusoidal")]
    layers: dict[int, list[Position]] = {}
    for one in found:
        if one.is_bias and one.layer is not None:
            layers.setdefault(one.layer, []).append(one)
    return [
        *(LayerBias(one.name, one.kind, (one,)) for one in embeddings),
        *(
            LayerBias(parts[0].name, "+".join(dict.fromkeys(one.kind for one in parts)), tuple(parts))
            for parts in layers.values()
        ),
    ]


@dataclass(frozen=True, kw_only=True)
class PositionBias(Probe):
    """Position biases and embeddings of every layer, and their Gaussian fits.

    ``position`` is the query: "centre", or row and column, in every layer whose grid has them. ``baseline`` says what the
    fit takes for zero. ``fresh`` adds the maps after the positions were drawn anew.
    """

    name: ClassVar[str] = "position_bias"
    title: ClassVar[str] = "Position biases"
    paper: ClassVar[str] = (
        "Kim, Understanding Gaussian Attention Bias of Vision Transformers Using Effective Receptive Fields, "
        "figures 5-6, table 1"
    )
    definition: ClassVar[str] = (
        "The bias that an attention layer adds to the logits of one query against all keys, mean over heads (for embeddings: "
        "the cosine of the query's with every other), and the least-squares fit of a two-dimensional Gaussian to it."
    )
    answers: ClassVar[bool] = False

    position: str | Sequence[int] = CENTRE
    baseline: str = "free"
    fresh: bool = True
    seed: int = 0

    def __post_init__(self) -> None:
        self.settle()
        check_switch("fresh", self.fresh)
        object.__setattr__(self, "position", as_position(self.position, CENTRE))
        if self.baseline not in BASELINES:
            raise unknown("baseline", str(self.baseline), BASELINES)

    @property
    def passes(self) -> int:
        return 0

    @property
    def interval(self) -> str:
        return "none: weights are what they are"

    def chunks(self, images: Images, *, batch: int) -> list[Rows]:
        """The weights are looked at once."""
        return super().chunks(images, batch=batch)[:1]

    def check(self, subject: Subject, images: Images) -> None:
        layers = layer_biases(subject)
        if not layers:
            others = sorted({one.kind for one in positions(subject)})
            why = f", only {' and '.join(others)} positions, which are no map" if others else ""
            raise NotApplicable(f"{subject.name} has no position embedding and no position bias{why}")
        self._query(layers[0])

    def measure(
        self, subject: Subject, images: Images, rows: Rows, *, stopped: NDArray[np.bool_] | None = None
    ) -> xr.Dataset:
        layers = layer_biases(subject)
        part = self._part(layers)
        if self.fresh:
            try:
                change = reset_positions(subject, seed=self.seed)
            except UserError:  # a model whose initialiser is not known has no second row
                return part
            with change:
                drawn = self._part(layer_biases(subject))
            part["fresh_bias"] = drawn["bias"]
            part["fresh_first_bias"] = drawn["first_bias"]
        return part

    def _query(self, layer: LayerBias) -> tuple[int, int]:
        if isinstance(self.position, str):
            return centre(layer.grid)
        return check_place(self.position, layer.grid, what=f"position (in {layer.name})")

    def _part(self, layers: Sequence[LayerBias]) -> xr.Dataset:
        maps = [layer.map(self._query(layer)) for layer in layers]
        rows, columns = (max(one.shape[axis] for one in maps) for axis in (0, 1))
        padded = np.full((len(maps), rows, columns), np.nan)
        for place, one in zip(padded, maps, strict=True):
            place[: one.shape[0], : one.shape[1]] = one
        first = next((layer for layer in layers if layer.parts[0].is_bias), layers[0])
        down, across = (_spread(side) for side in first.grid)
        return xr.Dataset(
            {
                "bias": (("layer", "y", "x"), padded),
                "first_bias": (
                    ("query_y", "query_x", "key_y", "key_x"),
                    np.array([[first.map((row, column)) for column in across] for row in down], dtype=np.float32),
                ),
            },
            coords={
                "layer": np.arange(len(layers)),
                "name": ("layer", [layer.name for layer in layers]),
                "kind": ("layer", [layer.kind for layer in layers]),
                "rows": ("layer", [one.shape[0] for one in maps]),
                "columns": ("layer", [one.shape[1] for one in maps]),
                "query_y": down,
                "query_x": across,
            },
        )

    def join(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        return parts[0].drop_attrs()

    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        result = outcomes.copy()
        fits = [fit_gaussian(one, baseline=self.baseline) for one in maps_of(outcomes)]
        for name in ("r_squared", "sigma_x", "sigma_y", "amplitude"):
            result[name] = "layer", [getattr(fit, name) for fit in fits]
        result["centre_x"], result["centre_y"] = ("layer", [fit.x for fit in fits]), ("layer", [fit.y for fit in fits])
        return result

    @classmethod
    def drawing(cls) -> Drawing:
        from spatially.probes import position_bias_figures

        return position_bias_figures


def maps_of(result: xr.Dataset, name: str = "bias") -> Iterator[NDArray[np.float64]]:
    """The layers' maps without what fills them up to one size."""
    for number in range(result.sizes["layer"]):
        layer = result.isel(layer=number)
        yield layer[name].values[: int(layer["rows"]), : int(layer["columns"])]


def _spread(side: int) -> NDArray[np.int64]:
    return np.unique(np.linspace(0, side - 1, min(side, MOST_QUERIES)).round().astype(np.int64))
