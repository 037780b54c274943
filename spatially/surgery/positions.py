"""Positions forgotten: embeddings and relative biases as before training (Kim et al., section 3, figure 4).

Absolute embeddings are redrawn from their own initialiser, or set to zero as the authors' code does; relative tables and
networks likewise are redrawn. Nothing else changes, the class token included.
"""

from contextlib import nullcontext
from typing import Literal

import torch
from torch import nn

from spatially.errors import UserError
from spatially.subject import Subject
from spatially.surgery.change import Change, Edits, module_of
from spatially.surgery.hosts import KINDS, Position, find

OPERATION = "reset_positions"


def reset_positions(
    model: nn.Module | Subject,
    *,
    absolute: bool | Literal["zero"] = True,
    relative: bool = True,
    seed: int | None = None,
) -> Change:
    """Put position embeddings and relative biases back to the start, in place.

    Args:
        model: ViT, DeiT, BEiT or Swin of timm, Hugging Face, torchvision or spatially, or anything that holds one.
        absolute: True redraws absolute embeddings, "zero" sets them to 0 (the authors' code), False leaves them.
        relative: whether relative tables and networks are redrawn.
        seed: makes the draw reproducible, the same on every device; without it torch's own generator is used.
    """
    if absolute not in (True, False, "zero"):
        raise UserError(f"absolute must be True, False or 'zero': got {absolute!r}")
    hosts = find(module_of(model))
    wanted = [
        (host.trunk, position)
        for host in hosts
        for position in host.positions()
        if (absolute if position.kind == "absolute" else relative)
    ]
    if not wanted:
        raise UserError(_nothing(module_of(model), any(host.positions() for host in hosts)))
    with Edits() as edits, nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(seed)
        for _, position in wanted:
            _reset(edits, position, zero=absolute == "zero" and position.kind == "absolute")
    changed = [name for _, position in wanted for name in position.names]
    return Change(model, OPERATION, edits=edits, changed=changed, trunks=dict.fromkeys(trunk for trunk, _ in wanted))


def _reset(edits: Edits, position: Position, *, zero: bool) -> None:
    values = [torch.zeros(()) for _ in position.parameters] if zero else position.fresh()
    for parameter, fresh in zip(position.parameters, values, strict=True):
        edits.set_values(parameter, fresh.expand(parameter.shape))


def _nothing(model: nn.Module, others: bool) -> str:
    if others:
        return "there is nothing to reset: absolute and relative leave out every position this network has"
    return (
        f"{type(model).__name__} has no positions to reset: learned embeddings and relative biases of ViT, DeiT, BEiT and "
        f"Swin of {KINDS} are known; rotary and fixed positions have nothing to redraw"
    )
