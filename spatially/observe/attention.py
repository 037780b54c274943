r"""Attention maps of any model while it runs: softmax(q kᵀ/√d + bias) of every layer, laid out in the image.

The functions that attend (`scaled_dot_product_attention`, `softmax`, `multi_head_attention_forward`, `regular_attention`) are
intercepted; the model itself computes what it always does. Before the first batch of a size, two images are sent through to
learn, by following each token's way from the image to the layer, which calls attend to positions, how images, windows and
heads lie in them, and where in the image every query and key belongs: windows, shifted or not, are so put back in place.

>>> import spatially, timm, torch
>>> model = timm.create_model("vit_tiny_patch16_224", depth=2, img_size=32, num_classes=4)
>>> subject = spatially.load(model, input_size=32, device="cpu")
>>> with torch.no_grad(), attention(subject) as maps:
...     _ = subject(torch.rand(3, 3, 32, 32))
>>> [(layer.name, layer.grid, layer.prefix, tuple(weights.shape)) for layer, weights in maps]
[('blocks.0.attn', (2, 2), 1, (3, 3, 5, 5)), ('blocks.1.attn', (2, 2), 1, (3, 3, 5, 5))]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from spatially.errors import NotApplicable, UserError
from spatially.observe import attention_calls as calls
from spatially.observe.aside import is_aside, step_aside, unnoticed
from spatially.observe.attention_layers import Layer, Weights
from spatially.observe.attention_sources import MultiHead, Products, Source, Squares, Written
from spatially.observe.attention_trace import Call, Convolution, Trace, fields, trace
from spatially.observe.parts import check_python, signature

if TYPE_CHECKING:
    from spatially.subject import Subject

Consumer = Callable[[Layer, Weights], None]

_traces: WeakKeyDictionary[nn.Module, dict[Any, Trace]] = WeakKeyDictionary()


class attention(TorchFunctionMode, Sequence[tuple[Layer, Tensor]]):
    """Inside ``with observe.attention(subject, consumer):`` every layer's weights go to ``consumer(layer, weights)`` in turn.

    `weights` is a :class:`Weights`: computed when asked for, image by image or all at once, and freed when the consumer
    returns. Without a consumer all maps (B, heads, queries, keys) of the last batch are kept, and the observation is a
    sequence of (layer, tensor). Gradients are attached where they are enabled. A model without attention over positions
    raises ``NotApplicable``.
    """

    def __init__(self, subject: Subject, consumer: Consumer | None = None) -> None:
        super().__init__()
        self.subject = subject
        self._consumer = consumer
        self._kept: list[tuple[Layer, Tensor]] = []
        self._context = ExitStack()
        self._trace: Trace | None = None
        self._number = self._batch = 0
        self._inside = False

    def layers(self) -> list[Layer]:
        """The attention layers, at the subject's input size."""
        return self.trace().layers

    def others(self) -> dict[str, str]:
        """Modules whose attention is not over positions, and why."""
        return dict(self.trace().others)

    def convolutions(self) -> list[Convolution]:
        """The convolutions over positions, in the order they run."""
        return list(self.trace().convolutions)

    def trace(self) -> Trace:
        """What the model does with two images of the subject's input size."""
        self._check()
        height, width = self.subject.preprocessing.input_size
        with torch.no_grad(), self.subject.precision():
            images = self.subject.normalise(torch.full((1, 3, height, width), 0.5))
            return _known_trace(self.subject.model, images)

    def __enter__(self) -> attention:
        self._check()
        self._context.enter_context(torch.compiler.set_stance("force_eager"))
        for hook in (
            self.subject.model.register_forward_pre_hook(self._begin),
            self.subject.model.register_forward_hook(self._end, always_call=True),
        ):
            self._context.callback(hook.remove)
        super().__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)
        self._context.close()
        self._inside = False

    def __len__(self) -> int:
        return len(self._kept)

    def __getitem__(self, index: Any) -> Any:
        return self._kept[index]

    def __iter__(self) -> Iterator[tuple[Layer, Tensor]]:
        return iter(self._kept)

    def __torch_function__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if self._inside and (kind := calls.kind_of(function)) is not None and not is_aside():
            self._see(kind, function, args, kwargs or {}, result)
        return result

    def _check(self) -> None:
        check_python(self.subject)

    def _begin(self, model: nn.Module, arguments: tuple[Any, ...]) -> None:
        if self._inside or is_aside() or not arguments or not isinstance(arguments[0], Tensor):
            return
        images = arguments[0]
        self._trace = _known_trace(model, images)
        if not self._trace.layers:
            raise NotApplicable(absent(self.subject.name, self._trace))
        self._number, self._batch = 0, images.shape[0]
        self._kept.clear()
        self._inside = True

    def _end(self, *_: Any) -> None:
        if not is_aside():
            self._inside = False

    def _see(self, kind: str, function: Any, arguments: tuple[Any, ...], options: Any, result: Any) -> None:
        assert self._trace is not None
        if self._number >= len(self._trace.calls) or self._trace.calls[self._number].kind != kind:
            _traces.pop(self.subject.model, None)
            raise UserError(
                f"{self.subject.name} computes otherwise than it did for two images of the same size: its attention call "
                f"{self._number} is another. If it was changed meanwhile, run it again; if it depends on the batch, it "
                "cannot be observed"
            )
        call = self._trace.calls[self._number]
        self._number += 1
        if call.layer is None or call.arrangement is None:
            return
        with step_aside(), _off_the_books():
            source = _source(call, function, arguments, options, result)
            weights = Weights(call.layer, source, call.arrangement, self._batch)
            if self._consumer is None:
                self._kept.append((call.layer, weights.whole().clone()))  # the model may write over its own
            else:
                self._consumer(call.layer, weights)
            weights.release()


