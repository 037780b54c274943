"""Parameters and multiplications of every registered model at 224×224, as `spatially models` lists them.

They are counted on meta tensors, without computing anything, and kept in `costs.json`, since counting all takes a minute.
A multiplication with its addition counts once (GMACs, as the papers have it). Activations are the numbers that convolutions,
linear layers and the products of attention put out (fvcore and timm count them so). Write the file anew with

    python -m spatially.models.costs
"""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from itertools import chain
from typing import Any, NamedTuple

import timm
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

SIDE = 224

_ATEN = torch.ops.aten
_PRODUCTS = {
    *(_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.baddbmm, _ATEN._scaled_mm),
    *(_ATEN.convolution, _ATEN._convolution, _ATEN.cudnn_convolution, _ATEN.convolution_overrideable),
}


@dataclass(frozen=True)
class Cost:
    """Number of parameters, and multiply-accumulate operations of one image."""

    parameters: int
    macs: int


def count(name: str, *, side: int = SIDE, **options: object) -> Cost:
    """Count a model that timm can create."""
    with torch.device("meta"):
        model = timm.create_model(name, **options).eval().requires_grad_(False)
        image = torch.empty(1, 3, side, side)
    return Cost(sum(parameter.numel() for parameter in model.parameters()), count_pass(model, image).macs)


class Pass(NamedTuple):
    """What one forward pass multiplies and adds, and how many numbers its convolutions and matrix products put out."""

    macs: int
    activations: int


def count_model(model: nn.Module, size: tuple[int, int]) -> Pass:
    """Count one image of a model that exists, on meta tensors in the place of its weights.

    A model that cannot compute without values, or that keeps tensors where nobody finds them, takes a black image. Of one
    spread over devices (``DataParallel``) what it spreads is counted.
    """
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        model = model.module
    # Detached: a view of a parameter wants a gradient even under no_grad, and the counter's hooks stumble over it.
    own = {name: tensor.detach() for name, tensor in chain(model.named_parameters(), model.named_buffers())}
    weights = {name: tensor.to("meta") for name, tensor in own.items()}
    try:
        with torch.device("meta"):
            return count_pass(partial(functional_call, model, weights), torch.empty(1, 3, *size))
    except Exception:  # whatever the model's own code answers to tensors without values
        # Its numbers may be whole (a table of counts); images are not.
        like = next((tensor for tensor in own.values() if tensor.is_floating_point()), torch.empty(0))
        device = next((tensor.device for tensor in own.values()), like.device)
        image = torch.zeros(1, 3, *size, device=device, dtype=like.dtype)
        scripted = isinstance(model, torch.jit.ScriptModule)  # its weights cannot be exchanged
        return count_pass(model if scripted else partial(functional_call, model, own), image)


def count_pass(model: Callable[[Tensor], Any], images: Tensor) -> Pass:
    """Count a forward pass, for real or on meta tensors.

    >>> count_pass(nn.Linear(10, 4), torch.zeros(2, 10))
    Pass(macs=80, activations=8)
    """
    with torch.no_grad(), _plain_attention(), FlopCounterMode(display=False) as counter, _Activations() as activations:
        model(images)
    return Pass(counter.get_total_flops() // 2, activations.count)


class _Activations(TorchDispatchMode):
    """Adds up the sizes of what products put out."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _PRODUCTS:
            self.count += result.numel()
        return result


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Attention as the two matrix products it is, whichever kernel the model would take: fused ones hide the first."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def known() -> dict[str, Cost]:
    """What the file holds."""
    table = json.loads((files(__package__) / "costs.json").read_text())
    return {name: Cost(*cost) for name, cost in table.items()}


if __name__ == "__main__":
    from pathlib import Path

    from spatially.models import CARDS

    lines = [f'  "{name}": [{cost.parameters}, {cost.macs}]' for name in CARDS for cost in [count(name)]]
    Path(__file__).with_name("costs.json").write_text("{\n" + ",\n".join(lines) + "\n}\n")
