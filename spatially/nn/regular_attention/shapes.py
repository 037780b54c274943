"""Shapes of the kernels' tiles: how many queries a program takes, how many rows of keys at a time, and how it is compiled.

The fastest shapes that `tune` measured stand in a table, `shapes.json`, by chip, kernel, window, size of a head, bytes of a
number and grid. A problem takes the row of its chip and window that lies nearest; without one, a rule of thumb. The file
named by SPATIALLY_SHAPES, which `tune --write` extends, is read too and goes first. Nothing is measured in a training run.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

SHARED_BYTES = 48 * 1024
LEAST_KEYS, MOST_KEYS = 16, 64  # of a chunk; the matrix units take 16 at a time
KERNELS = ("forward", "backward_queries", "backward_keys", "backward_bias")
TABLE = Path(__file__).with_name("shapes.json")
OWN_TABLE = "SPATIALLY_SHAPES"


@dataclass(frozen=True)
class Shape:
    """A tile of rows×columns queries that takes `chunk` rows of keys at a time; warps, pipeline stages and registers."""

    rows: int
    columns: int
    chunk: int
    warps: int = 1
    stages: int = 3
    registers: int | None = None  # at most, for a thread; fewer let more programs run at once
    steps: int = 1  # tiles below each other that one program sums, for the bias alone

    def chunks(self, window: int) -> int:
        """How many chunks hold the rows of keys that a tile sees."""
        return -(-(self.rows + window - 1) // self.chunk)

    def key_columns(self, window: int) -> int:
        """The columns of keys that a tile sees, filled up to a power of two."""
        return power(self.columns + window - 1)


@dataclass(frozen=True)
class Problem:
    """What a shape is chosen for: `size` of a head, `bytes` of a number."""

    kernel: str
    height: int
    width: int
    window: int
    size: int
    bytes: int
    biased: bool
    border: str = "mask"

    def narrow(self, columns: int) -> bool:
        """Whether a tile is as wide as the grid and sees nothing beside it: then a row of keys is a row of the grid."""
        sees_beyond = self.border == ("shift" if self.kernel == "backward_keys" else "zero")
        return self.width <= columns and not self.biased and not sees_beyond

    def key_columns(self, shape: Shape) -> int:
        """The columns that pass by a tile: its own and their neighbours; in a grid no wider than a tile, the grid's."""
        if self.narrow(shape.columns):
            return max(power(self.width), LEAST_KEYS // shape.chunk)
        return shape.key_columns(self.window)

    def keys(self, shape: Shape) -> int:
        """The keys of a chunk."""
        return shape.chunk * self.key_columns(shape)

    def passing_bytes(self, shape: Shape) -> int:
        """What the chunks of two maps hold that are on their way at once."""
        return 2 * shape.stages * self.keys(shape) * power(self.size) * self.bytes


def power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()


_FORCED: dict[str, Shape] = {}


@contextmanager
def forced(kernel: str, shape: Shape) -> Iterator[None]:
    """This shape for this kernel, whatever the table says."""
    _FORCED[kernel] = shape
    try:
        yield
    finally:
        del _FORCED[kernel]


def forced_shape(kernel: str) -> Shape | None:
    """The shape that this kernel is made to take, if any."""
    return _FORCED.get(kernel)


def choose(problem: Problem, chip: str) -> Shape:
    """The shape for a problem on a chip."""
    return forced_shape(problem.kernel) or _looked_up(problem, chip)


@lru_cache(maxsize=4096)
def _looked_up(problem: Problem, chip: str) -> Shape:
    rows = [row for row in _rows(os.environ.get(OWN_TABLE)) if _fits(row, problem, chip)]
    if not rows:
        return usual(problem)
    nearest = min(rows, key=lambda row: abs(math.log(row["grid"] ** 2 / (problem.height * problem.width))))
    shape, side = Shape(**nearest["shape"]), nearest["grid"]
    measured = replace(problem, height=side, width=side, border="mask")
    more = problem.keys(shape) > measured.keys(shape) and problem.passing_bytes(shape) > SHARED_BYTES
    return usual(problem) if more or not LEAST_KEYS <= problem.keys(shape) <= MOST_KEYS else shape


def usual(problem: Problem) -> Shape:
    """A shape that does well without measuring.

    Sixteen queries are the smallest matrix product, and thirty-two read the keys less often. A row of keys should hold
    little beside their squares.
    """
    large = problem.size * problem.bytes > 128
    rows, columns = (2 if large else 4, 8) if problem.window <= 9 else (4, 4)
    across = power(problem.width if problem.narrow(columns) else columns + problem.window - 1)
    steps = min(-(-problem.height // rows), 8) if problem.kernel == "backward_bias" else 1
    shape = Shape(rows, columns, max(1, 32 // across), 1 if problem.size <= 64 else 2, steps=steps)
    while shape.stages > 1 and problem.passing_bytes(shape) > SHARED_BYTES:
        shape = replace(shape, stages=shape.stages - 1)
    return shape


def row(problem: Problem, chip: str, shape: Shape) -> dict[str, Any]:
    """A row of the table."""
    one = asdict(problem)
    grid = round(math.sqrt(one.pop("height") * one.pop("width")))
    del one["border"]  # the fastest shapes are alike
    return {"chip": chip, **one, "grid": grid, "shape": {k: v for k, v in asdict(shape).items() if v is not None}}


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to a table; a row for the same problem is replaced."""

    def key(one: dict[str, Any]) -> tuple[Any, ...]:
        return tuple(value for name, value in one.items() if name != "shape")

    table = {key(one): one for one in [*(json.loads(path.read_text()) if path.exists() else []), *rows]}
    lines = ",\n".join(json.dumps(one) for one in table.values())
    path.write_text(f"[\n{lines}\n]\n")
    _rows.cache_clear()
    _looked_up.cache_clear()


@lru_cache
def _rows(own: str | None) -> list[dict[str, Any]]:
    files = [Path(own)] if own else []
    return [one for path in [*files, TABLE] if path.exists() for one in json.loads(path.read_text())]


def _fits(one: dict[str, Any], problem: Problem, chip: str) -> bool:
    same = ("kernel", "window", "bytes", "biased")
    if one["chip"] != chip or any(one[name] != getattr(problem, name) for name in same):
        return False
    return power(one["size"]) == power(problem.size)
