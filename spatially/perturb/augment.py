r"""Training augmentation on the device: a random crop resized back, a flip, and mixing of pairs.

* **Crop** (Szegedy et al. 2015, as torchvision and timm draw it): a share ``crop`` of the image's area and an aspect ratio
  from 3/4 to 4/3, log-uniform, at a uniform place; the first of ten draws that fits, else the whole image. It is resized back
  to the image's size by a triangle filter (bilinear with antialiasing).
* **Flip**: left and right exchanged with probability ½.
* **Mixup and CutMix**: image i of a batch of B is mixed with image B − 1 − i, as timm pairs them, with λ of its own from
  Beta(α, α): :math:`\lambda x_i + (1 - \lambda) x_j`, or a box of area 1 − λ cut out and filled from :math:`x_j`. The targets
  are mixed by the same λ (by the true area of the box).

Crop and flip of an image are a pure function of (seed, image number), the same bits on every device and in every batch; a
mixed image depends also on its partner. What is cropped is the model's input crop, since images are decoded once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log

import torch
from scipy.special import betaincinv
from torch import Tensor
from torch.nn.functional import one_hot

from spatially import randomness
from spatially.errors import UserError, unknown
from spatially.perturb.check import check_images, check_index
from spatially.perturb.pixels import as_float

ATTEMPTS = 10
ASPECT = (3 / 4, 4 / 3)
# Fixed point: pixels in units of 2⁻¹⁶, weights of 2⁻¹⁴, so that every sum is a whole number below 2⁵³, exact in any order.
_PIXEL, _WEIGHT, _RAW = 1 << 16, 1 << 14, 1 << 20
_SLICE = 16  # images at a time; float64 takes twice their memory


@dataclass(frozen=True)
class Augmentation:
    """What is done to a training batch."""

    crop: tuple[float, float] | None = None
    flip: bool = False
    mixup: float = 0.0
    cutmix: float = 0.0


#: The augmentations by the names that probes know them by.
AUGMENTATIONS = {
    "none": Augmentation(),
    "flip": Augmentation(flip=True),
    "crop-flip": Augmentation(crop=(0.08, 1.0), flip=True),
    "mixup": Augmentation(crop=(0.08, 1.0), flip=True, mixup=0.8),
    "cutmix": Augmentation(crop=(0.08, 1.0), flip=True, cutmix=1.0),
}


def check_augmentation(name: str) -> str:
    """A name in `AUGMENTATIONS`."""
    if not isinstance(name, str) or name not in AUGMENTATIONS:
        raise unknown("augmentation", str(name), AUGMENTATIONS)
    return name


def training_batch(
    images: Tensor,
    labels: Tensor,
    *,
    augmentation: str = "crop-flip",
    index: Tensor | Sequence[int],
    classes: int,
    seed: int = 0,
) -> tuple[Tensor, Tensor]:
    """A batch as training sees it, by the name of its augmentation: images in 0..1 and targets.

    Images come as bytes or floats. Targets are the labels ``(B,)``, or probabilities ``(B, classes)`` where images are mixed;
    `torch.nn.functional.cross_entropy` takes both.
    """
    way = AUGMENTATIONS[check_augmentation(augmentation)]
    images = augment(as_float(images), index=index, seed=seed, flip=way.flip, crop=way.crop)
    if not (way.mixup or way.cutmix):
        return images, labels
    return mix(images, labels, index=index, classes=classes, seed=seed, mixup=way.mixup, cutmix=way.cutmix)


def augment(
    images: Tensor,
    *,
    index: Tensor | Sequence[int],
    seed: int = 0,
    flip: bool = True,
    crop: tuple[float, float] | None = (0.08, 1.0),
) -> Tensor:
    """Crop and flip each image by its own draw; the size stays.

    >>> images = torch.rand(2, 3, 32, 32)
    >>> augment(images, index=[0, 1]).shape
    torch.Size([2, 3, 32, 32])
    >>> bool((augment(images, index=[0, 1], flip=False, crop=None) == images).all())
    True
    """
    check_images(images)
    numbers = check_index(index, count=len(images), device=images.device)
    if crop is not None:
        boxes = draw_boxes(numbers, size=(images.shape[2], images.shape[3]), scale=check_scale(crop), seed=seed)
        images = resize_boxes(images, boxes.to(images.device))
    if flip:
        turned = randomness.image_bits(randomness.stream(seed, "flip"), numbers) < 0
        images = torch.where(turned[:, None, None, None], images.flip(3), images)
    return images


def mix(
    images: Tensor,
    labels: Tensor,
    *,
    index: Tensor | Sequence[int],
    classes: int,
    seed: int = 0,
    mixup: float = 0.0,
    cutmix: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Mix each image with its opposite in the batch: by CutMix with that α, or else by mixup with that one.

    Gives the images, and their targets as probabilities ``(B, classes)``.
    """
    check_images(images)
    if (mixup > 0) == (cutmix > 0):
        raise UserError(f"give an α above 0 for one of mixup and cutmix, but they came as {mixup!r} and {cutmix!r}")
    numbers = check_index(index, count=len(images), device=images.device)
    bits = randomness.element_bits(randomness.stream(seed, "mix"), numbers.cpu(), 3)
    share, down, across = randomness.uniform(bits).unbind(1)
    alpha = cutmix or mixup
    own = torch.from_numpy(betaincinv(alpha, alpha, share.numpy()))
    partner = images.flip(0)
    if cutmix:
        box = _box_masks(own, down, across, size=(images.shape[2], images.shape[3]))
        own = 1 - box.double().mean(dim=(1, 2, 3))
        mixed = torch.where(box.to(images.device), partner, images)
    else:
        shares = own.to(device=images.device, dtype=images.dtype)[:, None, None, None]
        mixed = images * shares + partner * (1 - shares)
    targets = one_hot(labels.long(), classes).to(images.dtype)
    shares = own.to(device=images.device, dtype=images.dtype)[:, None]
    return mixed, targets * shares + targets.flip(0) * (1 - shares)


