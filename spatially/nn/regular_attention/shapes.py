"""Shapes of the kernels' tiles: how many queries a program takes at once, and with how many warps."""

from dataclasses import dataclass

KERNELS = ("forward", "backward_queries", "backward_keys")


@dataclass(frozen=True)
class Shape:
    """A tile of rows×columns queries; `steps` tiles down a strip; warps and pipeline stages of a program."""

    rows: int
    columns: int
    steps: int
    warps: int
    stages: int = 1

    def keys(self, window: int) -> tuple[int, int]:
        """The block of keys that such a tile sees, in powers of two."""
        return _power(self.rows + window - 1), _power(self.columns + window - 1)


def _power(number: int) -> int:
    return 1 << (number - 1).bit_length()


def choose(kernel: str, *, height: int, width: int, window: int, size: int) -> Shape:
    """The shape for a problem.

    Sixteen queries are the smallest matrix product; the block of keys should hold little beside their squares.
    """
    rows, columns = (2, 8) if window == 7 else (4, 4)
    cells = rows * columns * _power(rows + window - 1) * _power(columns + window - 1)
    warps = max(1, cells // 2048)
    if size > 64:
        warps = max(warps, 2)
    steps = max(1, min(-(-height // rows), 8))
    return Shape(rows, columns, steps, warps)
