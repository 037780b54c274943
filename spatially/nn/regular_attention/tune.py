"""Which shapes of tiles are fastest on this GPU: measures the kernels, and says what the table should hold.

python -m spatially.nn.regular_attention.tune --windows 7 --grids 56 28 14 7 --heads 3 --size 32 --batch 128
"""

import argparse
import itertools
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from spatially.nn.regular_attention import operations
from spatially.nn.regular_attention.shapes import KERNELS, Shape


def candidates(kernel: str, window: int, arguments: argparse.Namespace) -> Iterator[Shape]:
    """Tiles, chunks of key rows, warps and stages to try; one step of keys should be no more than 128."""
    usual = operations.choose(kernel, height=56, width=56, window=window, size=arguments.size)
    if kernel == "backward_bias":
        yield from (replace(usual, steps=steps) for steps in (1, 2, 4, 8, 14, 28))
        return
    for tile, chunk, warps, stages in itertools.product(
        arguments.tiles, arguments.chunks, arguments.warps, arguments.stages
    ):
        rows, columns = map(int, tile.split("x"))
        shape = Shape(rows, columns, chunk, warps, stages)
        if 16 <= chunk * shape.keys(window)[1] <= 128 and warps <= max(1, rows * columns // 16):
            yield shape


def measure(kernel: str, packed: Tensor, bias: Tensor | None, window: int, shape: Shape, repeats: int = 10) -> float:
    """Milliseconds of one kernel with this shape, with nothing of its input left in the cache."""
    usual = operations.choose
    operations.choose = lambda name, **problem: shape if name == kernel else usual(name, **problem)
    flush = torch.empty(64 * 1024 * 1024, dtype=torch.int32, device="cuda")
    scale = packed.shape[-1] ** -0.5
    try:
        out, lse = operations.attention([packed], bias, window, "mask", scale)
        slope = torch.randn_like(out)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
            for _ in range(repeats):
                flush.zero_()
                if kernel == "forward":
                    operations.attention([packed], bias, window, "mask", scale)
                else:
                    operations.backward([packed], bias, out, lse, slope, window, "mask", scale, bias is not None)
            torch.cuda.synchronize()
        (event,) = [event for event in profile.key_averages() if event.key == kernel]
        return event.self_device_time_total / event.count / 1e3
    finally:
        operations.choose = usual


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, nargs="+", default=[7])
    parser.add_argument("--grids", type=int, nargs="+", default=[56, 28, 14, 7])
    parser.add_argument("--heads", type=int, default=3, help="at the first grid; they double as the grid halves")
    parser.add_argument("--size", type=int, default=32)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--bias", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--tiles", nargs="+", default=["2x8", "4x8", "4x4", "8x2", "8x8"])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--warps", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--stages", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--kernels", nargs="+", default=list(KERNELS))
    arguments = parser.parse_args()
    for window, grid in itertools.product(arguments.windows, arguments.grids):
        heads = arguments.heads * max(arguments.grids) // grid
        packed = torch.randn(arguments.batch, grid, grid, 3, heads, arguments.size, device="cuda").to(
            getattr(torch, arguments.dtype)
        )
        bias = torch.randn(heads, window, window, device="cuda") if arguments.bias else None
        for kernel in arguments.kernels:
            found = []
            for shape in candidates(kernel, window, arguments):
                try:
                    found.append((measure(kernel, packed, bias, window, shape), shape))
                except Exception as error:
                    print(kernel, shape, type(error).__name__, str(error).splitlines()[0][:80])
            found.sort(key=lambda one: one[0])
            for time, shape in found[:6]:
                print(f"{kernel:17} window {window} grid {grid:3} heads {heads:3}: {time:.4f} ms {shape}", flush=True)


if __name__ == "__main__":
    main()
