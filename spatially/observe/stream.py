"""The residual stream of any model: after its stem, and after each thing that is added to it.

The points are found by one pass of two images in which every tensor's provenance is recorded (`provenance`, `residual`);
later passes only watch for the calls whose results they are. Nothing is changed in the model, nor in what it computes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spatially.errors import NotApplicable, UserError
from spatially.observe.aside import is_aside, step_aside, unnoticed
from spatially.observe.layout import IMAGES, Layout
from spatially.observe.parts import check_python, signature
from spatially.observe.provenance import Record, Step, record
from spatially.observe.residual import find_points, lost_after
from spatially.subject import Subject

Consumer = Callable[["Place", Tensor], None]
Found = TypeVar("Found")


@dataclass(frozen=True)
class Place:
    """One point of the residual stream, the same for every batch of one input size.

    Attributes:
        index: 0 for the stem, then counted along the model.
        name: the path in the model of what was added there, such as "blocks.3.attn"; unique.
        kind: "stem", "attention", "mlp", "convolution", or "subsampling" where the grid changes.
        grid: rows and columns of the map.
        prefix: tokens beside the grid (class, distillation, registers); they are not in the map.
        channels: of the map.
        layout: how the model holds it: "nchw", "nhwc", "tokens" or "windows".
    """

    index: int
    name: str
    kind: str
    grid: tuple[int, int]
    prefix: int
    channels: int
    layout: str


class stream:
    """Look at the residual stream of ``subject`` while it runs.

    >>> import spatially
    >>> subject = spatially.load("vit_tiny_patch16_224", pretrained=False, device="cpu")
    >>> len(stream(subject).places())
    25
    >>> with stream(subject, lambda place, map: print(place.name, map.shape) if place.index == 2 else None):
    ...     answers = subject(torch.rand(1, 3, 224, 224))
    blocks.0.mlp torch.Size([1, 192, 14, 14])

    With a ``consumer`` each map (batch, channels, rows, columns) is handed over as it is computed, and not kept: it may be
    overwritten afterwards. Without one, copies are kept, and the object is a list of (place, map) pairs of the last pass.
    Gradients flow through the maps where they are enabled.
    """

    def __init__(self, subject: Subject, consumer: Consumer | None = None) -> None:
        self._subject = subject
        self._consumer = consumer or self._keep
        self._kept: list[tuple[Place, Tensor]] = []
        self._open = ExitStack()

    def places(self) -> list[Place]:
        """The points, at the subject's own input size."""
        return [spot.place for spot in self.spots(self._subject.preprocessing.input_size)]

    def spots(self, size: tuple[int, int]) -> list[Spot]:
        """What is watched for, for images of a size (height, width)."""
        return spots_of(self._subject, size)

    def __enter__(self) -> stream:
        model, watch = self._subject.model, _Watch(self._consumer)

        def begin(_: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            if is_aside():
                return  # a pass that finds the points
            images = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
            height, width = images.shape[-2:]
            self._kept.clear()
            watch.begin(self.spots((height, width)), len(images))

        def end(*_: Any) -> None:
            if not is_aside():
                watch.end(self._subject.name)

        handles = [
            model.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
            model.register_forward_hook(end),
        ]
        for handle in handles:
            self._open.callback(handle.remove)
        # Compiled code, of whichever part of the model, would run past every interception.
        self._open.enter_context(torch.compiler.set_stance("force_eager"))
        self._open.enter_context(watch)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.close()

    def __iter__(self) -> Iterator[tuple[Place, Tensor]]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)

    def _keep(self, place: Place, map: Tensor) -> None:
        self._kept.append((place, map.clone()))


@dataclass(frozen=True, eq=False)
class Spot:
    """Where a point comes up in a pass: the so manieth call of a function with a result of a certain shape."""

    place: Place
    layout: Layout
    function: Any
    output: int
    shape: tuple[int, ...]  # of one image's share, with the images' axis first
    count: int


_Key = tuple[int, int, tuple[int, ...]]  # number of the output, axis of the images, shape


@dataclass(eq=False)
class _Waiting:
    """How many results of one shape came up, and which of them are waited for."""

    count: int = 0
    spots: dict[int, Spot] = field(default_factory=dict)


