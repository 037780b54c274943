"""Changes to a network that is loaded already, one an operation, its weights kept.

Every operation works in place and returns a `Change` that names what changed and can `undo` it, bit for bit. Done twice
it is done once; on a network that has nothing to change it is a `UserError`. Operations compose.
"""

from spatially.surgery.change import Change
from spatially.surgery.convolve import convolve_projection
from spatially.surgery.gaussian import add_gaussian_bias
from spatially.surgery.positions import reset_positions
from spatially.surgery.regularise import regularise_receptive_field

__all__ = [
    "Change",
    "add_gaussian_bias",
    "convolve_projection",
    "regularise_receptive_field",
    "reset_positions",
]
