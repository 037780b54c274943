"""Looking inside a model while it runs, without changing it."""

from spatially.observe.attention import Layer, Weights, attention
from spatially.observe.feature_map import feature_map
from spatially.observe.position import Position
from spatially.observe.positions import positions
from spatially.observe.stream import Place, stream

__all__ = ["Layer", "Place", "Position", "Weights", "attention", "feature_map", "positions", "stream"]
