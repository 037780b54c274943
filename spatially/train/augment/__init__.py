"""Training images made on the device, a whole batch at a time: crops, colours, RandAugment, erasing, mixup and CutMix."""

from spatially.train.augment.pipeline import Augment, Finish

__all__ = ["Augment", "Finish"]