class _Watch(TorchFunctionMode):
    """Hands the maps over as the calls come up whose results they are."""

    def __init__(self, consumer: Consumer) -> None:
        super().__init__()
        self._consumer = consumer
        self._waiting: dict[Any, dict[_Key, _Waiting]] = {}

    def begin(self, spots: list[Spot], batch: int) -> None:
        self._batch = batch
        self._waiting = {}
        for spot in spots:
            first, axis = spot.shape[0] * batch, spot.layout.batch_axis
            shape = (*spot.shape[1 : axis + 1], first, *spot.shape[axis + 1 :])
            waiting = self._waiting.setdefault(spot.function, {}).setdefault((spot.output, axis, shape), _Waiting())
            waiting.spots[spot.count] = spot

    def end(self, model: str) -> None:
        left = [spot.place for ones in self._waiting.values() for one in ones.values() for spot in one.spots.values()]
        self._waiting = {}
        if left:
            first = min(left, key=lambda place: place.index)
            raise UserError(
                f"{model} does not compute the same for every batch: {first.name} came up in the pass of {IMAGES} images that "
                f"looked for its residual stream, but not in one of {self._batch}"
            )

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = function(*args, **kwargs) if kwargs else function(*args)
        if (waiting := self._waiting.get(function)) and not is_aside():
            self._look(waiting, result)
        return result

    def _look(self, waiting: dict[_Key, _Waiting], result: Any) -> None:
        outputs = (result,) if isinstance(result, Tensor) else result
        found = None
        for (output, _, shape), one in waiting.items():
            if output < len(outputs) and outputs[output].shape == shape:
                one.count += 1
                found = one.spots.pop(one.count, None) or found
        if found is not None:
            self._waiting[found.function] = {key: one for key, one in waiting.items() if one.spots}
            with step_aside():
                self._consumer(found.place, found.layout.map(outputs[found.output]))


def _share(shape: torch.Size, axis: int, batch: int) -> tuple[int, ...] | None:
    """An image's share of a shape, with the images' axis first; None for what the batch does not divide."""
    if axis >= len(shape) or shape[axis] % batch:
        return None
    return (shape[axis] // batch, *shape[:axis], *shape[axis + 1 :])


_FOUND: WeakKeyDictionary[nn.Module, dict[Any, list[Spot] | str]] = WeakKeyDictionary()


def spots_of(subject: Subject, size: tuple[int, int]) -> list[Spot]:
    """The points of a model's stream for images of one size, found once for as long as it stays as it is."""
    model = subject.model
    state = signature(model)
    key = (size, subject.dtype, subject.device, state)
    known = known_of(_FOUND, model, state)
    if key not in known:
        check_python(subject)
        # What is found serves later passes that take gradients, so nothing of it may be an inference tensor.
        with unnoticed(subject.device), torch.inference_mode(False), torch.no_grad(), subject.precision():
            images = subject.normalise(torch.full((IMAGES, 3, *size), 0.5, device=subject.device))
            known[key] = _spots(record(model, images))
    found = known[key]
    if isinstance(found, str):
        raise NotApplicable(f"{subject.name} {found}")
    if not found:
        raise NotApplicable(
            f"{subject.name} has no residual stream: nowhere does it add what it computed from a map to that map"
        )
    return found


def known_of(found: WeakKeyDictionary[nn.Module, dict[Any, Found]], model: nn.Module, state: Any) -> dict[Any, Found]:
    """What was found of a model in this state, without what was found of it in others; keys end with the state."""
    known = found.setdefault(model, {})
    for other in [one for one in known if one[-1] != state]:
        del known[other]
    return known


def _spots(passed: Record) -> list[Spot] | str:
    """Those of all points, or why there are none."""
    spots = []
    points = find_points(passed)
    if points and (lost := lost_after(passed, points[-1].step)) is not None:
        return f"has a residual stream that is lost on its way: where in the image {lost.module}'s output lies cannot be told"
    for index, point in enumerate(points):
        layout = point.layout
        place = Place(index, point.name, point.kind, layout.grid, layout.prefix, layout.channels, layout.name)
        spots.append(spot_at(passed, passed.steps[point.step], layout, place))
    return spots


def spot_at(passed: Record, step: Step, layout: Layout, place: Place) -> Spot:
    """How a step's result is found again in another pass."""
    axis, output = layout.batch_axis, step.output
    shape = _share(step.shape, axis, IMAGES)
    assert shape is not None
    count = sum(
        function == step.function and output < len(shapes) and _share(shapes[output], axis, IMAGES) == shape
        for function, shapes in passed.calls[: step.call + 1]
    )
    return Spot(place, layout, step.function, output, shape, count)
