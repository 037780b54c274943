"""Models of this library; importing it registers them with timm."""

from spatially.models.calibrators import BagOfPatches, RigidTemplate

# What `spatially models` lists first, with what each is for.
NAMES = {
    "bag_of_patches": "calibrator: names the parts it sees, blind to where they are; structure reliance 0 at its patch grid",
    "rigid_template": "calibrator: every part in its place or no match at all; structure reliance 1",
}

__all__ = ["NAMES", "BagOfPatches", "RigidTemplate"]
