r"""Eigenvalues at the ends of a symmetric operator's spectrum: Lanczos with full reorthogonalisation and thick restarts.

Each product :math:`A q_m` is split into what lies in the orthonormal basis Q and a remainder :math:`\beta q_{m+1}`, which
gives :math:`A Q = Q M + \beta q_{m+1} e_m^\top`. An eigenpair (θ, s) of the symmetric part T of M approximates one of A,

.. math:: \|A Q s - \theta Q s\| \le \beta |s_m| + \|(M - T) s\|,

and at least one eigenvalue of A lies within that residual of θ. M − T is rounding error, unless A is not symmetric.

A full basis is reduced to its best Ritz vectors, with which the recurrence goes on (Wu and Simon 2000). Where the remainder
vanishes, Q is invariant; then, where an end reaches past 0, and with ``confirm`` always, a new vector orthogonal to what was
found starts another round, until a round changes nothing: one starting vector sees a multiple eigenvalue, 0 above all, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from spatially.errors import UserError, unknown
from spatially.probes.basis import Basis

Array = NDArray[np.float64]
MAGNITUDE, BOTH_ENDS = "magnitude", "both ends"
WHICH = (MAGNITUDE, BOTH_ENDS)
_VANISHED = 10  # units of rounding, relative to the largest eigenvalue
_ROUNDED = 100  # the same for what is no more than rounding in an eigenvalue or its residual


def rounding(dtype: torch.dtype) -> float:
    """How far from 0 an eigenvalue may be by rounding alone, relative to the largest."""
    return _ROUNDED * float(torch.finfo(dtype).eps)


@dataclass(frozen=True)
class Spectrum:
    """Eigenvalues in the order of :func:`chosen`, bounds of their residuals, and whether those are small enough.

    ``asymmetry`` is the largest difference of M from its transpose, relative to the largest eigenvalue.
    """

    values: Array
    residuals: Array
    converged: NDArray[np.bool_]
    products: int
    asymmetry: float
    vectors: Tensor | None = None


def chosen(values: Array, count: int, which: str, *, shift: float = 0.0) -> NDArray[np.intp]:
    """Places of the ``count`` values of largest magnitude after the shift, or of the most positive and as many most negative.

    >>> chosen(np.array([1.0, -3.0, 2.0, 0.0]), 2, "magnitude"), chosen(np.array([1.0, -3.0, 2.0, 0.0]), 1, "both ends")
    (array([1, 2]), array([2, 1]))
    """
    if which == MAGNITUDE:
        return np.argsort(-np.abs(values + shift), kind="stable")[:count]
    order = np.argsort(-values, kind="stable")
    return order if 2 * count >= len(order) else np.concatenate([order[:count], order[-count:]])


def lanczos(
    operator: Callable[[Tensor], Tensor],
    draw: Callable[[int], Tensor],
    *,
    count: int = 5,
    which: str = MAGNITUDE,
    shift: float = 0.0,
    tolerance: float = 1e-3,
    products: int = 200,
    room: int = 64,
    confirm: bool = False,
    vectors: bool = False,
) -> Spectrum:
    """The ``count`` eigenvalues of largest magnitude of ``operator`` + ``shift``, or ``count`` at both ends; without the shift.

    ``draw(i)`` is the i-th random vector, flat; ``draw(0)`` starts. An eigenvalue is converged when its residual is at most
    ``tolerance`` times its magnitude, or its square times the largest. At most ``products`` products are taken and ``room``
    vectors kept. What the operator returns may be overwritten. The eigenvectors, as rows, come when ``vectors`` are asked for.

    >>> matrix = torch.diag(torch.arange(-3.0, 7.0).double())
    >>> lanczos(lambda v: matrix @ v, lambda i: torch.ones(10).double(), count=2).values.round(6)
    array([6., 5.])
    """
    if which not in WHICH:
        raise unknown("which", str(which), WHICH)
    first = draw(0)
    dimension = first.numel()
    wanted = min(dimension, count if which == MAGNITUDE else 2 * count)
    if count < 1 or products < wanted or room < min(2 * wanted + 2, dimension):
        raise UserError(
            f"count must be at least 1, products at least {wanted} and room at least {2 * wanted + 2}, "
            f"but came as {count}, {products} and {room}"
        )
    search = _Search(operator, draw, Basis(first), count, which, shift, tolerance, room)
    search.step(first / first.norm())
    while not search.finished(wanted, confirm=confirm) and search.used < products:
        search.step(search.following(wanted, confirm=confirm))
    settled = search.finished(wanted, confirm=confirm) or not (confirm or search.copies)
    return search.spectrum(settled=settled, vectors=vectors)


class _Search:
    """The basis, M, and what they say; ``block`` is where the present round begins in the basis."""

    def __init__(
        self,
        operator: Callable[[Tensor], Tensor],
        draw: Callable[[int], Tensor],
        basis: Basis,
        count: int,
        which: str,
        shift: float,
        tolerance: float,
        room: int,
    ) -> None:
        self.operator, self.draw, self.basis = operator, draw, basis
        self.count, self.which, self.shift, self.tolerance, self.room = count, which, shift, tolerance, room
        self.measured = np.zeros((0, 0))
        self.coupling = np.zeros(0)  # the row of M that the next vector brings
        self.slack = np.zeros(0)  # residuals of vectors that were kept without their remainder
        self.block, self.rounds, self.used, self.copies = 0, 0, 0, False
        self.rounding = rounding(basis.dtype)
        self.before: Array | None = None
        self.asymmetry = 0.0

    def step(self, vector: Tensor) -> None:
        """Take a unit vector, orthogonal to all, into the basis, and multiply by it."""
        size = len(self.basis) + 1
        self.basis.append(vector)
        image = self.operator(vector)
        self.used += 1
        inside, self.remainder, self.beta = self.basis.split(image)
        if not (np.isfinite(inside).all() and np.isfinite(self.beta)):
            raise FloatingPointError("a product with the operator is not finite")
        measured = np.zeros((size, size))
        measured[:-1, :-1] = self.measured
        # What was kept without its remainder has the coupling that symmetry gives it.
        measured[-1, :-1] = np.where(self.slack > 0, inside[:-1], self.coupling)
        measured[:, -1] = inside
        self.measured, self.slack = measured, np.append(self.slack, 0.0)
        self.values, self.combinations = np.linalg.eigh((measured + measured.T) / 2)
        self.scale = float(np.abs(self.values).max())
        if self.scale > 0:
            self.asymmetry = max(self.asymmetry, float(np.abs(measured - measured.T).max()) / self.scale)
        smallest = _VANISHED * float(torch.finfo(image.dtype).eps) * self.scale
        self.vanished = self.beta <= smallest or size == vector.numel()
        self.copies |= self.vanished
        if self.vanished:
            self.beta = 0.0

    @property
    def best(self) -> NDArray[np.intp]:
        return chosen(self.values, self.count, self.which, shift=self.shift)

    def residuals(self, places: NDArray[np.intp]) -> Array:
        parts = self.combinations[:, places]
        skew = (self.measured - self.measured.T) / 2
        return self.beta * np.abs(parts[-1]) + np.linalg.norm(skew @ parts, axis=0) + self.slack @ np.abs(parts)

    def small(self, places: NDArray[np.intp]) -> NDArray[np.bool_]:
        return self.residuals(places) <= self._bar(self.values[places])

    def _bar(self, values: Array) -> Array:
        """How far eigenvalues may be off, relative to themselves; zeros relative to the largest by the tolerance squared."""
        return np.maximum(self.tolerance * np.abs(values), max(self.tolerance**2, self.rounding) * self.scale)

    def _past_zero(self, places: NDArray[np.intp]) -> bool:
        """Whether the most negative are positive or the most positive negative: the many zeros between were seen once."""
        ends = self.values[places]
        signed = np.concatenate([-ends[: len(ends) // 2], ends[len(ends) // 2 :]])
        return self.which == BOTH_ENDS and bool((signed > self.rounding * self.scale).any())

    def finished(self, wanted: int, *, confirm: bool) -> bool:
        """Whether all are converged and, where there may be copies, a whole round changed nothing."""
        places = self.best
        if self.vanished and len(self.basis) == self.basis.dimension:
            return True
        if len(places) < wanted or not self.small(places).all():
            return False
        self.copies |= self._past_zero(places)
        if not (confirm or self.copies):
            return True
        if self.before is None or not self._round_is_over():
            return False
        now = np.sort(self.values[places])
        return bool((np.abs(now - np.sort(self.before)) <= self._bar(now)).all())

    def _round_is_over(self) -> bool:
        """Whether the leaders of the present round have converged, relative to themselves."""
        own = self.measured[self.block :, self.block :]
        values, combinations = np.linalg.eigh((own + own.T) / 2)
        leaders = chosen(values, 1, self.which, shift=self.shift)
        residuals = self.beta * np.abs(combinations[-1, leaders])
        return bool((residuals <= self.tolerance * max(np.abs(values).max(), self.tolerance * self.scale)).all())

    def following(self, wanted: int, *, confirm: bool) -> Tensor:
        """The next vector: the remainder; or a new one where the remainder vanished or a round is over."""
        places = self.best
        over = len(places) == wanted and bool(self.small(places).all()) and (self.block == 0 or self._round_is_over())
        if self.vanished or (over and (confirm or self.copies)):
            return self._new_round(places, wanted)
        size = len(self.basis)
        if size == self.room:
            return self._restart(wanted)
        self.coupling = np.append(np.zeros(size - 1), self.beta)
        return self.remainder / self.beta

    def _new_round(self, places: NDArray[np.intp], wanted: int) -> Tensor:
        size = len(self.basis)
        self.before = np.array(self.values[places]) if len(places) == wanted else None
        if not self.vanished or 2 * size > self.room:
            residuals = self.residuals(places)
            self.basis.rotate(self.combinations[:, places])
            self.measured, self.slack = np.diag(self.values[places]), np.maximum(residuals, np.finfo(float).tiny)
            size = len(self.basis)
        self.block, self.coupling = size, np.zeros(size)
        while True:
            self.rounds += 1
            _, vector, length = self.basis.split(self.draw(self.rounds))
            if length > 0:
                return vector / length

    def _restart(self, wanted: int) -> Tensor:
        """Keep the earlier rounds' vectors and the best of this round's."""
        own = self.measured[self.block :, self.block :]
        values, combinations = np.linalg.eigh((own + own.T) / 2)
        keep = max(1, min(wanted + (self.room - wanted) // 2 - self.block, len(values) - 1))
        half = keep if self.which == MAGNITUDE else max(1, keep // 2)
        turn = np.zeros((len(self.measured), self.block))
        turn[: self.block] = np.eye(self.block)
        kept = np.zeros((len(self.measured), len(chosen(values, half, self.which))))
        kept[self.block :] = combinations[:, chosen(values, half, self.which, shift=self.shift)]
        turn = np.concatenate([turn, kept], axis=1)
        self.basis.rotate(turn)
        self.measured, self.slack = turn.T @ self.measured @ turn, self.slack @ np.abs(turn)
        self.coupling = self.beta * turn[-1]
        return self.remainder / self.beta

    def spectrum(self, *, settled: bool, vectors: bool) -> Spectrum:
        places = self.best
        return Spectrum(
            values=self.values[places],
            residuals=self.residuals(places),
            converged=self.small(places) & settled,
            products=self.used,
            asymmetry=self.asymmetry,
            vectors=self.basis.combine(self.combinations[:, places]) if vectors else None,
        )
