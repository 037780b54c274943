"""How kernels are launched: tiles, programs and arguments are found once for a problem, then only the addresses change.

A kernel's own launcher looks at each of its forty arguments again at every call, which takes longer than the kernel runs on
small grids. Here a `Launch` is kept for each problem, and in it what was compiled for each layout of its tensors.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from spatially.nn.regular_attention import kernels
from spatially.nn.regular_attention.field import BORDERS
from spatially.nn.regular_attention.shapes import Problem, Shape, choose, forced_shape, power

# Which of a kernel's tensors pass by in chunks, and of which it takes the steps along images, rows, columns and heads.
PASSING = {"forward": (1, 2), "backward_queries": (1, 2), "backward_keys": (0, 5), "backward_bias": (1, 2)}
STRIDED = {
    "forward": (0, 4),
    "backward_queries": (0, 4, 6, 7),
    "backward_keys": (1, 2, 7, 8),
    "backward_bias": (0, 5),
}


def launch_for(kernel: str, query: Tensor, bias: Tensor | None, window: int, border: str) -> "Launch":
    """The launch of a kernel for queries (B, H, W, heads, D) like these."""
    return _launch(
        kernel, query.shape, query.dtype, query.device, bias is not None, window, border, forced_shape(kernel)
    )


@lru_cache(maxsize=1024)
def _launch(
    kernel: str, shape: torch.Size, dtype: torch.dtype, device: torch.device, biased: bool, window: int, border: str,
    forced: Shape | None,
) -> "Launch":  # fmt: skip
    # `choose` asks for a forced shape as well; here it only keeps its launches apart.
    batch, height, width, heads, size = shape
    problem = Problem(kernel, height, width, window, size, dtype.itemsize, biased, border)
    return Launch(problem, batch, heads, dtype, device, choose(problem, _chip(device)))


@lru_cache
def _chip(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


@dataclass(eq=False)
class Launch:
    """One kernel for one problem: its tiles and programs, and what was compiled for it."""

    problem: Problem
    batch: int
    heads: int
    dtype: torch.dtype
    device: torch.device
    shape: Shape

    def __post_init__(self) -> None:
        problem, rows, columns = self.problem, self.shape.rows, self.shape.columns
        height, width, heads = problem.height, problem.width, self.heads
        # The last columns, where they fill less than half a tile, are done in tiles twice as high and half as wide.
        slim = problem.kernel == "forward" and problem.border == "mask" and not problem.biased and width > columns > 1
        self.edge = slim and 0 < width % columns <= columns // 2
        across = width // columns if self.edge else -(-width // columns)
        programs = across * -(-height // (rows * self.shape.steps)) + (-(-height // (2 * rows)) if self.edge else 0)
        if problem.kernel == "backward_bias":  # a program for each chunk of keys
            heads *= self.shape.chunks(problem.window)
        self.grid = (programs, heads, self.batch)
        self.place = (height, width, problem.size, across)
        self._compiled: dict[tuple[Any, ...], _Compiled] = {}

    def __call__(self, tensors: Sequence[Tensor], *numbers: float, **constants: Any) -> None:
        if self.device.type == "cuda" and self.device.index != torch.cuda.current_device():
            with torch.cuda.device(self.device):
                return self(tensors, *numbers, **constants)
        layout = (*[tensor.stride() for tensor in tensors], *[tensor.data_ptr() % 16 for tensor in tensors], numbers)
        found = self._compiled.get(layout)
        if found is not None:
            return found(tensors)
        name = self.problem.kernel
        blocks = {place: place for place in PASSING[name]}  # place of an argument: the tensor that it reads
        arguments: list[Any] = [self._block(one) if place in blocks else one for place, one in enumerate(tensors)]
        if name == "forward":
            if self.edge:
                blocks |= {len(tensors) + number: place for number, place in enumerate(PASSING["forward"])}
            arguments += [self._edge_block(tensors[place]) if self.edge else None for place in PASSING["forward"]]
        strides = [step for place in STRIDED[name] for step in tensors[place].stride()[:4]]
        arguments += [*strides, *self.place, *numbers]
        constants |= self._constants
        kernel = getattr(kernels, name)
        compiled = kernel[self.grid](*arguments, **constants, **self._options)
        if compiled is None:  # the interpreter compiles nothing
            return
        if len(self._compiled) > 64:
            self._compiled.clear()
        ordered = [*arguments, *(constants[name] for name in kernel.arg_names[len(arguments) :])]
        self._compiled[layout] = _Compiled(compiled[self.grid], ordered, len(tensors), blocks)

    @property
    def _constants(self) -> dict[str, Any]:
        problem = self.problem
        constants = {
            "WINDOW": problem.window,
            "BORDER": BORDERS.index(problem.border),
            "ROWS": self.shape.rows,
            "COLUMNS": self.shape.columns,
            "KCOLUMNS": self.key_columns,
            "CHUNK": self.shape.chunk,
            "CHUNKS": self.shape.chunks(problem.window),
            "SIZE": self.block_size,
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",
        }
        if problem.kernel != "backward_bias":
            constants |= {"BIAS": problem.biased, "NARROW": problem.narrow(self.shape.columns)}
        if problem.kernel == "forward":
            constants |= {"EDGE": self.edge, "EDGE_KCOLUMNS": self.edge_columns}
        return constants

    @property
    def _options(self) -> dict[str, int]:
        limit = {} if self.shape.registers is None else {"maxnreg": self.shape.registers}
        return {"num_warps": self.shape.warps, "num_stages": self.shape.stages, **limit}

    @property
    def key_columns(self) -> int:
        """The columns that pass by a tile."""
        return self.problem.key_columns(self.shape)

    @property
    def edge_columns(self) -> int:
        """The columns that pass by a tile at the right edge, beyond which there is nothing."""
        return power(self.shape.columns // 2 + self.problem.window // 2)

    @property
    def block_size(self) -> int:
        """Channels of a block: a power of two, 16 at least."""
        return max(16, triton.next_power_of_2(self.problem.size))

    def _block(self, tensor: Tensor) -> TensorDescriptor:
        """A map that passes by a tile in chunks."""
        return self._blocks_of(tensor, self.shape.chunk, self.key_columns)

    def _edge_block(self, tensor: Tensor) -> TensorDescriptor:
        """The same map in chunks for the tiles at the right edge: as many keys in more rows."""
        rows = self.shape.chunk * self.key_columns // self.edge_columns
        return self._blocks_of(tensor, rows, self.edge_columns)

    def _blocks_of(self, tensor: Tensor, rows: int, columns: int) -> TensorDescriptor:
        maps = tensor.permute(0, 3, 1, 2, 4)
        # The step along an axis of one place is never taken, but checked.
        strides = [step if length > 1 else 16 for length, step in zip(maps.shape, maps.stride(), strict=True)]
        return TensorDescriptor(maps, list(maps.shape), [*strides[:4], 1], [1, 1, rows, columns, self.block_size])

    @property
    def slots(self) -> Tensor:
        """The slot (from 0 to window² − 1) of each pair of a tile's queries and keys, −1 outside the square: (pairs,)."""
        shape, window = self.shape, self.problem.window
        rows = shape.chunks(window) * shape.chunk
        slots = pair_slots(shape.rows, shape.columns, rows, self.key_columns, window, self.device.type == "cuda")
        return slots.to(self.device, non_blocking=True)

    def table(self, bias: Tensor | None, scale: float, otherwise: Tensor) -> Tensor:
        """The bias as the kernel reads it (see there); anything where there is none."""
        if bias is None:
            return otherwise
        bias, problem = bias.float(), self.problem
        if problem.border == "shift":
            return bias.contiguous()
        slots = self.slots
        if problem.kernel == "backward_keys":  # where a query sees a key in slot s, the key sees it in the opposite one
            slots = torch.where(slots < 0, -1, problem.window**2 - 1 - slots)
        table = (bias / scale).flatten(1)[:, slots.clamp(min=0)]
        return table.masked_fill_(slots < 0, float("-inf"))


