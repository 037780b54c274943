"""Occlusion (Heo, section 4.3): a rectangle of the image is set to zero, in pixels, before normalisation.

By default the centre half: 112×112 of 224×224. With sides a·H and b·W for a share, or as many pixels as given,

    x'[y, x] = value   for top ≤ y < top + height, left ≤ x < left + width,   x[y, x] elsewhere;
    top = ⌊(H − height) / 2⌋, left = ⌊(W − width) / 2⌋   for the centre.
"""

from collections.abc import Sequence
from numbers import Integral, Real
from typing import NamedTuple

from torch import Tensor

from spatially.errors import UserError
from spatially.perturb.check import check_images

CENTRE = "centre"
Size = float | int | Sequence[float | int]
Place = str | Sequence[int]


class Rectangle(NamedTuple):
    """Rows and columns of an image."""

    top: int
    left: int
    height: int
    width: int


def occlude(images: Tensor, *, size: Size = 0.5, place: Place = CENTRE, value: float = 0.0) -> Tensor:
    """Set a rectangle of every image to ``value``.

    ``size`` is a share of each side (a float from 0 to 1) or whole pixels (an int); two of them for height and width.
    ``place`` is "centre", or the row and column of the upper left pixel.
    """
    check_images(images)
    top, left, height, width = rectangle(size, place, (images.shape[2], images.shape[3]))
    occluded = images.clone()
    occluded[:, :, top : top + height, left : left + width] = value
    return occluded


def rectangle(size: Size, place: Place, image: tuple[int, int]) -> Rectangle:
    """The occluded part of an image of so many rows and columns.

    >>> rectangle(0.5, "centre", (224, 224))
    Rectangle(top=56, left=56, height=112, width=112)
    """
    sizes = check_size(size)
    height, width = (_pixels(given, side) for given, side in zip(sizes, image, strict=True))
    corner = check_place(place)
    top, left = ((image[0] - height) // 2, (image[1] - width) // 2) if corner is None else corner
    if min(top, left) < 0 or top + height > image[0] or left + width > image[1]:
        raise UserError(
            f"occlusion of {height}×{width} pixels at row {top}, column {left} does not fit into an image of "
            f"{image[0]}×{image[1]}; choose another size or place"
        )
    return Rectangle(top, left, height, width)


def check_size(size: Size) -> tuple[float | int, float | int]:
    """A share or pixels for both sides, or one for each."""
    pair = tuple(size) if isinstance(size, Sequence) and not isinstance(size, str) else (size, size)
    if len(pair) != 2 or not all(_is_size(one) for one in pair):
        raise UserError(
            "size of the occlusion must be a share of the side (a float from 0 to 1) or whole pixels (an int from 1 on), "
            f"or two of them for height and width, but came as {size!r}"
        )
    return pair[0], pair[1]


def check_place(place: Place) -> tuple[int, int] | None:
    """The row and column of the upper left pixel; nothing for the centre."""
    if isinstance(place, str):
        if place == CENTRE:
            return None
    elif isinstance(place, Sequence) and len(place) == 2 and all(_is_pixel(one) for one in place):
        return int(place[0]), int(place[1])
    raise UserError(
        f'place of the occlusion must be "centre", or row and column of its upper left pixel, not {place!r}'
    )


def _is_pixel(given: object) -> bool:
    return isinstance(given, Integral) and not isinstance(given, bool) and int(given) >= 0


def _is_size(given: object) -> bool:
    if isinstance(given, bool) or not isinstance(given, Real):
        return False
    return int(given) >= 1 if isinstance(given, Integral) else 0 <= float(given) <= 1


def _pixels(given: float | int, side: int) -> int:
    return int(given) if isinstance(given, Integral) else round(float(given) * side)
