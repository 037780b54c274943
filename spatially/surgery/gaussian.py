r"""A Gaussian attention bias in every layer of a trained network (Kim et al., section 4).

The logits of layer l become

.. math:: \frac{QK^\top}{\sqrt{D}} + \text{the layer's own bias} + A_l^2 \exp\left(-\frac{Δx^2 + Δy^2}{2σ_l^2}\right),

with a learnable A and σ of each layer's own at `….gaussian_bias`. Class, distillation and register tokens have bias 0 with
everything. In Swin the pairs are those of a window. With A = 0 the network answers as before; but then A's gradient is 0
too, since A enters squared: to train, start from the default.

>>> import timm, torch
>>> model = timm.create_model("deit_tiny_patch16_224", depth=1, img_size=32).eval()
>>> images = torch.rand(1, 3, 32, 32)
>>> before = model(images)
>>> with add_gaussian_bias(model, amplitude=0.0) as change:
...     print(change.changed, torch.allclose(model(images), before, atol=1e-5))
('blocks.0.attn',) True
"""

from typing import Any

from torch import nn

from spatially.errors import UserError
from spatially.nn.check import flag, number
from spatially.nn.gaussian_bias import GaussianBias
from spatially.subject import Subject
from spatially.surgery.change import Change, Edits, module_of
from spatially.surgery.grid import Grid
from spatially.surgery.hosts import SUPPORTED, BiasPlace, Host, find

OPERATION = "add_gaussian_bias"


def add_gaussian_bias(
    model: nn.Module | Subject, *, amplitude: float = 1.0, sigma: float = 5.0, per_head: bool = False
) -> Change:
    """Give every self-attention layer a Gaussian bias, in place; a layer that has one keeps it.

    Args:
        model: ViT or Swin of timm, Hugging Face, torchvision or spatially, DeiT or BEiT of timm or Hugging Face, ViT with
            relative positions or PiT of timm or spatially, or anything that holds one.
        amplitude: where A starts.
        sigma: where σ starts, in patches.
        per_head: one (A, σ) for each head instead of one for the layer.
    """
    amplitude, sigma = number("amplitude", amplitude), number("sigma", sigma)
    if sigma == 0:
        raise UserError("sigma must not be 0: the bias divides by its square")
    flag("per_head", per_head)
    hosts = find(module_of(model))
    places = [(host, place) for host in hosts for place in host.bias_places()]
    if not places:
        raise UserError(
            f"{type(module_of(model)).__name__} has no attention layer that takes a Gaussian bias: {SUPPORTED} do"
        )
    _check_squares(hosts)
    fresh = [(host, place) for host, place in places if not _has_it(place, amplitude, sigma, per_head)]
    trunks = list(dict.fromkeys(host.trunk for host, _ in fresh))
    grids: dict[nn.Module, Grid] = {}
    with Edits() as edits:
        for host, place in fresh:
            _add(edits, host, place, grids, amplitude=amplitude, sigma=sigma, per_head=per_head)
        for trunk in trunks:
            if hasattr(trunk, "no_weight_decay"):
                edits.set_attribute(trunk, "no_weight_decay", NoWeightDecay(trunk))
    return Change(model, OPERATION, edits=edits, changed=[place.name for _, place in fresh], trunks=trunks)


def _check_squares(hosts: list[Host]) -> None:
    for host in hosts:
        for name, module in host.trunk.named_modules(prefix=host.name):
            if "shift" in (getattr(module, "border", None), *(getattr(module, "receptive_field", None) or ())):
                raise UserError(
                    f"{name} has border='shift': off their queries, squares have no place for a Gaussian bias"
                )


def _has_it(place: BiasPlace, amplitude: float, sigma: float, per_head: bool) -> bool:
    present = getattr(place.module, "gaussian_bias", None)
    if present is None:
        return False
    as_wanted = present.starts == (amplitude, sigma) and len(present.sigma) == (place.heads if per_head else 1)
    if not as_wanted:
        raise UserError(f"{place.name} has a Gaussian bias already, {present}: undo that change first")
    return True


def _add(edits: Edits, host: Host, place: BiasPlace, grids: dict[nn.Module, Grid], **options: Any) -> None:
    like = next(host.trunk.parameters())
    bias = GaussianBias(place.heads, device=like.device, dtype=like.dtype, **options)
    edits.set_module(place.module, "gaussian_bias", bias)
    if place.stem is not None:
        if place.stem not in grids:
            grids[place.stem] = Grid(host.prefix)
            edits.add_hook(place.stem, grids[place.stem])
        edits.set_attribute(place.module, "grid", grids[place.stem])
    edits.set_class(place.module, place.kind)


class NoWeightDecay:
    """A network's `no_weight_decay()`, and every Gaussian's amplitude and σ."""

    def __init__(self, trunk: nn.Module) -> None:
        self.trunk = trunk

    def __call__(self) -> set[str]:
        names = {
            f"{name}.{own}"
            for name, module in self.trunk.named_modules()
            if isinstance(module, GaussianBias)
            for own, _ in module.named_parameters()
        }
        return names | set(type(self.trunk).no_weight_decay(self.trunk))  # type: ignore[attr-defined]
