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
        raise UserError(
            f"{operation} needs windows of attention: Swin (its first version) of {KINDS} has them, "
            f"{type(model).__name__} not"
        )
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
        edits.add_check(lambda: _check_window(layer))


def _check_window(layer: WindowLayer) -> None:
    now = tuple(layer.table_owner.window_size)  # type: ignore[arg-type]
    if now != tuple(layer.window):
        raise UserError(
            f"{layer.name} was resized after the change, from windows of {layer.window[0]}×{layer.window[1]} to "
            f"{now[0]}×{now[1]}, for which its table was not made: set them back first, as timm's set_input_size does"
        )
