"""Checks that every perturbation makes of what it is given."""

from collections.abc import Sequence
from numbers import Real

import torch
from torch import Tensor

from spatially.errors import UserError


def check_images(images: Tensor, *, name: str = "images") -> None:
    """Float images ``(B, C, H, W)``."""
    if not isinstance(images, Tensor) or images.ndim != 4 or not images.is_floating_point():
        came = f"{images.dtype} {tuple(images.shape)}" if isinstance(images, Tensor) else type(images).__name__
        raise UserError(f"{name} must be a float tensor (B, C, H, W) with values 0..1, but came as {came}")


def check_block(block: int, *, height: int | None = None, width: int | None = None) -> int:
    """A block size of at least one pixel that fits into the image."""
    if isinstance(block, bool) or not isinstance(block, Real) or not block >= 1 or block % 1:
        raise UserError(f"block must be a whole number of pixels of at least 1, but came as {block!r}")
    if height is not None and width is not None and block > min(height, width):
        raise UserError(
            f"block {block} does not fit into an image of {height}×{width} pixels; choose at most {min(height, width)}"
        )
    return int(block)


def check_ratio(ratio: float) -> float:
    """A ratio of blocks from 0 to 1."""
    if isinstance(ratio, bool) or not isinstance(ratio, Real) or not 0 <= ratio <= 1:
        raise UserError(f"ratio must lie in 0..1, but came as {ratio!r}")
    return float(ratio)


def check_index(index: Tensor | Sequence[int], *, count: int, device: torch.device) -> Tensor:
    """The images' numbers as int64 ``(B,)`` on the images' device."""
    numbers = torch.as_tensor(index, device=device)
    if numbers.is_floating_point() or numbers.dtype == torch.bool or numbers.shape != (count,):
        raise UserError(f"index must hold one whole number for each of the {count} images, but came as {index!r}")
    return numbers.to(torch.int64)
