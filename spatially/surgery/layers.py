"""What the operations on Swin's windows share."""

from torch import nn

from spatially.errors import UserError
from spatially.subject import Subject
from spatially.surgery.change import Edits, module_of
from spatially.surgery.hosts import KINDS, WindowLayer, find


def find_windows(given: nn.Module | Subject, operation: str) -> list[tuple[nn.Module, WindowLayer]]:
    """Every attention layer with windows, and the network it belongs to; an error if there is none."""
    model = module_of(given)
    layers = [(host.trunk, layer) for host in find(model) for layer in host.window_layers()]
    if not layers:
        raise UserError(f"{operation} needs windows of attention: Swin of {KINDS} has them, {type(model).__name__} not")
    return layers


def take_kinds(edits: Edits, layer: WindowLayer) -> None:
    """Make the layer's modules what can be changed."""
    for module, kind in layer.kinds.items():
        if type(module) is not kind:
            edits.set_class(module, kind)


def drop_table(edits: Edits, layer: WindowLayer) -> None:
    """Take the position table out, if it is there."""
    if layer.table is not None:
        edits.drop_parameter(layer.table_owner, "relative_position_bias_table", beside=layer.attention)
