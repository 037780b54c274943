r"""The fast gradient sign method (Goodfellow et al. 2015), in pixels: normalisation is the model's own affair.

.. math:: x' = \mathrm{clamp}\bigl(x + \varepsilon\,\mathrm{sign}\,\partial_x\,\mathrm{NLL}(f(x), y),\; 0,\; 1\bigr)

One gradient serves every ε. Whatever rounding does, :math:`x'` lies in 0..1 and no further than ε from :math:`x`. With p the
probability of y,

.. math:: \partial\,\mathrm{NLL} = (1 - p)\;\partial\Bigl(\log\sum\nolimits_{c \ne y} e^{z_c} - z_y\Bigr).

The first factor has no say in the sign, and rounds to 0 where the model is sure; it is left out.
"""

from collections.abc import Callable
from fractions import Fraction
from numbers import Real

import torch
from torch import Tensor

from spatially.errors import NotApplicable, UserError
from spatially.perturb.check import check_images

Model = Callable[[Tensor], Tensor]


def fgsm(model: Model, images: Tensor, labels: Tensor, *, epsilon: float = 1 / 255) -> Tensor:
    """The images moved by ε in the direction in which the loss of ``model`` grows fastest, each pixel for itself.

    ``model`` takes images in 0..1 and answers with logits, as a :class:`~spatially.Subject` does.
    """
    return step(images, direction(model, images, labels), epsilon=epsilon)


def direction(model: Model, images: Tensor, labels: Tensor) -> Tensor:
    """The sign of the gradient of each image's own loss with respect to its pixels: −1, 0 or 1, as int8."""
    check_images(images)
    if len(images) == 1 and images.device.type == "cpu":
        # PyTorch's backward of a batch norm in eval mode misreads a transposed gradient of a single image there.
        return direction(model, images.repeat(2, 1, 1, 1), labels.repeat(2))[:1]
    with torch.enable_grad():
        pixels = images.detach().clone().requires_grad_()
        logits = model(pixels).double()
        true = labels.to(logits.device)[:, None]
        others = logits.scatter(1, true, -torch.inf).logsumexp(dim=1)
        # Summed, not averaged: each image has the gradient that it has alone.
        loss = (others - logits.gather(1, true)[:, 0]).sum()
        gradient = torch.autograd.grad(loss, pixels, allow_unused=True)[0] if loss.requires_grad else None
    if gradient is None:
        raise NotApplicable(
            "FGSM needs a gradient, and none reaches the pixels: the model is not differentiable; leave FGSM out "
            "(epsilons=[])"
        )
    if not bool(torch.isfinite(gradient).all()):
        raise UserError("FGSM: the gradient of the loss is not finite; look at the model's weights, or try float32")
    return gradient.sign().to(torch.int8)


def step(images: Tensor, direction: Tensor, *, epsilon: float) -> Tensor:
    """The images ε further in a direction of −1, 0 and 1, cut to 0..1."""
    epsilon = check_epsilon(epsilon)
    before = images.double()
    moved = (before + epsilon * direction.double()).clamp_(0, 1).to(images.dtype)
    # The nearest number of the images' own precision may lie just outside.
    return torch.where((moved.double() - before).abs() > epsilon, torch.nextafter(moved, images), moved)


def check_epsilon(epsilon: float | str) -> float:
    """How far a pixel may move: 0 to 1, as a number or as a fraction such as "4/255"."""
    value: float | None = None
    if isinstance(epsilon, str):
        try:
            value = float(Fraction(epsilon.replace(" ", "")))
        except (ValueError, ZeroDivisionError):
            value = None
    elif isinstance(epsilon, Real) and not isinstance(epsilon, bool):
        value = float(epsilon)
    if value is None or not 0 <= value <= 1:
        raise UserError(f"epsilon must lie in 0..1 (pixels are 0..1), such as 1/255, but came as {epsilon!r}")
    return value
