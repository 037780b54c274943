"""Orthonormal vectors that grow in number: kept in blocks, so that none is copied when another comes."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

_ROWS = 8  # vectors in a block
_COLUMNS = 1 << 20  # elements rotated at a time


class Basis:
    """Flat vectors of one length, dtype and device, those of ``like``."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._blocks: list[Tensor] = []
        self._count = 0

    def __len__(self) -> int:
        return self._count

    @property
    def dimension(self) -> int:
        return self._like.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    def append(self, vector: Tensor) -> None:
        """Take in one more vector."""
        block, row = divmod(self._count, _ROWS)
        if block == len(self._blocks):
            self._blocks.append(self._like.new_empty(min(_ROWS, self.dimension), self.dimension))
        self._blocks[block][row] = vector
        self._count += 1

    def split(self, vector: Tensor) -> tuple[NDArray[np.float64], Tensor, float]:
        """The coefficients in the basis, what is orthogonal to it, and the length of that. ``vector`` is overwritten.

        Subtracted again while that takes away much of what is left, or rounding would leave a part of the basis in it.
        """
        total = np.zeros(len(self))
        length = float(vector.norm())
        for _ in range(3):
            before = length
            parts = [(block, block @ vector) for block in self._used()]
            for block, coefficients in parts:
                vector.addmv_(block.T, coefficients, alpha=-1)
            if parts:
                total += torch.cat([coefficients for _, coefficients in parts]).double().cpu().numpy()
            length = float(vector.norm())
            if not length < 0.7 * before:
                break
        return total, vector, length

    def combine(self, weights: NDArray[np.float64]) -> Tensor:
        """The combinations Σᵢ weights[i, j]·qᵢ as rows j."""
        turn = torch.as_tensor(weights.T.copy(), dtype=self._like.dtype, device=self._like.device)
        result = self._like.new_zeros(turn.shape[0], self.dimension)
        for number, block in enumerate(self._used()):
            result.addmm_(turn[:, number * _ROWS : number * _ROWS + len(block)], block)
        return result

    def rotate(self, weights: NDArray[np.float64]) -> None:
        """Put the combinations, at most as many as there are vectors, in the place of all vectors."""
        turn = torch.as_tensor(weights.T.copy(), dtype=self._like.dtype, device=self._like.device)
        used = self._used()
        for first in range(0, self.dimension, _COLUMNS):
            here = slice(first, first + _COLUMNS)
            turned = turn @ torch.cat([block[:, here] for block in used])
            for number in range(0, len(turned), _ROWS):
                rows = turned[number : number + _ROWS]
                self._blocks[number // _ROWS][: len(rows), here] = rows
        self._count = len(turn)
        del self._blocks[-(-self._count // _ROWS) :]

    def _used(self) -> list[Tensor]:
        """The blocks as far as they are filled."""
        counts = [min(_ROWS, self._count - first) for first in range(0, self._count, _ROWS)]
        return [block[:count] for block, count in zip(self._blocks, counts, strict=False)]
