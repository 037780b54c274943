"""How fast is query-centred attention, and how much memory does it need, next to every other way at hand?

All ways run in one process on one packed projection, as a layer has it, and give its gradient; in turn, round by round.
Times are medians, and what counts is their ratio. With --apart the others get query, key and value as tensors of their own.
On a GPU each way is recorded once as a CUDA graph and replayed, since what Python spends on a launch is not in question; one
that cannot be recorded runs as it is, and its row says so. The floor is what must be moved at least: q, k, v once in and
the output once out; and for the backward pass the four of them and the incoming gradient in, and three gradients out.

    python benchmarks/regular_attention.py                                                    # CPU, batch 2, 56×56
    python benchmarks/regular_attention.py --grids 56 28 14 7                                 # heads double as Swin's do
    python benchmarks/regular_attention.py --device cuda --batch 128 --dtype bfloat16 --grids 56 28 14 7 --no-bias
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from attention_peers import OTHER_FUNCTIONS, PEERS
from rich.console import Console
from rich.table import Table
from torch import Tensor

from spatially.nn import regular_attention

Step = Callable[[], object]


def seconds(step: Step, device: torch.device, repeats: int) -> float:
    """Time of one step, over `repeats` in a row."""
    if device.type == "cuda":
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(repeats):
            step()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3 / repeats
    start = time.perf_counter()
    for _ in range(repeats):
        step()
    return (time.perf_counter() - start) / repeats


def peak_bytes(step: Step, device: torch.device) -> int:
    """The most that one step holds beyond what was there before."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        step()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


def steps(
    name: str, attend: Callable[..., Tensor], packed: Tensor, bias: Tensor | None, gradient: Tensor, *, apart: bool
) -> dict[str, Step]:
    """What is timed: forward alone, and with the backward pass."""
    parts = [packed]
    if apart and name != "ours":
        parts = [part.detach().clone().requires_grad_() for part in packed.unbind(3)]
    inputs = parts if bias is None else [*parts, bias]

    def function() -> Tensor:
        given = parts if name == "ours" or apart else packed.unbind(3)
        return attend(*given, bias)

    def forward() -> object:
        with torch.no_grad():
            return function()

    def both() -> object:
        return torch.autograd.grad(function(), inputs, gradient)

    return {"forward": forward, "forward+backward": both}


