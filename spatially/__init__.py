"""Does a vision model see spatial structure, or a bag of patches?

>>> import spatially
>>> subject = spatially.load("rigid_template")
>>> images = spatially.open_images("shapes", subject, limit=120)
>>> curves = spatially.probes.Sensitivity(blocks=[16], ratios=[0, 1]).run(subject, images)
>>> bool(curves.structure_reliance.sel(block=16) > 0.9)
True
"""

from spatially import models, nn, observe, perturb, probes, surgery
from spatially.data import open_images
from spatially.subject import Subject, load
from spatially.version import __version__

__all__ = ["Subject", "__version__", "load", "models", "nn", "observe", "open_images", "perturb", "probes", "surgery"]
