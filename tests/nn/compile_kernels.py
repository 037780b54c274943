"""Compile every kernel for a GPU that need not be there; run by `test_kernels.py` in a process without the interpreter."""

import sys

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spatially.nn.regular_attention import kernels
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


def narrow(name: str, side: int, window: int) -> dict[str, object]:
    """What a launch chooses for a grid that is narrower than a tile, on a chip whose shapes were measured on wider ones."""
    shape = choose(Problem(name, side, side, window, 32, 2, False), "NVIDIA H200")
    launch = Launch(name, (1, side, side, 1, 32), torch.bfloat16, torch.device("cpu"), False, window, "mask", shape)
    return launch._constants


def compile_kernel(name: str, border: int, capability: int, **choices: object) -> None:
    """To PTX, the last form before the chip's own, for bfloat16."""
    kernel, (own, passing) = getattr(kernels, name), OWN[name]
    given = {**COMMON, **CHOICES, **own, "BORDER": border, **choices}
    block = f"{given['CHUNK']}, {given['KCOLUMNS']}"
    constants = {argument: given[argument] for argument in kernel.arg_names if argument in given}

    def kind(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if argument.removeprefix("edge_") in passing:
            return f"tensordesc<bf16[1, 1, {'4, 8' if argument.startswith('edge') else block}, 32]>"
        if argument in SUMS:
            return "*fp32"
        if argument in NUMBERS:
            return "fp32"
        return "*bf16" if argument.split("_")[-1] in ("query", "key", "value", "out", "gradient") else "i32"

    source = ASTSource(
        kernel,
        {argument: kind(argument) for argument in kernel.arg_names},
        {(kernel.arg_names.index(argument),): value for argument, value in constants.items()},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 1})
    assert "mma.sync" in compiled.asm["ptx"], name
    print(name, border, capability)


if __name__ == "__main__":
    for name in OWN:
        for border in map(int, sys.argv[2:]):
            compile_kernel(name, border, int(sys.argv[1]))
        for side in (1, 4) if name != "backward_bias" else ():
            compile_kernel(name, 0, int(sys.argv[1]), **narrow(name, side, 7))
