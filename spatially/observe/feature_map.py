"""The last feature map of any model: what its answer is read from.

In timm's models it is mostly what ``forward_features`` returns; others have no such method. So it is found in the record of
a pass (:mod:`spatially.observe.provenance`), by one rule for all:

1. The residual stream ends at its last point, on a grid.
2. If convolutions, linear layers or concatenations of channels follow that still give a map of more than one position, the
   last of them takes its place (EfficientNet: the 1×1 convolution after the last block; HGNet: the last stage, which adds
   nothing). Those that class attention reads do not count, nor does a classifier that is applied to every position.
3. If a normalisation follows that still holds a map on that grid, the last such one is the final norm (ViT: ``norm``). If
   none follows, because the model normalises after pooling (ConvNeXt) or the class token alone (PiT), or not at all
   (ResNet), the map itself is taken.
4. Activations, gates of channels, factors and additions that are applied to it directly belong to it.

In a model without residual additions the last convolution, linear layer, concatenation, normalisation or activation that
gives a map of more than one position takes the place of 1 to 3; a pool that follows does not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from spatially.errors import NotApplicable, unknown
from spatially.observe.aside import unnoticed
from spatially.observe.layout import IMAGES, Layout, layout_of
from spatially.observe.origin_rules import JOINS
from spatially.observe.parts import check_python, signature
from spatially.observe.provenance import Record, Step, record
from spatially.observe.residual import ACTIVATIONS, Point, find_points, lost_after
from spatially.observe.stream import Consumer, Place, Spot, known_of, spot_at, spots_of, stream
from spatially.subject import Subject

FINAL = "final"
NORMS = frozenset({"layer_norm", "batch_norm", "group_norm", "instance_norm", "rms_norm", "native_layer_norm"})
MAKES_MAPS = frozenset({"convolution", "linear", "attention", "addition"})
PRODUCTS_BY_ELEMENT = frozenset({"mul", "mul_", "__mul__", "__rmul__", "__imul__", "multiply"})


class feature_map(stream):  # reads like the function it is to its users
    """Look at one feature map of ``subject`` while it runs: as `stream`, with this one place.

    ``layer`` is "final", or the name or number of a point of the residual stream, as `spatially anatomy` lists them; negative
    numbers count from the end.

    >>> import spatially
    >>> subject = spatially.load("resnet18", pretrained=False, device="cpu")
    >>> feature_map(subject).place().grid
    (7, 7)
    """

    def __init__(
        self,
        subject: Subject,
        consumer: Consumer | None = None,
        *,
        layer: str | int = FINAL,
        found: FoundMap | None = None,
    ) -> None:
        """`found` is what `found()` of another one said of this model as it is, which need not be looked for again."""
        super().__init__(subject, consumer)
        self._layer = layer
        self._already = found

    def found(self) -> FoundMap:
        """The place and its sources, at the subject's own input size."""
        return self._found(self._subject.preprocessing.input_size)

    def place(self) -> Place:
        """The place, at the subject's own input size."""
        return self.found().spot.place

    def source(self, row: int, column: int) -> tuple[float, float]:
        """Where in the image a position of the map comes from: down and across, in pixels.

        Of a patch, its middle; of a strided convolution, the middle of what it reads, which is not that of the map's cell.
        """
        return self.found().source(row, column)

    def spots(self, size: tuple[int, int]) -> list[Spot]:
        known = self._already if size == self._subject.preprocessing.input_size else None
        return [(known or self._found(size)).spot]

    def _found(self, size: tuple[int, int]) -> FoundMap:
        final, points = maps_of(self._subject, size)
        if self._layer == FINAL:
            if isinstance(final, str):
                raise NotApplicable(f"{self._subject.name} {final}")
            return final
        if not points:
            spots_of(self._subject, size)  # says that there is no stream
        return points[_number(self._layer, [found.spot.place for found in points])]


def _number(layer: str | int, places: Sequence[Place]) -> int:
    names = [place.name for place in places]
    if isinstance(layer, str):
        if layer not in names:
            raise unknown("layer", layer, [FINAL, *names], hint="(spatially anatomy lists them)")
        return names.index(layer)
    if not -len(names) <= layer < len(names):
        raise unknown("layer", str(layer), [FINAL, f"0 … {len(names) - 1}", f"-{len(names)} … -1"])
    return layer


@dataclass(frozen=True, eq=False)
class FoundMap:
    """Where a map comes up in a pass, and where in the image each of its positions comes from: rows, columns, in pixels."""

    spot: Spot
    sources: tuple[Tensor, Tensor]

    def source(self, row: int, column: int) -> tuple[float, float]:
        """Where one position comes from."""
        return float(self.sources[0][row, column]), float(self.sources[1][row, column])


_FOUND: WeakKeyDictionary[nn.Module, dict[Any, tuple[FoundMap | str, list[FoundMap]]]] = WeakKeyDictionary()


def maps_of(subject: Subject, size: tuple[int, int]) -> tuple[FoundMap | str, list[FoundMap]]:
    """The last feature map, or why there is none, and the points of the stream, found once for as long as the model stays as
    it is."""
    state = signature(subject.model)
    key = (size, subject.dtype, subject.device, state)
    known = known_of(_FOUND, subject.model, state)
    if key not in known:
        check_python(subject)
        images = subject.normalise(torch.full((IMAGES, 3, *size), 0.5, device=subject.device))
        with unnoticed(subject.device), torch.no_grad(), subject.precision():
            passed = record(subject.model, images)
        points = find_points(passed)
        places = [
            Place(number, one.name, one.kind, one.layout.grid, one.layout.prefix, one.layout.channels, one.layout.name)
            for number, one in enumerate(points)
        ]
        known[key] = (
            _final(passed, points, subject),
            [
                _found(passed, passed.steps[one.step], one.layout, place)
                for one, place in zip(points, places, strict=True)
            ],
        )
    return known[key]


