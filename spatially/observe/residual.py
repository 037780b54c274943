"""The residual stream in the graph of a forward pass: where it begins, and what is added to it.

A residual addition adds a tensor, or a short cut from it, and something computed from it:

* both sides have a latest common source; the *branch* mixes places or channels after it, the other side does not;
* or both sides do, and the map changes its size or channels on the way: a short cut that projects or pools;
* or one side is itself a residual addition: parallel branches, added one after another.

An addition inside another one's branch (attention that keeps its pooled queries, say), or beside the stream and read by
branches alone (GCViT's global queries), is not on the stream. What happens to the stream between two additions (patch merging,
a block without a short cut) is a point of its own.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from spatially.observe.layout import Layout, layout_of
from spatially.observe.origin_rules import CHOICES, CONVOLUTIONS
from spatially.observe.provenance import MIXING, Record, Step

ACTIVATIONS = {
    "celu",
    "elu",
    "gelu",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "mish",
    "prelu",
    "relu",
    "relu6",
    "selu",
    "silu",
}


@dataclass(frozen=True, eq=False)
class Point:
    """A point of the stream: the step whose result it is, what led there, and how the result holds its map."""

    step: int
    name: str
    kind: str
    layout: Layout


@dataclass(frozen=True, eq=False)
class _Addition:
    """A residual addition: the step where both sides part, and the steps of the branch."""

    step: Step
    source: int
    branch: frozenset[int]
    layout: Layout


def find_points(record: Record) -> list[Point]:
    """The points of the stream in their order; empty for a model without residual additions on a map."""
    return _Stream(record).points()


def lost_after(record: Record, number: int) -> Step | None:
    """The first map that a model goes on to compute from a step, but whose places in the image are not known; None if none is.

    Convolutions tell that there still is a map; so do additions of the step's own shape, and tokens picked by what they hold.
    What a head computes is none of these.
    """
    reached = {number}
    for step in record.steps[number + 1 :]:
        if reached.intersection(step.parents):
            reached.add(step.number)
            if step.points is None and (
                (step.name in CONVOLUTIONS and step.shape[2:].numel() > 1)
                or (step.kind == "addition" and step.shape == record.steps[number].shape)
                or (step.name in CHOICES and step.shape[1:-1].numel() > 1)
            ):
                return step
    return None


class _Stream:
    def __init__(self, record: Record) -> None:
        self._steps = record.steps
        self._modules = record.modules
        self._layouts: dict[int, Layout | None] = {}
        self._readers: dict[int, list[int]] = {}
        for step in self._steps:
            for parent in step.parents:
                self._readers.setdefault(parent, []).append(step.number)

    def points(self) -> list[Point]:
        found: dict[int, Point] = {}
        for addition in self._on_the_stream(self._additions()):
            if self._point_before(addition.source, found) is None and not self._begin(addition.source, found):
                continue  # what it is added to holds no map
            found[addition.step.number] = self._added(addition, found)
        return _named_apart([self._after_activation(point) for point in found.values()])

    def _layout(self, number: int) -> Layout | None:
        if number not in self._layouts:
            points = self._steps[number].points
            self._layouts[number] = None if points is None else layout_of(points)
        return self._layouts[number]

    # Additions

    def _additions(self) -> list[_Addition]:
        found: dict[int, _Addition] = {}
        for step in self._steps:
            if step.kind == "addition" and len(step.parents) == 2 and step.parents[0] != step.parents[1]:
                addition = self._residual(step, found)
                if addition is not None:
                    found[step.number] = addition
        return list(found.values())

    def _residual(self, step: Step, found: dict[int, _Addition]) -> _Addition | None:
        if any(self._steps[parent].shape != step.shape for parent in step.parents):
            return None
        source, arms = self._part(*step.parents)
        if source is None:
            return None
        mixes = [bool(self._mixing(arm)) for arm in arms]
        if not any(mixes):
            return None
        layout = self._layout(step.number)
        if layout is None:
            return None
        if not all(mixes):
            return _Addition(step, source, frozenset(arms[mixes.index(True)]), layout)
        for side, parent in enumerate(step.parents):
            earlier = self._back_to(parent, found)
            if earlier is not None and earlier in arms[side]:
                return _Addition(step, earlier, frozenset(arms[1 - side]), layout)
        before = self._layout(source)
        changes = before is None or (before.grid, before.channels) != (layout.grid, layout.channels)
        return _Addition(step, source, frozenset(arms[0] | arms[1]), layout) if changes else None

    def _part(self, one: int, other: int) -> tuple[int | None, tuple[set[int], set[int]]]:
        """The latest step that both come from, and the later steps on either side."""
        sides = {one: 1, other: 2}
        arms: tuple[set[int], set[int]] = (set(), set())
        heap = [-one, -other]
        heapq.heapify(heap)
        while heap:
            number = -heapq.heappop(heap)
            side = sides[number]
            if side == 3:
                return number, arms
            arms[side - 1].add(number)
            for parent in self._steps[number].parents:
                if parent not in sides:
                    heapq.heappush(heap, -parent)
                sides[parent] = sides.get(parent, 0) | side
        return None, arms

    def _on_the_stream(self, additions: Sequence[_Addition]) -> list[_Addition]:
        """Those met on the way back from what is computed last, past the branches of those met before."""
        sources = {addition.step.number: addition.source for addition in additions}
        waiting, met = [step.number for step in self._steps if step.number not in self._readers], set()
        while waiting:
            number = waiting.pop()
            if number not in met:
                met.add(number)
                waiting.extend([sources[number]] if number in sources else self._steps[number].parents)
        return [addition for addition in additions if addition.step.number in met]

    def _mixing(self, steps: Iterable[int]) -> list[Step]:
        return [self._steps[number] for number in sorted(steps) if self._steps[number].kind in MIXING]

    # Points

    def _back_to(self, number: int, wanted: Iterable[int]) -> int | None:
        """The latest of ``wanted`` from which ``number`` came without mixing anything."""
        heap, seen = [-number], {number}
        while heap:
            number = -heapq.heappop(heap)
            if number in wanted:
                return number
            if self._steps[number].kind in MIXING:
                return None
            for parent in self._steps[number].parents:
                if parent not in seen:
                    seen.add(parent)
                    heapq.heappush(heap, -parent)
        return None

    def _point_before(self, source: int, found: dict[int, Point]) -> Point | None:
        number = self._back_to(source, found)
        return None if number is None else found[number]

    def _begin(self, source: int, found: dict[int, Point]) -> bool:
        """Add the stem, or what the stream became between two additions; whether there is a map."""
        layout = self._layout(source)
        if layout is None:
            return False
        if self._steps[source].function is None:
            return True  # the images themselves, or what was computed out of sight
        between, last = self._since(source, found)
        mixing = self._mixing(between)
        # Of a stem that is several modules, the last.
        name = _common(mixing) or (mixing[-1] if mixing else self._steps[source]).module
        if not found:
            kind = "stem"
        elif last is not None and last.layout.grid != layout.grid:
            kind = "subsampling"
        else:
            kind = _kind_of(mixing)
        found[source] = Point(source, name or kind, kind, layout)
        return True

    def _since(self, source: int, found: dict[int, Point]) -> tuple[set[int], Point | None]:
        """The steps between the last points and ``source``, and the latest of those points."""
        between: set[int] = set()
        last = -1
        stack = [source]
        while stack:
            number = stack.pop()
            if number in found:
                last = max(last, number)
            elif number not in between:
                between.add(number)
                stack.extend(self._steps[number].parents)
        return between, found.get(last)

    def _added(self, addition: _Addition, found: dict[int, Point]) -> Point:
        before = self._point_before(addition.source, found)
        mixing = self._mixing(addition.branch)
        changes = before is not None and before.layout.grid != addition.layout.grid
        kind = "subsampling" if changes else _kind_of(mixing)
        return Point(addition.step.number, self._name(addition.step.module, mixing), kind, addition.layout)

    def _name(self, module: str, mixing: Sequence[Step]) -> str:
        """The one child of the adding module that did the work, or that module itself."""
        shared = _common(mixing)
        start = f"{module}." if module else ""
        if not shared.startswith(start) or not all(step.module.startswith(start) for step in mixing):
            return module or "model"
        name = module
        for part in shared[len(start) :].split(".") if shared != module else []:
            name = f"{name}.{part}" if name else part
            if name in self._modules:  # a list of modules never runs itself
                break
        return name or "model"

    def _after_activation(self, point: Point) -> Point:
        """A block may end in an activation of its own, as a residual network's does: its output is what comes then."""
        readers = self._readers.get(point.step, [])
        if len(readers) != 1:
            return point
        reader, step = self._steps[readers[0]], self._steps[point.step]
        own = reader.module == step.module or reader.module.startswith(f"{step.module}." if step.module else "")
        if reader.name.rstrip("_") not in ACTIVATIONS or not own or reader.shape != step.shape:
            return point
        return replace(point, step=reader.number)


def _kind_of(mixing: Sequence[Step]) -> str:
    kinds = {step.kind for step in mixing}
    if "attention" in kinds:
        return "attention"
    return "convolution" if kinds & {"convolution", "pooling"} else "mlp"


def _common(mixing: Sequence[Step]) -> str:
    """The innermost module that all of it happened in."""
    together = zip(*(step.module.split(".") for step in mixing), strict=False)
    return ".".join(parts[0] for parts in takewhile(lambda parts: len(set(parts)) == 1, together))


def _named_apart(points: list[Point]) -> list[Point]:
    """A number behind a name that occurs again."""
    seen: dict[str, int] = {}
    result = []
    for point in points:
        seen[point.name] = seen.get(point.name, 0) + 1
        again = f":{seen[point.name]}" if seen[point.name] > 1 else ""
        result.append(replace(point, name=point.name + again))
    return result
