"""From stored bytes to the batch a model is trained on: crop and mirror, colours, normalisation, erasing, mixing, targets.

The order is DeiT's. `Augment` ends with whole grey levels, as a picture of Pillow's would; `Finish` goes on from there and
serves images that were cropped elsewhere too. What is drawn for an image, its plan, is a row of numbers made from its state,
for a whole epoch at once; making a batch then only touches pixels. Nothing waits for the device, and every shape is known
beforehand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spatially.train.augment import crop, erase, mix
from spatially.train.augment.colour import JITTER_DRAWS, jitter, jitter_plan
from spatially.train.augment.draws import Draws
from spatially.train.augment.rand_augment import RandAugment


class Augment:
    """Crop, mirror and colours of a recipe's ``augmentation``: levels, float32 ``(B, 3, *size)``."""

    def __init__(
        self,
        augmentation: Any,
        *,
        size: tuple[int, int],
        mean: tuple[float, ...],
        seed: int,
        device: torch.device | str,
    ) -> None:
        self.augmentation, self.size = augmentation, size
        name = augmentation.rand_augment
        self.rand_augment = RandAugment.read(name) if name else None
        self.jitter = 0.0 if self.rand_augment else augmentation.jitter
        # timm fills what a geometric operation uncovers with the mean colour.
        fill = [min(255, round(255 * one)) for one in mean]
        self._fill = torch.tensor(fill, dtype=torch.float32, device=device)[:, None, None]
        self._black = torch.zeros_like(self._fill)
        counts = {
            "crop": {"resized": crop.RESIZED_DRAWS, "padded": 2, "none": 0}[augmentation.crop],
            "flip": 1,
            "interpolation": 1,
            "rand_augment": self.rand_augment.draws if self.rand_augment else 0,
            "jitter": JITTER_DRAWS if self.jitter else 0,
        }
        self._draws = Draws(seed, counts, device)
        self._columns = [
            1,
            1,
            4,
            self.rand_augment.columns if self.rand_augment else 0,
            JITTER_DRAWS if self.jitter else 0,
        ]

    def plan(self, state: Tensor, original: Tensor, stored: tuple[int, int]) -> Tensor:
        """What is done to each image: float64 ``(B, …)``.

        ``original`` float64 ``(B, 2)`` are height and width before the images were stored at the size ``stored``.
        """
        numbers, given = self._draws(state), self.augmentation
        mirror = numbers["flip"].double() < given.flip
        smooth = numbers["interpolation"] < {"bilinear": 0.0, "bicubic": 1.0, "random": 0.5}[given.interpolation]
        height, width = original.unbind(1)
        boxes = crop.whole(height, width)
        if given.crop == "resized":
            boxes = crop.resized_boxes(numbers["crop"], height, width, given.scale, given.ratio)
        boxes = boxes.stretched(stored[0] / height, stored[1] / width)
        place = torch.stack([boxes.top, boxes.left, boxes.height, boxes.width], dim=1)
        if given.crop == "padded":
            place[:, :2] = torch.floor(numbers["crop"].double() * (2 * given.padding + 1)) - given.padding
        parts = [mirror, smooth, place]
        if self.rand_augment:
            parts.append(self.rand_augment.plan(numbers["rand_augment"], self.size))
        if self.jitter:
            parts.append(jitter_plan(numbers["jitter"], self.jitter))
        return torch.cat([part.double() for part in parts], dim=1)

    def __call__(self, pixels: Tensor, plan: Tensor) -> Tensor:
        """The images as planned, from ``pixels`` uint8 ``(B, 3, S, T)``."""
        mirror, smooth, place, colours, shades = plan.split(self._columns, dim=1)
        flipped = mirror[:, 0] > 0
        top, left, height, width = place.unbind(1)
        if self.augmentation.crop == "resized" or pixels.shape[2:] != self.size:
            boxes = crop.Boxes(top, left, height, width)
            each = self.augmentation.interpolation == "random"
            chosen = smooth[:, 0] > 0 if each else self.augmentation.interpolation == "bicubic"
            images = crop.cut(pixels, boxes, self.size, flipped, chosen)
        else:
            images = crop.shift(pixels, top.long(), left.long(), flipped, self._black)
        if self.rand_augment:
            images = self.rand_augment(images, colours, self._fill, interpolation=self.augmentation.interpolation)
        return jitter(images, shades) if self.jitter else images


class Finish:
    """Normalisation, erasing, mixing and targets."""

    def __init__(
        self,
        augmentation: Any,
        *,
        classes: int,
        smoothing: float,
        mean: tuple[float, ...],
        std: tuple[float, ...],
        seed: int,
        device: torch.device | str,
    ) -> None:
        self.augmentation, self.classes, self.smoothing, self.seed = augmentation, classes, smoothing, seed
        self.mixes = bool(augmentation.mixup or augmentation.cutmix)
        self._mean = 255 * torch.tensor(mean, dtype=torch.float32, device=device)[:, None, None]
        self._scale = 1 / (255 * torch.tensor(std, dtype=torch.float32, device=device)[:, None, None])
        self._draws = Draws(seed, {"erase": erase.DRAWS if augmentation.erase else 0}, device)

    def plan(self, state: Tensor, size: tuple[int, int]) -> Tensor:
        """What is erased of each image: float64 ``(B, 4)``, or no numbers without erasing."""
        if not self.augmentation.erase:
            return torch.empty(len(state), 0, dtype=torch.float64, device=state.device)
        return erase.rectangles(self._draws(state)["erase"], self.augmentation.erase, *size)

    def normalise(self, levels: Tensor) -> Tensor:
        """(x / 255 − mean) / std."""
        return (levels - self._mean) * self._scale

    def __call__(
        self, levels: Tensor, labels: Tensor, state: Tensor, plan: Tensor, row: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Images and targets, from levels ``(B, 3, H, W)``, a plan, and a row of :func:`mix.mixing`."""
        images = self.normalise(levels)
        if self.augmentation.erase:
            images = erase.erase(images, plan, state, self.seed)
        if not self.mixes:
            return images, mix.targets(labels, self.classes, self.smoothing)
        return mix.mix(images, row), mix.targets(labels, self.classes, self.smoothing, row)
