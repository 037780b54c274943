"""Training: the papers' recipes, the loop, and the data they run on."""

from spatially.train.library import read_recipe, recipe_names
from spatially.train.recipe import Recipe

__all__ = ["Recipe", "read_recipe", "recipe_names", "train"]


def __getattr__(name: str) -> object:
    if name == "train":  # imports the loop only when something is trained
        from spatially.train.training import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
