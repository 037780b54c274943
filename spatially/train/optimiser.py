"""timm's optimisers, with weight decay for matrices and kernels alone.

What has one dimension (norms, biases), what a model names in `no_weight_decay()`, and whatever holds positions (embeddings,
relative tables and networks, Gaussian biases) is not decayed.
"""

from typing import Any

import torch
from timm.optim import create_optimizer_v2, param_groups_weight_decay
from torch import nn

from spatially.observe.position_parameters import position_parameters
from spatially.train.adamp import AdamP
from spatially.train.recipe import Recipe


def build_optimiser(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The recipe's optimiser over the weights that want gradients, at its rate for the recipe's batch."""
    wanted = recipe.optimiser
    groups = param_groups_weight_decay(
        model, weight_decay=wanted.weight_decay, no_weight_decay_list=sorted(undecayed(model))
    )
    options: dict[str, Any] = {"lr": recipe.learning_rate, "weight_decay": 0.0}
    if wanted.name == "adamp":
        # timm's own options for it, under which PiT was trained
        return AdamP(groups, betas=wanted.betas, eps=wanted.eps, wd_ratio=0.01, nesterov=True, **options)
    if all(parameter.is_cuda for group in groups for parameter in group["params"]):
        options["fused"] = True
    if wanted.name == "sgd":
        # timm's "sgd" is Nesterov's; the plain one it calls "momentum"
        name = "sgd" if wanted.nesterov else "momentum"
        return create_optimizer_v2(groups, opt=name, momentum=wanted.momentum, **options)
    return create_optimizer_v2(groups, opt=wanted.name, betas=wanted.betas, eps=wanted.eps, **options)


def undecayed(model: nn.Module) -> set[str]:
    """Names of the parameters that are not decayed whatever their shape."""
    own: Any = getattr(model, "no_weight_decay", set)
    return set(own()) | position_parameters(model)
