r"""Weights that move: over a plane through a model's own, or along the line to another's.

The plane (Li et al. 2018, section 4): :math:`w + a\,d_1 + b\,d_2` with two Gaussian directions, each filter scaled to the
norm of the filter it moves,

.. math:: d[i] \leftarrow d[i]\; \lVert w[i] \rVert \,/\, \lVert d[i] \rVert,

where w[i] is all that lies at index i of a parameter's first dimension. Parameters of fewer than two dimensions (biases, norms)
and those that hold positions stay where they are. ``style="authors"`` does what the code of Park & Kim does: norms along the
first dimension instead, one for every index of the others, with 1e-7 added to the direction's.

The line: :math:`(1 - t)\,w_0 + t\,w_1` for all parameters, and for running statistics with t cut to 0..1, since a variance
beyond its ends may be negative.

All that moves lies in one buffer. A point is one pass over it, allocates nothing, and the model reads views of it; a row of
the plane is one more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from spatially import randomness
from spatially.errors import NotApplicable, UserError
from spatially.observe.position_parameters import position_parameters

STYLES = ("filter", "authors")
_ALIGNED = 64  # elements: a view then begins where a tensor of its own would, and takes the same kernels
_SMALL = 1e-7
_PIECE = 1 << 22  # elements that are taken to float64 at a time


class Layout:
    """Where each of some tensors lies in one flat buffer. Shapes and memory formats stay."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._places: dict[str, tuple[torch.Size, tuple[int, ...], int]] = {}
        end = 0
        for name, tensor in tensors.items():
            whole = torch.empty_like(tensor, device="meta")  # dense, where the tensor itself may have gaps
            self._places[name] = (tensor.shape, whole.stride(), end)
            end += -(-tensor.numel() // _ALIGNED) * _ALIGNED
        self._size = end

    def empty(self, like: Tensor) -> Tensor:
        """A buffer of zeros."""
        return torch.zeros(self._size, dtype=like.dtype, device=like.device)

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors in a buffer, by name."""
        return {name: flat.as_strided(shape, stride, start) for name, (shape, stride, start) in self._places.items()}

    def filled(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """A buffer with these tensors in it."""
        flat = self.empty(next(iter(tensors.values())))
        for name, view in self.views(flat).items():
            view.copy_(tensors[name])
        return flat


class Plane:
    """The plane through a model's weights. `move` puts `weights`, for ``torch.func.functional_call``, at a point of it."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, *, seed: int, style: str = "filter") -> None:
        own = dict(model.named_parameters())
        moved = {name: own[name].detach() for name in moved_parameters(model)}
        if not moved:
            raise NotApplicable(
                "the model has no parameters of two dimensions or more beside positions: no filters to move"
            )
        layout = Layout(moved)
        self._start = layout.filled(moved)
        self._directions = [
            layout.filled({name: direction(name, one, number, seed=seed, style=style) for name, one in moved.items()})
            for number in range(2)
        ]
        self._buffer, self._base, self._row = layout.empty(self._start), layout.empty(self._start), float("nan")
        self.weights = under_all_names(model, layout.views(self._buffer))
        self.directions = [layout.views(flat) for flat in self._directions]
        rest = [parameter for name, parameter in own.items() if name not in moved]
        self._products = inner_products([layout.views(flat) for flat in (self._start, *self._directions)], rest)

    def move(self, a: float, b: float) -> None:
        """To w + a·d₁ + b·d₂. Points of one row, with the same a, share its first half."""
        if a != self._row:
            torch.add(self._start, self._directions[0], alpha=a, out=self._base)
            self._row = a
        torch.add(self._base, self._directions[1], alpha=b, out=self._buffer)

    def squared_norms(self, a: float, b: float) -> Tensor:
        """‖w‖² of each parameter at a point, float64, from inner products that were taken once."""
        place = torch.tensor([1.0, a, b], dtype=torch.float64)
        return (place @ self._products @ place).clamp(min=0)


class Line:
    """The line from a model's weights to another's. `move` puts `weights` at a point of it."""

    @torch.no_grad()
    def __init__(self, model: nn.Module, other: nn.Module) -> None:
        check_line(model, other)
        ends = [_parameters_and_statistics(one) for one in (model, other)]
        (own, statistics), (others, other_statistics) = ends
        place = Layout(own)
        self._start, self._end = place.filled(own), place.filled({name: others[name].to(own[name]) for name in own})
        self._buffer = place.empty(self._start)
        moving = place.views(self._buffer)
        self._statistics = [(one, other_statistics[name].to(one), one.clone()) for name, one in statistics.items()]
        moving |= {name: one for name, (*_, one) in zip(statistics, self._statistics, strict=True)}
        self.weights = under_all_names(model, moving)
        self._products = inner_products([place.views(flat) for flat in (self._start, self._end)], [])

    def move(self, t: float) -> None:
        """To (1 − t)·w₀ + t·w₁; exactly either model at t = 0 and t = 1."""
        torch.lerp(self._start, self._end, t, out=self._buffer)
        for start, end, moving in self._statistics:
            torch.lerp(start, end, min(max(t, 0.0), 1.0), out=moving)

    def squared_norms(self, t: float) -> Tensor:
        """‖w‖² of each parameter at a point, float64."""
        place = torch.tensor([1 - t, t], dtype=torch.float64)
        return (place @ self._products @ place).clamp(min=0)


def moved_parameters(model: nn.Module) -> list[str]:
    """The parameters that a plane moves: of two dimensions or more, and no positions."""
    positions = position_parameters(model)
    return [
        name
        for name, parameter in model.named_parameters()
        if parameter.ndim >= 2 and parameter.is_floating_point() and parameter.numel() and name not in positions
    ]


def check_real(model: nn.Module) -> None:
    """A plane and a line are of real weights."""
    names = [name for name, parameter in model.named_parameters() if parameter.is_complex()]
    if names:
        raise NotApplicable(f"the model has complex weights ({', '.join(names[:3])}), and only real ones are moved")


def under_all_names(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Parameters and buffers under every name they have: modules may share one."""
    every = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    given = {id(own): tensors[name] for name, own in every if name in tensors}
    return {name: given[id(own)] for name, own in every if id(own) in given}


def direction(name: str, weight: Tensor, number: int, *, seed: int, style: str = "filter") -> Tensor:
    """A parameter's part of direction ``number``: a pure function of (seed, name, number) and the weight's norms."""
    key = randomness.stream(seed, "direction", number, name)
    image = torch.zeros(1, dtype=torch.int64, device=weight.device)
    drawn = randomness.normal(key, image, (4, 1, -(-weight.numel() // 4)))
    drawn = drawn.flatten()[: weight.numel()].view(weight.shape).to(weight.dtype)
    dims = (0,) if style == "authors" else tuple(range(1, weight.ndim))
    own, wanted = (
        torch.linalg.vector_norm(one, dim=dims, keepdim=True, dtype=torch.float64) for one in (drawn, weight)
    )
    scale = wanted / (own + _SMALL) if style == "authors" else torch.where(own > 0, wanted / own, 0.0)
    return drawn * scale.to(weight.dtype)


def inner_products(vectors: list[dict[str, Tensor]], rest: Sequence[Tensor]) -> Tensor:
    """Of each parameter with its directions, ``(parameters, n, n)`` in float64 on the CPU; ``rest`` are those that stay."""
    products = []
    for name in vectors[0]:
        total = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
        for pieces in zip(*(one[name].flatten().split(_PIECE) for one in vectors), strict=True):
            stacked = torch.stack(pieces).double()
            total += (stacked @ stacked.T).cpu()
        products.append(total)
    for parameter in rest:
        alone = torch.zeros(len(vectors), len(vectors), dtype=torch.float64)
        alone[0, 0] = parameter.double().square().sum().cpu()
        products.append(alone)
    return torch.stack(products)


def check_line(model: nn.Module, other: nn.Module) -> None:
    """Tables of whole numbers, such as permutations, have nothing between; counts of batches have no say in evaluation."""
    ends = model.state_dict(), other.state_dict()
    for name, own in ends[0].items():
        whole = isinstance(own, Tensor) and not (own.is_floating_point() or own.is_complex())
        if whole and not name.endswith("num_batches_tracked") and not torch.equal(own, ends[1][name].to(own.device)):
            raise UserError(
                f"towards: the other checkpoint has other whole numbers in {name}, and there is no line between those; "
                "give one whose own are the same"
            )


def _parameters_and_statistics(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    parameters = {name: one.detach() for name, one in model.named_parameters() if one.is_floating_point()}
    kept = model.state_dict()
    return parameters, {
        name: one for name, one in model.named_buffers() if name in kept and one.is_floating_point() and one.numel()
    }
