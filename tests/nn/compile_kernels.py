"""Compile every kernel for a GPU that need not be there; run by `test_kernels.py` in a process without the interpreter."""

import sys

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from spatially.nn.regular_attention import kernels

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


def compile_kernel(name: str, border: int, capability: int) -> None:
    """To PTX, the last form before the chip's own, for bfloat16."""
    kernel, (own, passing) = getattr(kernels, name), OWN[name]
    given = {**COMMON, **CHOICES, **own, "BORDER": border}
    constants = {argument: given[argument] for argument in kernel.arg_names if argument in given}

    def kind(argument: str) -> str:
        if argument in constants:
            return "constexpr"
        if argument.removeprefix("edge_") in passing:
            return f"tensordesc<bf16[1, 1, {'4, 8' if argument.startswith('edge') else '2, 16'}, 32]>"
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
