"""Positions forgotten: embeddings and relative biases as before training (Kim et al., section 3, figure 4).

Absolute embeddings are redrawn from their own initialiser, or set to zero as the authors' code does; relative tables and
networks likewise are redrawn. Nothing else changes, the class token included.
"""

from contextlib import nullcontext
from numbers import Integral
from typing import Any, Literal

import torch
from torch import nn

from spatially.errors import UserError
from spatially.nn.check import flag
from spatially.subject import Subject
from spatially.surgery.change import Change, Edits, module_of, options_in_force
from spatially.surgery.hosts import SUPPORTED, Position, find

OPERATION = "reset_positions"

Way = tuple[Any, int | None]  # absolute or relative as it was given, and the seed


def reset_positions(
    model: nn.Module | Subject,
    *,
    absolute: bool | Literal["zero"] = True,
    relative: bool = True,
    seed: int | None = None,
) -> Change:
    """Put position embeddings and relative biases back to the start, in place.

    Until it is undone a reset stays in force, whatever training or loading does to the numbers: the same call again
    changes nothing, and another seed or another way for the same positions is a `UserError`.

    Args:
        model: ViT or Swin of timm, Hugging Face, torchvision or spatially, DeiT or BEiT of timm or Hugging Face, ViT with
            relative positions or PiT of timm or spatially, or anything that holds one.
        absolute: True redraws absolute embeddings, "zero" sets them to 0 (the authors' code), False leaves them.
        relative: whether relative tables and networks are redrawn.
        seed: makes the draw reproducible, the same on every device; without it torch's own generator is used.
    """
    if absolute not in (True, False, "zero"):
        raise UserError(f"absolute must be True, False or 'zero': got {absolute!r}")
    flag("relative", relative)
    if seed is not None and (isinstance(seed, bool) or not isinstance(seed, Integral)):
        raise UserError(f"seed must be a whole number or None: got {seed!r}")
    whole = module_of(model)
    hosts = find(whole)
    wanted = [
        (host.trunk, position)
        for host in hosts
        for position in host.positions()
        if (absolute if position.kind == "absolute" else relative)
    ]
    if not wanted:
        raise UserError(_nothing(whole, any(host.positions() for host in hosts)))
    how: dict[str, Way] = {"absolute": (absolute, seed), "relative": (relative, seed)}
    ways: dict[str, Way] = {kind: how[kind] for kind in dict.fromkeys(position.kind for _, position in wanted)}
    fresh = [(trunk, position) for trunk, position in wanted if not _is_so(whole, position, ways[position.kind])]
    with Edits() as edits, nullcontext() if seed is None else torch.random.fork_rng(devices=[]):
        if seed is not None:
            torch.manual_seed(int(seed))
        for _, position in fresh:
            _reset(edits, whole, position, zero=absolute == "zero" and position.kind == "absolute")
    changed = [name for _, position in fresh for name in position.names]
    trunks = dict.fromkeys(trunk for trunk, _ in fresh)
    return Change(model, OPERATION, edits=edits, changed=changed, trunks=trunks, options=ways)


def _is_so(whole: nn.Module, position: Position, way: Way) -> bool:
    name = position.names[0]
    present: list[Way] = [
        options[position.kind]
        for options in options_in_force(_owner(whole, name)[0], OPERATION)
        if position.kind in options
    ]
    if present and present[-1] != way:
        (value, seed), kind = present[-1], position.kind
        raise UserError(f"{name} was reset already, with {kind}={value!r}, seed={seed}: undo that first")
    return bool(present)


def _reset(edits: Edits, whole: nn.Module, position: Position, *, zero: bool) -> None:
    values = [torch.zeros(()) for _ in position.parameters] if zero else position.fresh()
    for name, parameter, fresh in zip(position.names, position.parameters, values, strict=True):
        edits.set_values(*_owner(whole, name), fresh.expand(parameter.shape))


def _owner(whole: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own = name.rpartition(".")
    return whole.get_submodule(path), own


def _nothing(model: nn.Module, others: bool) -> str:
    if others:
        return "there is nothing to reset: absolute and relative leave out every position this network has"
    return (
        f"{type(model).__name__} has no positions to reset: known are learned embeddings and relative biases of "
        f"{SUPPORTED}; rotary and fixed positions have nothing to redraw"
    )