def _off_the_books() -> Any:
    """What is computed here is not counted among what a checkpointed part of the model computes again."""
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():  # which know no such hooks
        return nullcontext()
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def absent(name: str, found: Trace) -> str:
    """Why a model has no attention maps."""
    if not found.others and found.products:
        return f"{name} computes its attention in a form that is not recognised, in {found.products[0]}"
    if not found.others:
        return f"{name} has no attention layers"
    reasons = "; ".join(f"{module} {reason}" for module, reason in list(found.others.items())[:3])
    return f"{name} has no attention over positions: {reasons}"


def _known_trace(model: nn.Module, images: Tensor) -> Trace:
    """The trace of this input size; made anew when the model was changed."""
    kind = images.device.type
    state = (
        tuple(images.shape[1:]),
        images.dtype,
        str(images.device),
        torch.is_grad_enabled(),
        torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind),
        signature(model),
    )
    known = _traces.setdefault(model, {})
    if state not in known:
        if not len(images):
            raise UserError("images: at least one is needed")
        pair = images[:1].detach().expand(2, -1, -1, -1).contiguous()
        for other in [one for one in known if one[-1] != state[-1]]:
            del known[other]
        with unnoticed(pair.device):
            known[state] = trace(model, pair)
    return known[state]


def _source(call: Call, function: Any, arguments: tuple[Any, ...], options: Any, result: Any) -> Source:
    assert call.arrangement is not None
    if call.kind == calls.FUSED:
        given = calls.fused_arguments(arguments, options)
        mask, causal = given.get("attn_mask"), bool(given.get("is_causal"))
        return Products(call.arrangement, given["query"], given["key"], mask, given["scale"], causal)
    if call.kind == calls.SOFTMAX:
        return Written(call.arrangement, result.permute(call.order))
    if call.kind == calls.MULTI_HEAD:
        return MultiHead(call.arrangement, function, calls.multi_head_arguments(arguments, options))
    given = calls.regular_arguments(arguments, options)
    rows, columns = fields(given)
    return Squares(given["query"], given["key"], rows, columns, given["bias"], given["scale"])


__all__ = ["Layer", "Weights", "absent", "attention"]
