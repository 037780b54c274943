"""An exponential moving average of the weights, timm's: θ̄ ← d·θ̄ + (1 − d)·θ after every step of the optimiser."""

from timm.utils import ModelEmaV3
from torch import nn

from spatially.train.recipe import Recipe


def build_average(model: nn.Module, recipe: Recipe) -> ModelEmaV3 | None:
    """A copy of the model that follows it, where the recipe asks for one; the first step is taken over as it is."""
    decay = recipe.regularisation.ema
    return None if decay is None else ModelEmaV3(model, decay=decay)
