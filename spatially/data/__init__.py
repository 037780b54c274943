"""Where images come from: decoded once, to crops that every probe shares."""

from spatially.data.images import Images, Skipped
from spatially.data.open import open_images
from spatially.data.shapes import Shapes

__all__ = ["Images", "Shapes", "Skipped", "open_images"]
