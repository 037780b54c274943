"""Models of this library; importing it registers them with timm."""

from spatially.models import alternet, conv_vit, pit, pooled_vit, resnet, swin, vit
from spatially.models.calibrators import BagOfPatches, RigidTemplate
from spatially.models.registry import CARDS, PAPERS, Card

# Calibrators have no paper and no fixed size; what each is for.
CALIBRATORS = {
    "bag_of_patches": "calibrator: names the parts it sees, blind to where they are; structure reliance 0 at its patch grid",
    "rigid_template": "calibrator: every part in its place or no match at all; structure reliance 1",
}

__all__ = [
    "CALIBRATORS",
    "CARDS",
    "PAPERS",
    "BagOfPatches",
    "Card",
    "RigidTemplate",
    "alternet",
    "conv_vit",
    "pit",
    "pooled_vit",
    "resnet",
    "swin",
    "vit",
]
