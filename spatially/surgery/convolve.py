r"""One of a trained Swin's projections as a convolution: Swin-T_key, _query, _value with weights kept (Xu et al., section 5.1).

.. math:: key_{i,j} = b + \sum_{p,q} K_{p,q} f_{i+p,\,j+q}, \qquad K_{0,0} = W_{key},\quad K_{p,q} = 0 \text{ elsewhere},

over the whole map, before windows are cut. The kernel starts as the trained projection in its centre, so the network
answers as before until it is trained on.
"""

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatially.errors import UserError, unknown
from spatially.nn.check import flag, odd
from spatially.nn.conv_projection import PARTS, ConvProjection
from spatially.subject import Subject
from spatially.surgery.change import Change, Edits
from spatially.surgery.hosts import WindowLayer
from spatially.surgery.layers import drop_table, find_windows, take_kinds

OPERATION = "convolve_projection"


def convolve_projection(
    swin: nn.Module | Subject,
    which: Literal["query", "key", "value"] = "key",
    *,
    kernel_size: int = 3,
    keep_table: bool = True,
) -> Change:
    """Make one projection of every attention layer a convolution, in place; it starts by computing the same.

    Args:
        swin: Swin of timm, Hugging Face, torchvision or spatially, or anything that holds one.
        which: the projection: query, key or value.
        kernel_size: side of the kernel, odd.
        keep_table: False drops the position tables, as the paper's networks have none; answers change then.
    """
    if which not in PARTS:
        raise unknown("projection", str(which), PARTS)
    kernel_size = odd("kernel_size", kernel_size)
    flag("keep_table", keep_table)
    layers = find_windows(swin, OPERATION)
    fresh = [(trunk, layer) for trunk, layer in layers if not _is_so(layer, which, kernel_size, keep_table)]
    projections = [_convolved(layer, which, kernel_size) for _, layer in fresh]
    with Edits() as edits:
        for (_, layer), projection in zip(fresh, projections, strict=True):
            take_kinds(edits, layer)
            for name, placeholder in layer.placeholders.items():
                edits.set_module(layer.attention, name, placeholder)
            edits.set_module(layer.attention, "qkv", projection)
            if not keep_table:
                drop_table(edits, layer)
    changed = [layer.name for _, layer in fresh]
    return Change(swin, OPERATION, edits=edits, changed=changed, trunks=dict.fromkeys(trunk for trunk, _ in fresh))


def _is_so(layer: WindowLayer, which: str, kernel_size: int, keep_table: bool) -> bool:
    present = getattr(layer.attention, "qkv", None)
    if not isinstance(present, ConvProjection):
        return False
    side = present.convolution.kernel_size[0]
    if (present.convolved, side) != (which, kernel_size) or present.depthwise:
        raise UserError(
            f"{layer.name} has a {side}×{side} convolution for its {present.convolved} already: "
            f"undo that before a {kernel_size}×{kernel_size} one for the {which}"
        )
    if not keep_table and layer.table is not None:
        raise UserError(f"{layer.name} has this convolution and its table already: undo that before keep_table=False")
    return True


def _convolved(layer: WindowLayer, which: str, kernel_size: int) -> ConvProjection:
    """The layer's projections, that one in the centre of a convolution."""
    linears: list[Any] = [layer.attention.get_submodule(name) for name in layer.linears]
    weight = torch.cat([linear.weight for linear in linears]).detach()
    biases = [linear.bias for linear in linears]
    dim = weight.shape[1]
    if len(weight) != 3 * dim:
        raise UserError(
            f"{layer.name} projects {dim} channels to {len(weight) // 3}: convolve_projection needs as many"
        )
    has_bias = biases[0] is not None
    projection = ConvProjection(
        dim,
        convolved=which,  # type: ignore[arg-type]
        kernel_size=kernel_size,
        bias=has_bias,
        device=weight.device,
        dtype=weight.dtype,
    )
    with torch.no_grad():
        centre, others = _split(weight, which)
        projection.convolution.weight.copy_(F.pad(centre[:, :, None, None], (kernel_size // 2,) * 4))
        projection.linear.weight.copy_(others)
        if has_bias:
            centre, others = _split(torch.cat(biases), which)
            projection.convolution.bias.copy_(centre)  # type: ignore[union-attr]
            projection.linear.bias.copy_(others)
    return projection


def _split(packed: Tensor, which: str) -> tuple[Tensor, Tensor]:
    """Rows of query, key and value: those of the one, and those of the other two."""
    parts = dict(zip(PARTS, packed.chunk(3), strict=True))
    one = parts.pop(which)
    return one, torch.cat(list(parts.values()))
