r"""Products of the Hessian of a loss with vectors, :math:`Hv = \nabla_w (\nabla_w L(w) \cdot v)`, without the Hessian.

The graphs of the loss and of its gradient are made once and kept; a product is then one backward pass through them. On a
CPU that took about half the time of forward-over-reverse differentiation, which makes both anew for every product, for ViTs
and ResNets alike (``benchmarks/curvature.py`` measures it).

Fused attention has no second derivative, and convolutions in TF32 too few digits for one: see :func:`twice_differentiable`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from spatially.errors import NotApplicable, UserError, first_line, unknown

_MISSING = re.compile(r"derivative for (\S+) is not implemented")
_CUT = "torch::autograd::Error"  # PyTorch's node in place of what cannot be differentiated again


class HessianVector:
    """The Hessian of ``loss`` with respect to ``parameters``, as something that multiplies flat vectors.

    A parameter that the loss does not depend on has rows and columns of zeros.

    >>> w = torch.tensor([1.0, 2.0], requires_grad=True)
    >>> HessianVector(w.prod() + w[0] ** 3, [w])(torch.tensor([1.0, 0.0]))
    tensor([6., 1.])
    """

    def __init__(self, loss: Tensor, parameters: Sequence[Tensor]) -> None:
        self.parameters = list(parameters)
        self.sizes = [parameter.numel() for parameter in self.parameters]
        self.dimension = sum(self.sizes)
        with _explained():
            found = torch.autograd.grad(loss, self.parameters, create_graph=True, allow_unused=True)
        self._used = [i for i, one in enumerate(found) if one is not None and one.requires_grad]
        self._gradients = [found[i] for i in self._used]
        if any(node.name() == _CUT for node in _nodes([one.grad_fn for one in self._gradients])):
            raise _no_second_derivative(_custom_functions(loss))

    def __call__(self, vector: Tensor) -> Tensor:
        """Hv, a new flat vector."""
        parts = vector.split(self.sizes)
        given = [parts[i].view_as(self.parameters[i]) for i in self._used]
        if not given:
            return torch.zeros_like(vector)
        with _explained():
            products = torch.autograd.grad(
                self._gradients, self.parameters, given, retain_graph=True, materialize_grads=True
            )
        return torch.cat([product.reshape(-1) for product in products])


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Attention by matrix products, float32 without TF32, cuDNN deterministic, gradients recorded; all as before afterwards."""
    backends: Any = torch.backends
    precise = (backends.cuda.matmul, backends.cudnn.conv)
    before = [one.fp32_precision for one in precise]
    repeatable, fast = backends.cudnn.deterministic, backends.mha.get_fastpath_enabled()
    try:
        for one in precise:
            one.fp32_precision = "ieee"
        backends.cudnn.deterministic = True
        backends.mha.set_fastpath_enabled(False)
        with sdpa_kernel(SDPBackend.MATH), torch.inference_mode(False), torch.enable_grad():
            yield
    finally:
        for one, precision in zip(precise, before, strict=True):
            one.fp32_precision = precision
        backends.cudnn.deterministic = repeatable
        backends.mha.set_fastpath_enabled(fast)


def select_parameters(model: nn.Module, patterns: Sequence[str] = ("*",)) -> dict[str, nn.Parameter]:
    """The parameters whose names match any of the patterns, such as ``"blocks.0.*"`` or ``"*.weight"``."""
    named = {name: one for name, one in model.named_parameters() if one.is_floating_point() and one.numel()}
    if not named:
        raise NotApplicable("the model has no parameters, so its loss has no Hessian")
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in named):
            begin = ", ".join(dict.fromkeys(name.split(".")[0] + ".*" * ("." in name) for name in named))
            raise unknown("parameter", pattern, named, hint=f"(names: {begin})")
    complexes = [name for name, one in model.named_parameters() if one.is_complex() and _matches(name, patterns)]
    if complexes:
        raise NotApplicable(
            f"the model has complex weights ({', '.join(complexes[:3])}), and the Hessian is of real ones; choose others "
            "(hessian.parameters)"
        )
    return {name: one for name, one in named.items() if _matches(name, patterns)}


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


@contextmanager
def only_these_learn(model: nn.Module, parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Gradients are asked for these parameters of the model and for no others, while this lasts."""
    before = {one: one.requires_grad for one in model.parameters()}
    wanted = {id(one) for one in parameters}
    try:
        for one in before:
            one.requires_grad_(id(one) in wanted)
        yield
    finally:
        for one, asked in before.items():
            one.requires_grad_(asked)


@contextmanager
def _explained() -> Iterator[None]:
    """PyTorch's error about a missing derivative as one that says what to do."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, NotImplementedError) as error:
        found = _MISSING.search(str(error))
        if found is None and "checkpoint" in str(error):
            raise NotApplicable("a reentrant checkpoint has no second derivative; switch checkpointing off") from error
        if found is None and "twice" not in str(error) and "not implemented" not in str(error):
            raise
        raise _no_second_derivative(found[1] if found else first_line(error)) from error


def _no_second_derivative(operation: str) -> UserError:
    return NotApplicable(
        f"the model has no second derivative: {operation} cannot be differentiated twice; "
        "use an implementation of it in plain PyTorch operations"
    )


def _nodes(roots: Sequence[Any]) -> Iterator[Any]:
    """Every node of a graph once."""
    waiting, seen = [root for root in roots if root is not None], set()
    while waiting:
        node = waiting.pop()
        if node in seen:
            continue
        seen.add(node)
        yield node
        waiting += [following for following, _ in node.next_functions if following is not None]


def _custom_functions(loss: Tensor) -> str:
    """The functions in a graph that can be differentiated once only, by name."""
    functions = [getattr(node, "_forward_cls", None) for node in _nodes([loss.grad_fn])]
    once = [one.__name__ for one in functions if one is not None and hasattr(one.backward, "__wrapped__")]
    return ", ".join(dict.fromkeys(once)) or "a function of its own"
