"""Image in, image out: batched, on the device, and the same bits for every batch size, process and device."""

from spatially.perturb.blocks import Blocks, draw_blocks, mask_blocks, shuffle_blocks
from spatially.perturb.paste import paste

__all__ = ["Blocks", "draw_blocks", "mask_blocks", "paste", "shuffle_blocks"]
