"""Image in, image out: batched, on the device, and the same bits for every batch size, process and device."""

from spatially.perturb.augment import augment, mix, training_batch
from spatially.perturb.background import replace_background
from spatially.perturb.blocks import Blocks, draw_blocks, mask_blocks, shuffle_blocks
from spatially.perturb.fgsm import fgsm
from spatially.perturb.frequency import add_frequency_noise
from spatially.perturb.occlusion import occlude
from spatially.perturb.paste import paste

__all__ = [
    "Blocks",
    "add_frequency_noise",
    "augment",
    "draw_blocks",
    "fgsm",
    "mask_blocks",
    "mix",
    "occlude",
    "paste",
    "replace_background",
    "shuffle_blocks",
    "training_batch",
]
