"""Layers that see structure, one a file, each usable alone in anybody's model."""

from spatially.nn.gaussian_bias import GaussianBias
from spatially.nn.regular_attention import regular_attention

__all__ = ["GaussianBias", "regular_attention"]
