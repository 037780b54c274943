"""Crops on their way to a GPU: by way of page-locked memory, and kept there once they are asked for again and fit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from spatially.data.images import Images

SHARE = 0.25  # of the free memory that crops may take
STEP = 4096  # images uploaded at a time


@dataclass
class _Held:
    """How many images a device was asked for, and all of them once they are there."""

    asked: int = 0
    pixels: Tensor | None = None
    fit: bool = True


_HELD: WeakKeyDictionary[Images, dict[torch.device, _Held]] = WeakKeyDictionary()


def pixels_on(images: Images, rows: NDArray[np.int64], device: torch.device) -> Tensor:
    """The crops of some rows, (B, 3, H, W) bytes, on a CUDA device."""
    held = _HELD.setdefault(images, {}).setdefault(device, _Held())
    if (
        held.pixels is None and held.fit and held.asked >= len(images)
    ):  # every image was there once: this is another round
        held.fit = images.pixels.nbytes <= SHARE * torch.cuda.mem_get_info(device)[0]
        if held.fit:
            held.pixels = _upload(images.pixels, device)
    if held.pixels is not None:
        return held.pixels[sent(rows, device)]
    held.asked += len(rows)
    return gather(images.pixels, rows, locked=True).to(device, non_blocking=True)


def sent(numbers: NDArray[Any], device: torch.device) -> Tensor:
    """An array on a device. Nobody waits for what a GPU has to do before."""
    here = torch.from_numpy(np.ascontiguousarray(numbers))
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here.to(device)


def gather(pixels: NDArray[Any], rows: NDArray[np.int64], *, locked: bool) -> Tensor:
    """Some rows of an array, which may lie on disk, read straight into page-locked memory."""
    taken = torch.empty((len(rows), *pixels.shape[1:]), dtype=torch.uint8, pin_memory=locked)
    np.take(pixels, rows, axis=0, out=taken.numpy(), mode="wrap")
    return taken


def _upload(pixels: NDArray[np.uint8], device: torch.device) -> Tensor:
    whole = torch.empty(pixels.shape, dtype=torch.uint8, device=device)
    for first in range(0, len(pixels), STEP):
        rows = np.arange(first, min(first + STEP, len(pixels)))
        whole[first : first + len(rows)] = gather(pixels, rows, locked=True).to(device, non_blocking=True)
    return whole
