"""Does a vision model see spatial structure, or a bag of patches?"""

from spatially.version import __version__

__all__ = ["__version__"]
