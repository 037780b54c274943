"""Query-centred local attention: the definition, a tiled path that runs anywhere, and the function that chooses."""

from spatially.nn.regular_attention.dispatch import BACKENDS, packed_regular_attention, regular_attention
from spatially.nn.regular_attention.field import BORDERS

__all__ = ["BACKENDS", "BORDERS", "packed_regular_attention", "regular_attention"]