def _box_masks(own: Tensor, down: Tensor, across: Tensor, *, size: tuple[int, int]) -> Tensor:
    """Boxes of area 1 − λ around uniform centres, cut off at the border: bool ``(B, 1, H, W)``."""
    inside = []
    for side, centre in zip(size, (down, across), strict=True):
        middle = (centre * side).floor()
        half = ((1 - own).sqrt() * side / 2).floor()
        place = torch.arange(side, dtype=torch.float64)
        inside.append((place >= (middle - half)[:, None]) & (place < (middle + half)[:, None]))
    return (inside[0][:, :, None] & inside[1][:, None, :])[:, None]


def check_scale(crop: Sequence[float]) -> tuple[float, float]:
    """The least and the largest share of the area."""
    low, high = crop
    if not 0 < low <= high <= 1:
        raise UserError(f"crop must be two shares of the area, 0 < low ≤ high ≤ 1, but came as {tuple(crop)!r}")
    return float(low), float(high)


def draw_boxes(index: Tensor, *, size: tuple[int, int], scale: tuple[float, float], seed: int) -> Tensor:
    """Top, left, height and width of each image's crop in whole pixels, int64 ``(B, 4)`` on the CPU.

    Not on the images' device: the exponential's last bits differ between devices.
    """
    bits = randomness.element_bits(randomness.stream(seed, "crop"), index.cpu(), 4 * ATTEMPTS).unflatten(1, (-1, 4))
    area, aspect, down, across = randomness.uniform(bits).unbind(2)
    whole = size[0] * size[1]
    area = (scale[0] + area * (scale[1] - scale[0])) * whole
    aspect = (log(ASPECT[0]) + aspect * log(ASPECT[1] / ASPECT[0])).exp()
    height, width = (area / aspect).sqrt().round(), (area * aspect).sqrt().round()
    fits = (height >= 1) & (width >= 1) & (height <= size[0]) & (width <= size[1])
    top, left = (down * (size[0] - height + 1)).floor(), (across * (size[1] - width + 1)).floor()
    drawn = torch.stack([top, left, height, width], dim=2)
    first = fits.int().argmax(dim=1)
    chosen = drawn[torch.arange(len(drawn)), first]
    fallback = torch.tensor([0, 0, *size], dtype=torch.float64)
    return torch.where(fits.any(dim=1)[:, None], chosen, fallback).to(torch.int64)


def resize_boxes(images: Tensor, boxes: Tensor) -> Tensor:
    """Each image's box resized to the whole image, the same bits on every device."""
    result = torch.empty_like(images)
    height, width = images.shape[2:]
    for first in range(0, len(images), _SLICE):
        part, box = images[first : first + _SLICE], boxes[first : first + _SLICE]
        rows = _weights(box[:, 0], box[:, 2], height)[:, None]
        columns = _weights(box[:, 1], box[:, 3], width)[:, None]
        levels = (part.double() * _PIXEL).round_()
        result[first : first + _SLICE] = (rows @ levels @ columns.mT).div_(_PIXEL * _WEIGHT**2)
    return result


def _weights(start: Tensor, length: Tensor, side: int) -> Tensor:
    """Whole-numbered triangle-filter weights ``(B, side, side)``, from pixels to results, each row summing to 2¹⁴."""
    place = torch.arange(side, dtype=torch.float64, device=start.device)
    step = (length.double() / side)[:, None, None]
    first = start.double()[:, None, None]
    centres = (place[:, None] + 0.5) * step - 0.5 + first
    near = 1 - (place - centres).abs() / step.clamp(min=1)
    within = (place >= first) & (place < first + length[:, None, None])
    raw = (near.clamp(min=0) * within * _RAW).round_()
    whole = (raw * _WEIGHT / raw.sum(dim=2, keepdim=True)).round_()
    largest = whole.argmax(dim=2, keepdim=True)
    return whole.scatter_add(2, largest, _WEIGHT - whole.sum(dim=2, keepdim=True))
