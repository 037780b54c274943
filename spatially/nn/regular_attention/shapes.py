"""Shapes of the kernels' tiles: how many queries a program takes, how many rows of keys at a time, and with how many warps."""

from dataclasses import dataclass

SHARED_BYTES = 64 * 1024
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


def choose(kernel: str, *, height: int, width: int, window: int, size: int, bytes: int = 2) -> Shape:
    """The shape for a problem: `size` of a head, `bytes` of a number.

    Sixteen queries are the smallest matrix product; a row of keys should hold little beside their squares. Measured on an
    H200 (`tune`): larger grids like twice as many queries, as they read the keys less often.
    """
    rows, columns = (2, 8) if window in (7, 9) else (4, 4)
    steps = 1
    if kernel == "backward_bias":
        steps = min(-(-height // rows), 8)
    elif window == 7 and height >= 28 and size <= 64:
        rows = 4
    across = power(columns + window - 1)
    # Keys and values of a chunk, for each stage, share a multiprocessor's memory with other programs.
    chunk, stages = max(1, (32 if window == 7 else 64) // across), 3
    while stages > 1 and 2 * stages * chunk * across * power(size) * bytes > SHARED_BYTES:
        stages -= 1
    while chunk > 1 and 2 * stages * chunk * across * power(size) * bytes > SHARED_BYTES:
        chunk //= 2
    return Shape(rows, columns, chunk, 1 if size <= 64 else 2, stages, steps)
