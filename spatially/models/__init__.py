"""Models of this library; importing it registers them with timm."""

from spatially.models.calibrators import BagOfPatches, RigidTemplate

__all__ = ["BagOfPatches", "RigidTemplate"]
