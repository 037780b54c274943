"""From a decoded image to the pixels a model was trained on: resize, crop, and the constants of its normalisation.

The crop is made here, once per image, as uint8. The normalisation (x - mean) / std is only described here and applied in
`Subject`, on the device, so that every perturbation works on plain pixels and nothing is ever normalised twice.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image

from spatially.errors import UserError

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos")
CROP_MODES = ("center", "squash", "border")


@dataclass(frozen=True)
class Preprocessing:
    """How a model wants its images.

    Args:
        input_size: height and width of the crop the model sees.
        resize: height and width the image is brought to before the crop. With `crop_mode="center"` the image keeps its
            proportions and just covers this rectangle (for a square one: its shorter side becomes this long); with
            "squash" it is stretched to the rectangle; with "border" it just fits inside. What the crop reaches beyond
            the image is black, or of the colour `mean` with "border".
        mean, std: the normalisation (x - mean) / std of pixels between 0 and 1, one number for each of red, green, blue.
        interpolation: one of nearest, bilinear, bicubic, box, hamming, lanczos (Pillow's, with antialiasing).
        crop_mode: center, squash or border, with timm's meaning.
        normalisation: "given", or "none given" when neither model nor user said one and pixels stay between 0 and 1.
    """

    input_size: tuple[int, int]
    resize: tuple[int, int]
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    interpolation: str = "bicubic"
    crop_mode: str = "center"
    normalisation: str = "given"

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the documented way to tidy the fields of a frozen dataclass
        set_field(self, "input_size", size("input_size", self.input_size))
        set_field(self, "resize", size("resize", self.resize))
        set_field(self, "mean", _channels("mean", self.mean))
        set_field(self, "std", _channels("std", self.std))
        if min(self.std) <= 0:
            raise UserError(f"std: every number must be above 0, got {list(self.std)}")
        _one_of("interpolation", self.interpolation, INTERPOLATIONS)
        _one_of("crop_mode", self.crop_mode, CROP_MODES)

    def crop(self, image: Image.Image) -> np.ndarray:
        """The uint8 pixels (3, height, width) the model sees of an RGB image. Safe to call from many threads.

        >>> Preprocessing((2, 4), resize=(2, 4)).crop(Image.new("RGB", (40, 20), "red"))[:, 0, 0]
        array([255,   0,   0], dtype=uint8)
        """
        if image.mode != "RGB":
            raise ValueError(f"image: must be in mode RGB, got {image.mode}")
        transform = _transform(self.input_size, self.resize, self.mean, self.interpolation, self.crop_mode)
        return np.ascontiguousarray(np.asarray(transform(image)).transpose(2, 0, 1))

    def describe(self) -> dict[str, Any]:
        """The same facts as plain lists, strings and numbers."""
        return {
            "input_size": list(self.input_size),
            "resize": list(self.resize),
            "mean": list(self.mean),
            "std": list(self.std),
            "interpolation": self.interpolation,
            "crop_mode": self.crop_mode,
            "normalisation": self.normalisation,
        }

    def at(self, input_size: tuple[int, int]) -> "Preprocessing":
        """The same preprocessing for another input size, seeing the same share of the image."""
        if input_size == self.input_size:
            return self
        height, width = (round(input_size[axis] * self.resize[axis] / self.input_size[axis]) for axis in (0, 1))
        return replace(self, input_size=input_size, resize=(height, width))

    def override(
        self,
        *,
        resize: int | Sequence[int] | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        interpolation: str | None = None,
        crop_mode: str | None = None,
    ) -> "Preprocessing":
        """With the user's own choices in place of the model's."""
        changes: dict[str, Any] = {"interpolation": interpolation, "crop_mode": crop_mode, "mean": mean, "std": std}
        if resize is not None:
            changes["resize"] = _shorter_side(resize, self.input_size) if isinstance(resize, int) else resize
        if mean is not None or std is not None:
            changes["normalisation"] = "given"
        changed = replace(self, **{name: value for name, value in changes.items() if value is not None})
        # some models are published with a black frame (timm's volo); nobody asks for one by hand
        if resize is not None and changed.crop_mode != "border" and min(changed._margins()) < 0:
            raise UserError(f"resize: must be at least input_size {list(self.input_size)}, got {resize!r}")
        return changed

    def _margins(self) -> tuple[int, int]:
        return (self.resize[0] - self.input_size[0], self.resize[1] - self.input_size[1])


def plain(input_size: tuple[int, int] | None, name: str) -> Preprocessing:
    """For a model that says nothing about its images: the size must be given, and pixels stay between 0 and 1."""
    if input_size is None:
        raise UserError(
            f"{name} does not say which image size it takes: "
            "give input_size=SIZE or input_size=(HEIGHT, WIDTH) (on the command line: --input-size SIZE)"
        )
    return Preprocessing(input_size, resize=input_size, normalisation="none given")


def from_timm(model: Any, input_size: tuple[int, int] | None, name: str) -> Preprocessing:
    """What a timm model's `pretrained_cfg` says, by timm's own rules for what it leaves out."""
    from timm.data import resolve_model_data_config

    configuration = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    data = resolve_model_data_config(model, pretrained_cfg=configuration)
    channels, *own_size = data["input_size"]
    if channels != 3:
        raise UserError(f"{name} takes images of {channels} channels; only RGB models (3 channels) can be measured")
    crop = input_size or size("input_size", own_size)
    return Preprocessing(
        crop,
        # timm rounds down, so a share of 0.875 of 224 gives exactly 256, and 0.95 gives 235
        resize=(math.floor(crop[0] / data["crop_pct"]), math.floor(crop[1] / data["crop_pct"])),
        mean=data["mean"],
        std=data["std"],
        interpolation=data["interpolation"],
        crop_mode=data["crop_mode"],
    )


def size(argument: str, given: Any) -> tuple[int, int]:
    """A height and a width, from one number or two."""
    pair = (given, given) if isinstance(given, int) else given
    whole = isinstance(pair, Sequence) and all(isinstance(side, int) and not isinstance(side, bool) for side in pair)
    if not whole or len(pair) != 2 or min(pair) < 1:
        raise UserError(f"{argument}: must be one whole number above 0, or two (height, width), got {given!r}")
    return (pair[0], pair[1])


def _shorter_side(length: int, input_size: tuple[int, int]) -> tuple[int, int]:
    """The rectangle shaped like the crop whose shorter side is `length`."""
    shorter = min(input_size)
    return (round(input_size[0] * length / shorter), round(input_size[1] * length / shorter))


def _channels(argument: str, given: Any) -> tuple[float, float, float]:
    try:
        numbers = [float(value) for value in given]
    except (TypeError, ValueError):
        numbers = []
    if len(numbers) != 3 or not all(math.isfinite(number) for number in numbers):
        raise UserError(f"{argument}: must be three numbers (red, green, blue), got {given!r}")
    return (numbers[0], numbers[1], numbers[2])


def _one_of(argument: str, given: str, allowed: Sequence[str]) -> None:
    if given not in allowed:
        raise UserError(f"{argument}: must be one of {', '.join(allowed)}, got {given!r}")


@lru_cache(maxsize=64)
def _transform(
    input_size: tuple[int, int],
    resize: tuple[int, int],
    mean: tuple[float, float, float],
    interpolation: str,
    crop_mode: str,
) -> Callable[[Image.Image], Image.Image]:
    """timm's evaluation transform up to the pixels, put together from its parts.

    `timm.data.transforms_imagenet_eval` takes the share that is cropped, not the size before the crop, and its
    rounding cannot express every size; for oblong crops it also forgets the interpolation.
    """
    # imported here because timm and torchvision take seconds, and reading a stored result needs neither
    from timm.data.transforms import CenterCropOrPad, ResizeKeepRatio, str_to_interp_mode
    from torchvision import transforms

    if crop_mode == "squash":
        scale = transforms.Resize(resize, interpolation=str_to_interp_mode(interpolation))
    elif crop_mode == "border":
        scale = ResizeKeepRatio(resize, interpolation=interpolation, longest=1.0)
        return transforms.Compose([scale, CenterCropOrPad(input_size, fill=[round(255 * value) for value in mean])])
    elif resize[0] == resize[1]:
        scale = transforms.Resize(resize[0], interpolation=str_to_interp_mode(interpolation))
    else:
        scale = ResizeKeepRatio(resize, interpolation=interpolation)
    return transforms.Compose([scale, transforms.CenterCrop(input_size)])
