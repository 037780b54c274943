r"""A trained Swin whose receptive fields are regular: Swin-T_r with its weights kept (Xu et al., section 5.2).

Every attention layer sees the square centred on its query, everywhere the same,

.. math:: o_n = \sum_{s \in \{-\lfloor w/2 \rfloor, …, \lfloor w/2 \rfloor\}^2}
                \mathrm{softmax}_s\left(\frac{q_n \cdot k_{n+s}}{\sqrt{D}}\right) v_{n+s},

instead of its window: no windows, no shift, and no position table unless it is kept, for the offsets in the square.
After `convolve_projection(swin, "key")` it is Swin-T_m.
"""

from torch import nn

from spatially.errors import UserError, unknown
from spatially.nn.check import flag, odd
from spatially.nn.regular_attention import BORDERS
from spatially.subject import Subject
from spatially.surgery.change import Change, Edits
from spatially.surgery.hosts import WindowLayer
from spatially.surgery.layers import drop_table, find_windows, take_kinds

OPERATION = "regularise_receptive_field"


def regularise_receptive_field(
    swin: nn.Module | Subject, *, window: int | None = None, border: str = "mask", keep_table: bool = False
) -> Change:
    """Let every attention layer see the centred square, in place, its weights kept.

    Args:
        swin: Swin of timm, Hugging Face, torchvision or spatially, or anything that holds one.
        window: side of the square, odd; the network's own window (the largest of its layers) when not given.
        border: ``mask`` (positions outside the image take no part), ``zero`` (they enter as key 0 and value 0) or
            ``shift`` (the square slides inward).
        keep_table: keep the position tables, of which the offsets within the square remain in use.
    """
    if border not in BORDERS:
        raise unknown("border", str(border), BORDERS)
    window = None if window is None else odd("window", window)
    flag("keep_table", keep_table)
    layers = find_windows(swin, OPERATION)
    if window is None:
        window = max(max(layer.window) for _, layer in layers)
        if window % 2 == 0:
            raise UserError(f"window must be given, odd: the network's own is {window}")
    for _, layer in layers:
        _check(layer, window, border, keep_table)
    fresh = [(trunk, layer) for trunk, layer in layers if layer.square is None]
    with Edits() as edits:
        for _, layer in fresh:
            take_kinds(edits, layer)
            edits.set_attribute(layer.block, "receptive_field", (window, border))
            if not keep_table:
                drop_table(edits, layer)
    changed = [layer.name for _, layer in fresh]
    return Change(swin, OPERATION, edits=edits, changed=changed, trunks=dict.fromkeys(trunk for trunk, _ in fresh))


def _check(layer: WindowLayer, window: int, border: str, keep_table: bool) -> None:
    if layer.square and (layer.square != (window, border) or (layer.table is not None and not keep_table)):
        side, present = layer.square
        raise UserError(
            f"{layer.name} is regular already, with window={side}, border={present!r}, "
            f"keep_table={layer.table is not None}: undo that first"
        )
    if layer.attention_dropout:
        raise UserError(
            f"{layer.name} drops attention with probability {layer.attention_dropout}: regular attention has no dropout"
        )
    has_gaussian = getattr(layer.table_owner, "gaussian_bias", None) is not None
    if border == "shift" and (keep_table or has_gaussian):
        raise UserError("border='shift' moves squares off their queries: there a bias of offsets has no place")
    if keep_table and layer.table is None:
        raise UserError(f"keep_table=True: {layer.name} has no position table to keep")
    if keep_table and window // 2 >= min(layer.window):
        raise UserError(
            f"keep_table needs offsets up to {window // 2}: the table of {layer.name} ends at {min(layer.window) - 1}"
        )