def recorded(step: Step) -> tuple[Step, bool]:
    """The step as a CUDA graph that is replayed, and whether it could be recorded."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    try:
        with torch.cuda.stream(side):
            for _ in range(3):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = step()
    except RuntimeError:
        torch.cuda.synchronize()
        return step, False
    graph.kept = kept, step  # type: ignore[attr-defined]  # what it reads and writes must stay where it is
    return graph.replay, True


def floor_bytes(packed: Tensor, what: str) -> int:
    """Bytes that must be moved: q, k, v, o; then q, k, v, o, do in and dq, dk, dv out."""
    one = packed.numel() // 3 * packed.element_size()
    return {"forward": 4, "forward+backward": 12}[what] * one


def error(
    name: str, attend: Callable[..., Tensor], packed: Tensor, bias: Tensor | None, gradient: Tensor, window: int
) -> tuple[float, float]:
    """Relative error of values and of gradients against the definition in float64, on two images."""
    few, slope = packed[:2].detach().requires_grad_(), gradient[:2]
    exact = few.detach().double().requires_grad_()
    out = attend(few, bias) if name == "ours" else attend(*few.unbind(3), bias)
    right = regular_attention(
        *exact.unbind(3), window=window, bias=None if bias is None else bias.double(), backend="reference"
    )
    apart = [
        (out, right),
        (torch.autograd.grad(out, few, slope)[0], torch.autograd.grad(right, exact, slope.double())[0]),
    ]
    values, slopes = (((a.double() - b).norm() / b.norm()).item() for a, b in apart)
    return values, slopes


def measure(options: argparse.Namespace, grid: int, heads: int) -> list[dict]:
    device, dtype = torch.device(options.device), getattr(torch, options.dtype)
    generator = torch.Generator().manual_seed(0)
    packed = torch.randn(options.batch, grid, grid, 3, heads, options.size, generator=generator)
    packed = packed.to(device, dtype).requires_grad_()
    gradient = torch.randn(options.batch, grid, grid, heads, options.size, generator=generator).to(device, dtype)
    bias = None
    if options.bias:
        bias = torch.randn(heads, options.window, options.window, generator=generator).to(device).requires_grad_()
    found: dict[str, dict[str, Step]] = {}
    rows = []
    for name in options.peers or PEERS:
        if "compiled" in name and device.type == "cpu" and not options.peers:
            continue
        try:
            attend = PEERS[name](options.window)
            if name == "dense mask" and grid > 28 and device.type == "cuda":
                raise ValueError("too large")
            if name == "dense mask" and grid > 56:
                raise ValueError("too large")
            accuracy = (None, None)
            if name not in OTHER_FUNCTIONS:
                accuracy = error(name, attend, packed, bias, gradient, options.window)
            found[name] = steps(name, attend, packed, bias, gradient, apart=options.apart)
            peaks = {what: peak_bytes(step, device) for what, step in found[name].items() if step() is not None}
            graph = device.type == "cuda"
            if graph:
                graphs = {what: recorded(step) for what, step in found[name].items()}
                found[name] = {what: step for what, (step, _) in graphs.items()}
                graph = all(worked for _, worked in graphs.values())
            rows.append(
                {"name": name, "grid": grid, "heads": heads, "graph": graph, "error": accuracy[0]}
                | {"gradient_error": accuracy[1], "peaks": peaks}
            )
        except Exception as reason:
            print(
                f"{name} left out at {grid}×{grid}: {type(reason).__name__}: {str(reason).splitlines()[0]}",
                file=sys.stderr,
            )
            found.pop(name, None)
    times: dict[tuple[str, str], list[float]] = {(name, what): [] for name in found for what in found[name]}
    repeats = {}
    for name, what in times:
        once = seconds(found[name][what], device, 1)
        repeats[name, what] = max(1, round(options.seconds / max(once, 1e-5)))
    for _ in range(options.rounds):
        for (name, what), values in times.items():
            values.append(seconds(found[name][what], device, repeats[name, what]))
    for row in rows:
        for what in found[row["name"]]:
            time_taken = median(times[row["name"], what])
            row[what] = {
                "milliseconds": time_taken * 1e3,
                "rounds": [value * 1e3 for value in times[row["name"], what]],
                "gigabytes_per_second": floor_bytes(packed, what) / time_taken / 1e9,
                "over_floor": time_taken * options.bandwidth / floor_bytes(packed, what),
                "peak_megabytes": row["peaks"][what] / 1e6,
                "over_ours": median(a / b for a, b in zip(times[row["name"], what], times["ours", what], strict=True))
                if "ours" in found
                else None,
            }
        del row["peaks"]
    return rows


def bandwidth(device: torch.device) -> float:
    """Bytes a second of a large copy, read and written."""
    source = torch.zeros(2**30 if device.type == "cuda" else 2**26, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * source.numel() / min(seconds(lambda: target.copy_(source), device, 3) for _ in range(5))


def judge(rows: list[dict], console: Console) -> None:
    """Say of each aim whether it was reached; they are for an H200, bfloat16, batch 128, heads of 32."""
    found = {(row["grid"], row["name"]): row for row in rows}
    for grid, factor in ((56, 2.2), (28, 2.2), (14, 3.0)):
        if (grid, "ours") in found:
            measured = found[grid, "ours"]["forward"]["over_floor"]
            verdict = "reached" if measured <= factor else "NOT reached"
            console.print(f"{verdict}: forward at {grid}×{grid} is {measured:.2f}× the memory floor (aim: ≤ {factor})")
    aims = {"FlexAttention": 5.0, "NATTEN": 5.0, "Swin windows, compiled": 3.0}
    for grid in sorted({row["grid"] for row in rows}, reverse=True):
        others = {row["name"]: row["forward+backward"]["over_ours"] for row in rows if row["grid"] == grid}
        others.pop("ours", None)
        wanted = {name: aims[name] for name in others if name in aims} if grid == 56 else {}
        if grid < 56 and others:
            wanted = {min(others, key=others.__getitem__): 2.0}
        for name, factor in wanted.items():
            verdict = "reached" if others[name] >= factor else "NOT reached"
            console.print(f"{verdict}: {others[name]:.1f}× faster than {name} at {grid}×{grid} (aim: ≥ {factor:g}×)")


def show(rows: list[dict], console: Console) -> None:
    table = Table(title="Attention over the square around each query; × ours: how many times as long")
    for column in (
        "grid",
        "way",
        "forward ms",
        "× floor",
        "× ours",
        "GB/s",
        "MB",
        "fwd+bwd ms",
        "× floor",
        "× ours",
        "GB/s",
        "MB",
        "error",
        "of gradients",
    ):
        table.add_column(column, justify="left" if column == "way" else "right")
    for row in rows:
        note = "" if row["graph"] or not torch.cuda.is_available() else " (no graph)"
        cells = [f"{row['grid']}×{row['grid']}", row["name"] + note]
        for what in ("forward", "forward+backward"):
            one = row[what]
            over = "" if one["over_ours"] is None else f"{one['over_ours']:.1f}"
            cells += [
                f"{one['milliseconds']:.3f}",
                f"{one['over_floor']:.1f}",
                over,
                f"{one['gigabytes_per_second']:.0f}",
                f"{one['peak_megabytes']:.1f}",
            ]
        cells += ["" if row[key] is None else f"{row[key]:.0e}" for key in ("error", "gradient_error")]
        table.add_row(*cells)
    console.print(table)


def environment(device: torch.device) -> dict[str, str | int]:
    """What it ran on."""
    import timm

    return {
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "timm": timm.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--grids", type=int, nargs="+", default=[56])
    parser.add_argument("--heads", type=int, default=3, help="at the first grid; they double as the grid halves")
    parser.add_argument("--size", type=int, default=32, help="of a head")
    parser.add_argument("--window", type=int, default=7)
    parser.add_argument("--bias", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--peers", nargs="+", choices=list(PEERS), help="all that run, unless given")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--seconds", type=float, default=0.02, help="how long one round of one way should take at least"
    )
    parser.add_argument("--apart", action="store_true", help="the others get query, key and value apart")
    parser.add_argument("--bandwidth", type=float, help="bytes a second of the floor; a large copy's, unless given")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    options.bandwidth = options.bandwidth or bandwidth(torch.device(options.device))
    torch.set_float32_matmul_precision("highest")
    rows = [row for grid in options.grids for row in measure(options, grid, options.heads * max(options.grids) // grid)]
    console = Console(width=170)
    show(rows, console)
    if options.device == "cuda":
        judge(rows, console)
    if options.json:
        result = {
            "command": "python benchmarks/regular_attention.py " + " ".join(sys.argv[1:]),
            "environment": environment(torch.device(options.device)),
            "bandwidth": options.bandwidth,
            "rows": rows,
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
