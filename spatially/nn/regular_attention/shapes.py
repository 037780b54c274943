"""Shapes of the kernels' tiles: how many queries a program takes, how many rows of keys at a time, and with how many warps."""

from dataclasses import dataclass

KERNELS = ("forward", "backward_queries", "backward_keys", "backward_bias")


@dataclass(frozen=True)
class Shape:
    """A tile of rows×columns queries that takes `chunk` rows of keys at a time; warps and pipeline stages of a program."""

    rows: int
    columns: int
    chunk: int
    warps: int
    stages: int = 2
    steps: int = 1  # tiles below each other that one program sums, for the bias alone

    def keys(self, window: int) -> tuple[int, int]:
        """The rows of keys that a tile sees, filled up to whole chunks, and the columns, to a power of two."""
        return -(-(self.rows + window - 1) // self.chunk) * self.chunk, power(self.columns + window - 1)


def power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


def choose(kernel: str, *, height: int, width: int, window: int, size: int) -> Shape:
    """The shape for a problem.

    Sixteen queries are the smallest matrix product; a row of keys should hold little beside their squares.
    """
    rows, columns = (2, 8) if window in (7, 9) else (4, 4)
    if kernel == "backward_bias":
        down = power(rows + window - 1)
        cells = rows * columns * down * power(columns + window - 1)
        return Shape(rows, columns, down, max(1, cells // 2048), 1, min(-(-height // rows), 8))
    across = power(columns + window - 1)
    chunk = min(max(1, 64 // across), power(rows + window - 1))
    return Shape(rows, columns, chunk, 1 if size <= 64 else 2)