class _Compiled:
    """A compiled kernel with all its arguments but the tensors."""

    def __init__(self, launch: Any, arguments: list[Any], tensors: int, blocks: dict[int, int]) -> None:
        self._launch = launch
        self._rest = [None if tensors + number in blocks else one for number, one in enumerate(arguments[tensors:])]
        self._blocks = [(place, source, vars(arguments[place]) | {"base": None}) for place, source in blocks.items()]

    def __call__(self, tensors: Sequence[Tensor]) -> None:
        arguments = [*tensors, *self._rest]
        for place, source, rest in self._blocks:
            block = TensorDescriptor.__new__(TensorDescriptor)  # checked when it was first made
            block.__dict__ = {**rest, "base": tensors[source]}
            arguments[place] = block
        self._launch(*arguments)


@lru_cache(maxsize=64)
def pair_slots(rows: int, columns: int, key_rows: int, key_columns: int, window: int, pinned: bool) -> Tensor:
    """For each pair of a tile's queries and the keys that pass by, the slot of the key in the query's square, or −1.

    Kept on the host: what is kept on a device may be made while a CUDA graph is, and lie in memory that is the graph's.
    """
    down = torch.arange(key_rows) - torch.arange(rows)[:, None]
    over = torch.arange(key_columns) - torch.arange(columns)[:, None]
    taken = [(slot >= 0) & (slot < window) for slot in (down, over)]
    number = down[:, None, :, None] * window + over[None, :, None, :]
    slots = torch.where(taken[0][:, None, :, None] & taken[1][None, :, None, :], number, -1).flatten()
    return slots.pin_memory() if pinned else slots
