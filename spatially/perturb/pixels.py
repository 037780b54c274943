"""Pixels as bytes or as values in 0..1."""

import torch
from torch import Tensor


def as_float(images: Tensor) -> Tensor:
    """Bytes as float32 values in 0..1; floats as they are.

    >>> as_float(torch.tensor([0, 51, 255], dtype=torch.uint8))
    tensor([0.0000, 0.2000, 1.0000])
    """
    return images.to(torch.float32).div_(255) if images.dtype == torch.uint8 else images
