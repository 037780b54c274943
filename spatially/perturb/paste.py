"""A clean guest in the centre of a shuffled host (Xu, figure 2).

Every k×k block of the host is shuffled, and a clean image of another class, resized to a share of the side, is laid over
its centre. A model that reads structure should name the guest; a bag of patches counts, and names the host.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from spatially.errors import UserError
from spatially.perturb.blocks import shuffle_blocks
from spatially.perturb.check import check_images

# Fixed point of the resize: pixels in units of 2⁻¹⁶, weights in units of 2⁻¹⁴. A product of two weights and a pixel sums
# to at most 2⁴⁴, exact in float64 whatever the order of summation.
_PIXEL, _WEIGHT = 1 << 16, 1 << 14


def paste(
    host: Tensor,
    guest: Tensor,
    *,
    block: int = 16,
    index: Tensor | Sequence[int],
    seed: int = 0,
    scale: float = 0.5,
) -> Tensor:
    """Shuffle every block of ``host`` and lay ``guest``, resized to ``scale`` of the side, over its centre.

    ``index`` holds the hosts' numbers, which fix the shuffling.
    """
    check_images(host, name="host")
    check_images(guest, name="guest")
    if host.shape[:2] != guest.shape[:2]:
        raise UserError(
            f"host and guest must match in batch and channels, but came as {(*host.shape,)}, {(*guest.shape,)}"
        )
    if not 0 < scale <= 1:
        raise UserError(f"scale must lie above 0 and at most at 1, but came as {scale!r}")
    height, width = host.shape[2:]
    size = max(1, round(height * scale)), max(1, round(width * scale))
    top, left = (height - size[0]) // 2, (width - size[1]) // 2
    pasted = shuffle_blocks(host, block=block, ratio=1.0, index=index, seed=seed)
    pasted[:, :, top : top + size[0], left : left + size[1]] = resize_exactly(guest, size)
    return pasted


def resize_exactly(images: Tensor, size: tuple[int, int]) -> Tensor:
    """Bilinear resize with antialiasing, the same bits on every device.

    >>> resize_exactly(torch.full((1, 1, 8, 8), 0.25), (4, 4)).unique().tolist()
    [0.25]
    """
    levels = (images.double() * _PIXEL).round()
    rows = _weights(images.shape[2], size[0]).to(images.device)
    columns = _weights(images.shape[3], size[1]).to(images.device)
    return (rows @ levels @ columns.T / (_PIXEL * _WEIGHT**2)).to(images.dtype)


def _weights(before: int, after: int) -> Tensor:
    """Whole-numbered triangle-filter weights ``(after, before)``, each row summing to 2¹⁴ exactly."""
    step = before / after
    centres = (torch.arange(after, dtype=torch.float64)[:, None] + 0.5) * step - 0.5
    distance = (torch.arange(before, dtype=torch.float64) - centres).abs() / max(step, 1.0)
    weights = (1 - distance).clamp(min=0)
    whole = (weights / weights.sum(dim=1, keepdim=True) * _WEIGHT).round()
    largest = whole.argmax(dim=1, keepdim=True)
    return whole.scatter_add(1, largest, _WEIGHT - whole.sum(dim=1, keepdim=True))
