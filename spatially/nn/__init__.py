"""Layers that see structure, one a file, each usable alone in anybody's model."""

from spatially.nn.conv_projection import ConvProjection
from spatially.nn.gaussian_bias import GaussianBias
from spatially.nn.local_window_attention import LocalWindowAttention
from spatially.nn.regular_attention import packed_regular_attention, regular_attention
from spatially.nn.regular_self_attention import RegularSelfAttention
from spatially.nn.relative_position import RelPosBias, RelPosMlp
from spatially.nn.token_pool import TokenPool
from spatially.nn.window_attention import WindowAttention

__all__ = [
    "ConvProjection",
    "GaussianBias",
    "LocalWindowAttention",
    "RegularSelfAttention",
    "RelPosBias",
    "RelPosMlp",
    "TokenPool",
    "WindowAttention",
    "packed_regular_attention",
    "regular_attention",
]
