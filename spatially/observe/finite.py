"""Which layer a model's NaN comes from."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.subject import Subject


def first_not_finite(subject: Subject, images: Tensor) -> str | None:
    """The path of the first module, as they run, whose output is not finite; None if all are.

    Modules that contain others are named only when nothing inside them is to blame.
    """
    found: list[str] = []
    names = {module: name for name, module in subject.model.named_modules()}

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        if not found and any(not bool(torch.isfinite(tensor).all()) for tensor in _floats(output)):
            found.append(names[module] or "the model itself")

    handles = [module.register_forward_hook(look) for module in names]
    try:
        with torch.no_grad():
            subject(images)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else None


def not_finite(subject: Subject, images: Tensor, what: str) -> UserError:
    """The error for a measurement that came out as NaN or infinite, naming the layer where it began."""
    layer = first_not_finite(subject, images)
    half = subject.dtype in (torch.bfloat16, torch.float16)
    advice = "try --dtype float32" if half else "look at its weights"
    where = f"the output of {layer} is not finite" if layer else "its outputs are finite, its gradients are not"
    return UserError(f"{what} of {subject.name} is not finite: {where}; {advice}")


def _floats(output: Any) -> list[Tensor]:
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    if isinstance(output, Mapping):
        output = list(output.values())
    return [tensor for part in output for tensor in _floats(part)] if isinstance(output, (list, tuple)) else []
