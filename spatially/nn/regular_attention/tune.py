"""Which shapes of tiles are fastest on this GPU: measures the kernels, prints the best, and extends the table.

python -m spatially.nn.regular_attention.tune --windows 7 --grids 56 28 14 7 --heads 3 --size 32 --write shapes.json
SPATIALLY_SHAPES=shapes.json python train.py        # where they are then looked up first
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from spatially.nn.regular_attention import operations
from spatially.nn.regular_attention.shapes import (
    KERNELS,
    LEAST_KEYS,
    MOST_KEYS,
    Problem,
    Shape,
    forced,
    row,
    usual,
    write,
)


def candidates(problem: Problem, arguments: argparse.Namespace) -> Iterator[Shape]:
    """Tiles, chunks of key rows, warps, stages and registers to try."""
    if problem.kernel == "backward_bias":
        yield from (replace(usual(problem), steps=steps) for steps in arguments.steps)
        return
    for tile, chunk, warps, stages, registers in itertools.product(
        arguments.tiles, arguments.chunks, arguments.warps, arguments.stages, arguments.registers
    ):
        rows, columns = map(int, tile.split("x"))
        shape = Shape(rows, columns, chunk, warps, stages, registers or None)
        if LEAST_KEYS <= problem.keys(shape) <= MOST_KEYS and warps <= max(1, rows * columns // 16):
            yield shape


def measure(kernel: str, packed: Tensor, bias: Tensor | None, window: int, shape: Shape, repeats: int = 10) -> float:
    """Milliseconds of one kernel with this shape."""
    scale = packed.shape[-1] ** -0.5
    with forced(kernel, shape):
        out, lse = operations.attention([packed], bias, window, "mask", scale)
        slope = torch.randn_like(out)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            for _ in range(repeats):
                if kernel == "forward":
                    operations.attention([packed], bias, window, "mask", scale)
                else:
                    operations.backward([packed], bias, out, lse, slope, window, "mask", scale, bias is not None)
            torch.cuda.synchronize()
        (event,) = [event for event in profile.key_averages() if event.key == kernel]
        return event.self_device_time_total / event.count / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, nargs="+", default=[7])
    parser.add_argument("--grids", type=int, nargs="+", default=[56, 28, 14, 7])
    parser.add_argument("--heads", type=int, default=3, help="at the first grid; they double as the grid halves")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bias", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--tiles", nargs="+", default=["4x8", "2x8"])
    parser.add_argument("--chunks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--warps", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--stages", type=int, nargs="+", default=[2, 3, 4])
    parser.add_argument("--registers", type=int, nargs="+", default=[0, 128, 168], help="at most; 0 is no limit")
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 2, 4, 8, 14], help="of the bias's gradient")
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS))
    parser.add_argument("--write", type=Path, help="extend this table with the fastest")
    arguments = parser.parse_args()
    chip = torch.cuda.get_device_name()
    for window, grid in itertools.product(arguments.windows, arguments.grids):
        heads = arguments.heads * max(arguments.grids) // grid
        packed = torch.randn(arguments.batch, grid, grid, 3, heads, arguments.size, device="cuda").to(
            getattr(torch, arguments.dtype)
        )
        bias = torch.randn(heads, window, window, device="cuda") if arguments.bias else None
        for kernel in arguments.kernels:
            if kernel == "backward_bias" and bias is None:
                continue
            problem = Problem(kernel, grid, grid, window, arguments.size, packed.element_size(), bias is not None)
            times = []
            for shape in candidates(problem, arguments):
                try:
                    times.append((measure(kernel, packed, bias, window, shape), shape))
                except Exception as error:
                    print(kernel, shape, type(error).__name__, str(error).splitlines()[0][:80])
            times.sort(key=lambda one: one[0])
            for time, shape in times[:4]:
                print(f"{kernel:17} window {window} grid {grid:3} heads {heads:3}: {time:.4f} ms {shape}", flush=True)
            if not times:
                print(
                    f"{kernel:17} window {window} grid {grid:3}: no shape runs; try other tiles and chunks", flush=True
                )
                continue
            if arguments.write:
                write(arguments.write, [row(problem, chip, times[0][1])])


if __name__ == "__main__":
    main()
