"""A model under measurement: images between 0 and 1 in, logits in the data's classes out."""

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.subject.classes import Alignment, ClassNames, align
from spatially.subject.fingerprint import Fingerprint
from spatially.subject.patches import patch_side
from spatially.subject.preprocessing import Preprocessing

HALF = (torch.bfloat16, torch.float16)


class Subject:
    """Any image classifier made measurable. Made by `spatially.load`.

    Calling it is the only place in the library that normalises. Gradients flow through it; wrap it in `torch.no_grad()`
    when none are wanted.

    Attributes:
        name: what the model is called in results.
        model: the module itself, in eval mode on `device`, in float32 (float64 for `dtype` float64).
        preprocessing: how images are cropped and normalised for it.
        device: where it runs.
        dtype: what it computes in; bfloat16 and float16 by autocast.
        class_names: what each answer is called, or None.
        answers: how many classes it answers in; 0 for a model without a classifier, whose features are returned instead.
    """

    def __init__(
        self,
        model: nn.Module,
        preprocessing: Preprocessing,
        *,
        name: str,
        answers: int,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        classes: ClassNames | None = None,
        class_map: Mapping[str, Any] | None = None,
        facts: Mapping[str, Any] | None = None,
        compile: bool | Callable[[Tensor], Any] = False,  # or `model` as it was compiled already
        channels_last: bool = False,
    ) -> None:
        self.name = name
        self.preprocessing = preprocessing
        self.device = device
        self.dtype = dtype
        self._weights_dtype = torch.float32 if dtype in HALF else dtype
        self._memory_format = torch.channels_last if channels_last else torch.contiguous_format
        self.model = converted(model, device=device, dtype=self._weights_dtype).eval()
        if channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        # `model` stays the plain module: observers read it, and its state dict keeps its names
        self._forward: Callable[[Tensor], Any] = self.model
        if callable(compile):  # asked first: a compiled module has no truth value
            self._forward = compile
        elif compile:
            self._forward = torch.compile(self.model)
        self._moments = (preprocessing.mean, preprocessing.std)
        self._mean, self._std = self._normalisation()
        self._known = classes or ClassNames()
        self._class_map = class_map
        self._model_answers = answers
        self._alignment = Alignment("none", self._known.names)
        self._facts = dict(facts or {})
        self._fingerprint = Fingerprint(self.model)

    @property
    def class_names(self) -> tuple[str, ...] | None:
        return self._alignment.names

    @property
    def answers(self) -> int:
        members = self._alignment.members
        return self._model_answers if members is None else len(members)

    @property
    def synsets(self) -> tuple[str, ...] | None:
        """The WordNet synsets of the model's own classes in their order, when they are known to be ImageNet's."""
        return self._known.synsets

    @property
    def class_map(self) -> Mapping[str, Any] | None:
        """What the user said about which of the model's classes the data's are."""
        return self._class_map

    @property
    def compiled(self) -> bool:
        """Whether calls run compiled code instead of `model` itself."""
        return self._forward is not self.model

    @property
    def fingerprint(self) -> str:
        """BLAKE2b of all weights, computed when first asked for."""
        return self._fingerprint.hexadecimal

    def weights_changed(self) -> None:
        """To be called when the model's weights are no longer what they were: its fingerprint is computed anew."""
        self._fingerprint.forget()  # shared with the subjects that this one was aligned to

    def __call__(self, images: Tensor, *, overwrite: bool = False) -> Tensor:
        """Logits (batch, answers) for images (batch, 3, height, width) between 0 and 1, from any device.

        `overwrite` allows the images to be normalised in place, where a second copy of a large batch is too many.
        """
        output = self._run(self.normalise(images, overwrite=overwrite))
        return self._alignment(output)

    def normalise(self, images: Tensor, *, overwrite: bool = False) -> Tensor:
        """The images as the model takes them: (images - mean) / std, on its device, in its precision."""
        if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
            raise ValueError(
                "images: must be floating point of shape (batch, 3, height, width) between 0 and 1, "
                f"got {images.dtype} of shape {tuple(images.shape)}"
            )
        images = images.to(device=self.device, dtype=self._weights_dtype)
        centred = images.sub_(self._mean) if overwrite else images - self._mean
        return centred.div_(self._std).contiguous(memory_format=self._memory_format)

    def align(self, classes: Sequence[str] | None, labels: Tensor | np.ndarray | Sequence[int]) -> "Subject":
        """The same model answering in the data's classes, for these class names and labels.

        Names and ImageNet synsets are matched by themselves, a `class_map` decides where one was given to `load`, and
        whatever cannot be matched is a `UserError`. See `spatially.subject.classes.align` for the order of the rules.
        """
        view = copy.copy(self)
        view._alignment = align(self.name, self._known, self._model_answers, classes, labels, self._class_map)
        return view

    def own(self) -> "Subject":
        """The same model answering in its own classes."""
        return self.answering(Alignment("none", self._known.names))

    def answering(self, alignment: Alignment) -> "Subject":
        """The same model answering in these classes, each made of some of its own."""
        view = copy.copy(self)
        view._alignment = alignment
        return view

    def cropping(self, preprocessing: Preprocessing) -> "Subject":
        """The same model with images that are cut out otherwise; normalised as before."""
        view = copy.copy(self)
        view.preprocessing = preprocessing
        return view

    def computing_in(self, dtype: torch.dtype) -> "Subject":
        """The same model, uncompiled, in float32 or float64. It shares its weights unless they have another precision."""
        view = copy.copy(self)
        if dtype != self._weights_dtype:
            view.model = converted(copy.deepcopy(self.model), device=self.device, dtype=dtype)
        view.dtype = view._weights_dtype = dtype
        view._forward = view.model
        view._mean, view._std = view._normalisation()
        return view

    def describe(self) -> dict[str, Any]:
        """What a result has to say about the model it was measured on: strings, numbers and what JSON can hold."""
        patch = patch_side(self.model)
        return {
            "model": self.name,
            **self._facts,
            "weights_fingerprint": self.fingerprint,
            "parameters": sum(parameter.numel() for parameter in self.model.parameters()),
            **({} if patch is None else {"patch": patch}),
            "dtype": str(self.dtype).removeprefix("torch."),
            "answers": self.answers,
            "preprocessing": self.preprocessing.describe(),
            **self._alignment.describe(),
        }

    def __repr__(self) -> str:
        height, width = self.preprocessing.input_size
        return f"Subject({self.name}, {height}×{width}, {self.answers} answers, {self.dtype}, {self.device})"

    def _normalisation(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, rounded once, to the precision of the weights."""
        mean, std = (
            torch.tensor(one, dtype=self._weights_dtype, device=self.device).view(3, 1, 1) for one in self._moments
        )
        return mean, std

    def _run(self, normalised: Tensor) -> Tensor:
        with self.precision():
            output = logits_of(self._forward(normalised))
        if output.ndim != 2 or output.shape[0] != normalised.shape[0]:
            raise UserError(
                f"{self.name}: must answer with one row of logits for each image, "
                f"got shape {tuple(output.shape)} for {normalised.shape[0]} images"
            )
        return output.to(self._weights_dtype)

    def precision(self) -> AbstractContextManager[Any]:
        """The context in which the model computes: autocast for half precision."""
        return torch.autocast(self.device.type, dtype=self.dtype) if self.dtype in HALF else nullcontext()


def converted(model: nn.Module, *, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model on a device, its numbers in a precision. Complex ones stay complex: `Module.to` would leave half of each.

    >>> model = nn.ParameterList([torch.ones(1) + 2j])
    >>> converted(model, device=torch.device("cpu"), dtype=torch.float64)[0].dtype
    torch.complex128
    """

    def convert(tensor: Tensor) -> Tensor:
        own = dtype if tensor.is_floating_point() else tensor.dtype
        return tensor.to(device=device, dtype=dtype.to_complex() if tensor.is_complex() else own)

    if any(tensor.is_complex() for tensor in (*model.parameters(), *model.buffers())):
        return model._apply(convert)
    return model.to(device=device, dtype=dtype)


def logits_of(output: Any) -> Tensor:
    """The logits in whatever a model returns: a tensor, something with `.logits`, or the first tensor in it.

    >>> logits_of({"features": torch.zeros(2), "logits": torch.ones(2)})
    tensor([1., 1.])
    """
    if isinstance(output, Tensor):
        return output
    if isinstance(output, Mapping):
        output = [output["logits"]] if "logits" in output else list(output.values())
    elif isinstance(getattr(output, "logits", None), Tensor):
        return output.logits
    if isinstance(output, Sequence):
        for part in output:
            if isinstance(part, Tensor):
                return part
    raise UserError(f"the model must return a tensor of logits, got {type(output).__name__}")
