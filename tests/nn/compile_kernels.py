"""Compile every kernel for a GPU that need not be there; run by `test_kernels.py` in a process without the interpreter."""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spatially.nn.regular_attention import kernels
from spatially.nn.regular_attention.field import BORDERS
from spatially.nn.regular_attention.launch import Launch
from spatially.nn.regular_attention.shapes import Problem, choose

NUMBERS = ("scale", "plain_scale")
SUMS = ("table", "lse", "delta", "partial")
COMMON = {"size": 32, "WINDOW": 7, "ROWS": 4, "COLUMNS": 8, "CHUNKS": 5, "CHUNK": 2, "SIZE": 32, "PRECISION": "tf32"}
OWN = {
    "forward": ({"LIMIT": 2.0**64, "EDGE": True, "EDGE_KCOLUMNS": 8}, ("key", "value")),
    "backward_queries": ({}, ("key", "value")),
    "backward_keys": ({}, ("query", "gradient")),
    "backward_bias": ({"STEPS": 2, "SLOTS": 64}, ("key", "value")),
}
CHOICES = {"BIAS": True, "NARROW": False, "KCOLUMNS": 16}
SHARED_BYTES = 99 * 1024  # that a program may take on the smallest of the GPUs that the kernels are for


def chosen(name: str, side: int, border: str, dtype: torch.dtype, chip: str) -> dict[str, object]:
    """What a launch chooses for a grid that is narrower than a tile."""
    problem = Problem(name, side, side, 7, 32, dtype.itemsize, False, border)
    launch = Launch(problem, 1, 1, dtype, torch.device("cpu"), choose(problem, chip))
    return launch._constants


def compile_kernel(name: str, border: int, capability: int, maps: str = "bf16", **choices: object) -> None:
    """To PTX, the last form before the chip's own."""
    kernel, (own, passing) = getattr(kernels, name), OWN[name]
    given = {**COMMON, **CHOICES, **own, "BORDER": border, **choices}
    block = f"{given['CHUNK']}, {given['KCOLUMNS']}"
    constants = {argument: given[argument] for argument in kernel.arg_names if argument in given}

    def kind(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if argument.removeprefix("edge_") in passing:
            return f"tensordesc<{maps}[1, 1, {'4, 8' if argument.startswith('edge') else block}, 32]>"
        if argument in SUMS:
            return "*fp32"
        if argument in NUMBERS:
            return "fp32"
        return f"*{maps}" if argument.split("_")[-1] in ("query", "key", "value", "out", "gradient") else "i32"

    source = ASTSource(
        kernel,
        {argument: kind(argument) for argument in kernel.arg_names},
        {(kernel.arg_names.index(argument),): value for argument, value in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 1})
    assert maps == "fp32" or "mma.sync" in compiled.asm["ptx"], name
    assert compiled.metadata.shared <= SHARED_BYTES, (name, border, maps, compiled.metadata.shared)
    print(name, border, capability, maps, compiled.metadata.shared)


if __name__ == "__main__":
    for name in OWN:
        for border in map(int, sys.argv[2:]):
            compile_kernel(name, border, int(sys.argv[1]))
        for side in (1, 4) if name != "backward_bias" else ():  # shapes that were measured on wider grids
            compile_kernel(name, 0, int(sys.argv[1]), **chosen(name, side, "mask", torch.bfloat16, "NVIDIA H200"))
    # Where tiles see beyond a narrow grid, by shapes that were measured nowhere.
    for name, border in (("forward", "zero"), ("backward_queries", "zero"), ("backward_keys", "shift")):
        choices = chosen(name, 2, border, torch.float32, "another chip")
        compile_kernel(name, BORDERS.index(border), int(sys.argv[1]), "fp32", **choices)
