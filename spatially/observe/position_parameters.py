"""The parameters that hold positions, by name: what a measurement that moves weights leaves in its place."""

import re

from torch import nn

from spatially.errors import UserError
from spatially.nn.gaussian_bias import GaussianBias
from spatially.nn.relative_position import RelPosBias, RelPosMlp
from spatially.surgery.hosts import find
from spatially.surgery.hosts.base import Host

# Embeddings; relative tables and networks, with the names that timm, torchvision and Hugging Face give them; rotations.
PATTERN = re.compile(
    r"(^|\.)(\w*pos(ition(al)?)?_?(emb|enc)\w*|\w*rel(ative)?_?pos\w*|position_table|attention_biases|cpb_mlp"
    r"|continuous_position_bias\w*|meta_mlp|rope\w*|rotary\w*|(\w+_)?pos(_proj)?)(\.|$)"
)
KINDS = (GaussianBias, RelPosBias, RelPosMlp)


def position_parameters(model: nn.Module) -> set[str]:
    """Names among ``model.named_parameters()``: those that surgery knows, those of our own biases, and by their names.

    >>> import timm
    >>> position_parameters(timm.create_model("vit_tiny_patch16_224"))
    {'pos_embed'}
    """
    known = {id(parameter) for host in find(model) for parameter in _known(host)}
    known |= {id(one) for module in model.modules() if isinstance(module, KINDS) for one in module.parameters()}
    return {name for name, one in model.named_parameters() if id(one) in known or PATTERN.search(name)}


def _known(host: Host) -> list[nn.Parameter]:
    try:
        return [parameter for position in host.positions() for parameter in position.parameters]
    except UserError:  # a relative of a network that can be changed, such as torchvision's Swin V2
        return []
