r"""AdamP (Heo et al. 2021) without a question to the host: timm's update, the choice of projection made on the device.

Where the gradient of a weight is nearly orthogonal to it, by channel or as a whole,

.. math:: \max_c \frac{|\langle g_c, w_c \rangle|}{\lVert g_c \rVert \lVert w_c \rVert} < \frac{\delta}{\sqrt{n}},

the part of Adam's update along the weight is taken away and the decay is weakened. timm asks this of each weight with a
comparison that waits for the GPU; here both answers are computed and `torch.where` takes one.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import timm.optim
import torch
import torch.nn.functional as F
from torch import Tensor


class AdamP(timm.optim.AdamP):
    """timm's AdamP: its options, its state; its own step on the CPU, ours on an accelerator."""

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        if all(parameter.device.type == "cpu" for parameter in parameters):
            return super().step(closure)
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.step_without_waiting()
        return loss

    @torch.no_grad()
    def step_without_waiting(self) -> None:
        """One update of every weight that has a gradient."""
        for group in self.param_groups:
            together: dict[int, list[Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    together.setdefault(self.state[weight].get("step", 0) + 1, []).append(weight)
            for number, weights in together.items():
                self._update(group, weights, number)

    def _update(self, group: dict[str, Any], weights: list[Tensor], number: int) -> None:
        """The `number`-th update of some weights."""
        gradients: list[Tensor] = [weight.grad for weight in weights if weight.grad is not None]
        updates = self._directions(group, weights, gradients, number)
        decay, size = group["lr"] * group["weight_decay"], group["lr"] / (1 - group["betas"][0] ** number)
        flat = [index for index, weight in enumerate(weights) if weight.ndim <= 1]
        if flat:
            vectors = [weights[index] for index in flat]
            torch._foreach_mul_(vectors, 1 - decay)
            torch._foreach_add_(vectors, [updates[index] for index in flat], alpha=-size)
        for alike in _by_shape(weights):
            weight, gradient, update = (
                torch.stack([some[index] for index in alike]) for some in (weights, gradients, updates)
            )
            update, factor = _projected(weight, gradient, update, group)
            result = weight * (1 - decay * factor) - size * update
            torch._foreach_copy_([weights[index] for index in alike], list(result.unbind()))

    def _directions(
        self, group: dict[str, Any], weights: list[Tensor], gradients: list[Tensor], number: int
    ) -> list[Tensor]:
        """Adam's updates before the rate and the correction of the first average."""
        first, second = self._moments(weights, number)
        beta1, beta2 = group["betas"]
        torch._foreach_mul_(first, beta1)
        torch._foreach_add_(first, gradients, alpha=1 - beta1)
        torch._foreach_mul_(second, beta2)
        torch._foreach_addcmul_(second, gradients, gradients, value=1 - beta2)
        divisors = torch._foreach_sqrt(second)
        torch._foreach_div_(divisors, math.sqrt(1 - beta2**number))
        torch._foreach_add_(divisors, group["eps"])
        ahead: list[Tensor] = first
        if group["nesterov"]:
            ahead = list(torch._foreach_mul(first, beta1))
            torch._foreach_add_(ahead, gradients, alpha=1 - beta1)
        return list(torch._foreach_div(ahead, divisors))

    def _moments(self, weights: list[Tensor], number: int) -> tuple[list[Tensor], list[Tensor]]:
        """Adam's two averages of each weight, as timm keeps them."""
        for weight in weights:
            state = self.state[weight]
            if not state:
                state.update(exp_avg=torch.zeros_like(weight), exp_avg_sq=torch.zeros_like(weight))
            state["step"] = number
        states = [self.state[weight] for weight in weights]
        return [one["exp_avg"] for one in states], [one["exp_avg_sq"] for one in states]


def _by_shape(weights: Sequence[Tensor]) -> list[list[int]]:
    """Numbers of the weights that have rows, those of one shape together: a network has many weights and few shapes."""
    shapes: dict[torch.Size, list[int]] = {}
    for index, weight in enumerate(weights):
        if weight.ndim > 1:
            shapes.setdefault(weight.shape, []).append(index)
    return list(shapes.values())


def _projected(weight: Tensor, gradient: Tensor, update: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Updates of several weights after the projection that applies to each, if any, and the factors of their decay."""
    options = {"delta": group["delta"], "eps": group["eps"]}
    by_channel, applies_by_channel = _by_rows(weight, gradient, update, weight.shape[1], **options)
    as_whole, applies_as_whole = _by_rows(weight, gradient, update, 1, **options)
    result = torch.where(applies_by_channel, by_channel, torch.where(applies_as_whole, as_whole, update))
    return result, 1 - (1 - group["wd_ratio"]) * (applies_by_channel | applies_as_whole).to(weight.dtype)


def _by_rows(
    weight: Tensor, gradient: Tensor, update: Tensor, rows: int, *, delta: float, eps: float
) -> tuple[Tensor, Tensor]:
    """Updates (weights, …) without their part along each of `rows` rows of the weights, and whether that is to be used."""
    shape = (len(weight), rows, -1)
    flat, slope, change = weight.reshape(shape), gradient.reshape(shape), update.reshape(shape)
    largest = F.cosine_similarity(slope, flat, dim=2, eps=eps).abs().amax(dim=1)
    unit = flat / (flat.norm(dim=2, keepdim=True) + eps)
    change = change - unit * (unit * change).sum(dim=2, keepdim=True)
    applies = largest < delta / math.sqrt(flat.shape[2])
    return change.reshape(update.shape), applies.view(-1, *[1] * (weight.ndim - 1))