def _found(passed: Record, step: Step, layout: Layout, place: Place) -> FoundMap:
    assert step.points is not None
    rows, columns = (layout.map(part)[0, 0].cpu() for part in (step.points.row, step.points.column))
    return FoundMap(spot_at(passed, step, layout, place), (rows, columns))


def _final(passed: Record, points: Sequence[Point], subject: Subject) -> FoundMap | str:
    maps = _Maps(passed, subject.model)
    step = maps.last(passed.steps[points[-1].step] if points else None)
    if step is None:
        return "has no feature map: nothing that it computes has positions in the image"
    if (lost := lost_after(passed, step.number)) is not None:
        return (
            f"has a last feature map that is not found: where in the image {lost.module}'s output lies cannot be told"
        )
    layout = maps.layout(step)
    assert layout is not None
    kind = points[-1].kind if points else "convolution"
    place = Place(0, step.module or "model", kind, layout.grid, layout.prefix, layout.channels, layout.name)
    return _found(passed, step, layout, place)


class _Maps:
    """Which steps of a pass hold whole maps, and which of them is the last."""

    def __init__(self, passed: Record, model: nn.Module) -> None:
        self._steps = passed.steps
        self._model = model
        self._layouts: dict[int, Layout | None] = {}

    def layout(self, step: Step) -> Layout | None:
        if step.number not in self._layouts:
            self._layouts[step.number] = None if step.points is None else layout_of(step.points)
        return self._layouts[step.number]

    def last(self, point: Step | None) -> Step | None:
        """The last map, given the stream's last point; None where there is no map."""
        if point is None:
            made = [one for one in self._steps if self._makes_a_map(one)]
            made = [one for one in made if not self._classifies(one)] or made
            return self._finished(made[-1]) if made else None
        # What a head attends with is no feature map: its keys and values hold as many positions as the map they look at.
        later = [] if self._attended(point) else self._after(point)
        made = [one for one in later if self._transforms(one) and not self._classifies(one)]
        start = made[-1] if made else point
        layout = self.layout(start)
        assert layout is not None
        norms = [one for one in self._after(start) if self._is_norm(one) and self._whole(one, layout.grid)]
        return self._finished(norms[-1] if norms else start)

    def _whole(self, step: Step, grid: tuple[int, int] | None = None) -> bool:
        """Whether it holds a map, of more than one position, or on the given grid."""
        layout = self.layout(step)
        return layout is not None and (layout.grid == grid if grid else layout.grid != (1, 1))

    def _after(self, step: Step) -> list[Step]:
        """The steps computed from ``step`` by calls that could be seen."""
        reached = {step.number}
        found = []
        for one in self._steps[step.number + 1 :]:
            if reached.intersection(one.parents):
                reached.add(one.number)
                if one.function is not None:
                    found.append(one)
        return found

    def _finished(self, step: Step) -> Step:
        """What becomes of a map by activations, gates and additions, one directly after another."""
        for one in self._steps[step.number + 1 :]:
            if step.number in one.parents and one.shape == step.shape and self._finishes(one):
                return self._finished(one)
        return step

    def _finishes(self, step: Step) -> bool:
        if step.function is None or not self._whole(step):
            return False
        return _activates(step) or self._gates(step) or (step.kind == "addition" and not self._attended(step))

    def _attended(self, step: Step) -> bool:
        """Whether it is a head's attention that reads the map: what it adds are positions."""
        return any(one.kind == "attention" for one in self._after(step))

    def _gates(self, step: Step) -> bool:
        """A product of a map with a constant, or with numbers for its channels that were computed from the image."""
        maps = sum(self._whole(self._steps[parent]) for parent in step.parents)
        return step.name in PRODUCTS_BY_ELEMENT and maps == 1 and not self._attended(step)

    def _transforms(self, step: Step) -> bool:
        return self._whole(step) and (step.kind in ("convolution", "linear") or self._joins(step))

    def _classifies(self, step: Step) -> bool:
        """Whether it gives the answers of every position, which are only averaged from there on."""
        layout, answers = self.layout(step), self._steps[-1].shape[-1:]
        mixes = any(one.kind in MAKES_MAPS - {"addition"} for one in self._after(step))
        return layout is not None and (layout.channels,) == tuple(answers) and not mixes

    def _joins(self, step: Step) -> bool:
        """Maps put beside each other, channel by channel."""
        layout = self.layout(step)
        if step.name not in JOINS or layout is None:
            return False
        before = [self.layout(self._steps[parent]) for parent in step.parents]
        return all(one is None or one.channels < layout.channels for one in before)

    def _is_norm(self, step: Step) -> bool:
        """A normalisation, by its function or, for what is written out, by the name of its module."""
        name = type(self._model.get_submodule(step.module)).__name__.lower()
        return step.name in NORMS or "norm" in name or "affine" in name

    def _makes_a_map(self, step: Step) -> bool:
        makes = step.kind in MAKES_MAPS or _activates(step) or self._joins(step) or self._is_norm(step)
        return step.function is not None and makes and self._whole(step)


def _activates(step: Step) -> bool:
    return step.name.rstrip("_") in ACTIVATIONS
