"""Does training cost no more with our models than with timm's?

Forward and backward of each of our models and of its peer in timm, in one process, on the same images: the two alternate,
and the ratio is the median over rounds, since machines are noisy. Which of the two goes first changes with every round, so
that a machine that drifts does not favour either. A twin gets timm's weights, and their logits are compared first; a Swin with
receptive fields of its own is another function, compared with timm's Swin in cost alone. On a GPU inference, the peak of
memory in training, and whole steps with AdamW are measured too.

    python benchmarks/training_speed.py                                                  # CPU
    python benchmarks/training_speed.py --models swin_tiny_r swin_tiny_m --device cuda --batch 128 --bfloat16 --compile \\
        --mode reduce-overhead
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
from torch import Tensor, nn

from spatially.probes.base import device_name

# Our name, timm's name, the family whose weights are timm's (or none), and the aim: time ours/timm at most.
PAIRS: dict[str, tuple[str, str | None, float]] = {
    "pit_small": ("pit_s_224", "spatially.models.pit", 1.02),
    "swin_tiny": ("swin_tiny_patch4_window7_224", "spatially.models.swin", 1.02),
    "swin_tiny_r": ("swin_tiny_patch4_window7_224", None, 0.9),
    "swin_tiny_m": ("swin_tiny_patch4_window7_224", None, 1.0),
}


def pair(name: str, images: Tensor) -> tuple[dict[str, nn.Module], float | None]:
    """Our model and timm's, both in training; and the largest difference of their logits where they are twins."""
    peer, family, _ = PAIRS[name]
    theirs = timm.create_model(peer, drop_path_rate=0.0).to(images.device).eval()
    ours = timm.create_model(name, drop_path_rate=0.0).to(images.device).eval()
    difference = None
    if family is not None:
        ours.load_state_dict(import_module(family).checkpoint_filter(theirs.state_dict(), ours))
        with torch.inference_mode():
            difference = (ours(images) - theirs(images)).abs().max().item()
    return {"ours": ours.train(), "timm": theirs.train()}, difference


Pass = Callable[[], object]


def passes(model: nn.Module, images: Tensor, labels: Tensor, given: argparse.Namespace) -> dict[str, Pass]:
    """What is timed of a model: forward and backward; on a GPU also whole steps with AdamW, and inference."""
    device = images.device
    run = torch.compile(model, mode=given.mode) if given.compile else model

    def forward_and_backward() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=given.bfloat16):
            loss = nn.functional.cross_entropy(run(images), labels)
        loss.backward()

    if device.type != "cuda":
        return {"training": forward_and_backward}
    optimiser = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)

    def step() -> None:
        forward_and_backward()
        optimiser.step()

    def inference() -> None:
        torch.compiler.cudagraph_mark_step_begin()
        with torch.inference_mode(), torch.autocast(device.type, dtype=torch.bfloat16, enabled=given.bfloat16):
            run(images)

    return {"training": step, "inference": inference}


def seconds(one: Pass, device: torch.device, count: int) -> float:
    """How long so many passes take."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(count):
        one()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def warm_up(one: Pass, device: torch.device) -> float | None:
    """Three passes; megabytes at the most meanwhile, beyond what was there before. CUDA graphs take none later on."""
    if device.type != "cuda":
        seconds(one, device, 3)
        return None
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    seconds(one, device, 3)
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


def compare(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one pair."""
    torch.manual_seed(0)
    torch.compiler.reset()
    images = torch.randn(given.batch, 3, 224, 224, device=given.device)
    labels = torch.arange(given.batch, device=given.device) % 1000
    models, difference = pair(name, images)
    device = images.device
    timed = {who: passes(model, images, labels, given) for who, model in models.items()}
    result: dict[str, Any] = {"timm's": PAIRS[name][0], "largest difference of logits": difference}
    for what in timed["ours"]:
        for model in models.values():
            model.train(what == "training")
        peaks = {f"{who} peak MB": warm_up(timed[who][what], device) for who in models}
        rounds = []
        for number in range(given.rounds):
            order = ("ours", "timm") if number % 2 else ("timm", "ours")
            took = {who: seconds(timed[who][what], device, given.passes) for who in order}
            speed = {who: given.passes * given.batch / took[who] for who in models}
            rounds.append({**speed, "ratio": took["ours"] / took["timm"]})
        result[what] = {
            "ours images/s": median(one["ours"] for one in rounds),
            "timm images/s": median(one["timm"] for one in rounds),
            "time ours/timm": median(one["ratio"] for one in rounds),
            **peaks,
            "rounds": rounds,
        }
    return result


def command(given: argparse.Namespace) -> str:
    """The options as they are typed."""
    words = ["python benchmarks/training_speed.py --models", *given.models]
    for name in ("device", "batch", "passes", "rounds", "threads", "mode"):
        if getattr(given, name) is not None:
            words += [f"--{name}", str(getattr(given, name))]
    return " ".join([*words, *["--bfloat16"] * given.bfloat16, *["--compile"] * given.compile])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(PAIRS), default=["pit_small", "swin_tiny"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--passes", type=int, default=2, help="forward and backward passes of each model a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, help="default: what PyTorch takes")
    parser.add_argument("--bfloat16", action="store_true", help="under autocast")
    parser.add_argument("--compile", action="store_true", help="both models by torch.compile")
    parser.add_argument("--mode", help="of torch.compile; reduce-overhead launches whole steps as CUDA graphs")
    parser.add_argument("--json", type=Path, help="write the results here")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    results = {}
    print(
        f"{'model':>12} {'what':>10} {'ours images/s':>14} {'timm images/s':>14} {'time ours/timm':>15} {'peak MB':>17}"
    )
    verdicts = []
    for name in given.models:
        results[name] = compare(name, given)
        for what in ("training", "inference"):
            if (one := results[name].get(what)) is None:
                continue
            memory = " / ".join(f"{one[f'{who} peak MB']:.0f}" for who in ("ours", "timm") if one[f"{who} peak MB"])
            speeds = f"{one['ours images/s']:14.2f} {one['timm images/s']:14.2f} {one['time ours/timm']:15.3f}"
            print(f"{name:>12} {what:>10} {speeds} {memory:>17}", flush=True)
        if (difference := results[name]["largest difference of logits"]) is not None:
            print(f"{name:>12} logits differ by {difference:.1e} at most")
        training, aim = results[name]["training"], PAIRS[name][2]
        verdicts.append(
            (f"{name}: time ours/timm {training['time ours/timm']:.3f} ≤ {aim}", training["time ours/timm"] <= aim)
        )
        if training["ours peak MB"]:
            held = training["ours peak MB"] <= training["timm peak MB"]
            verdicts.append((f"{name}: peak memory in training not above timm's", held))
    for text, held in verdicts:
        print("reached:" if held else "NOT reached:", text)
    if given.json:
        device = torch.device(given.device)
        table = {
            "command": command(given),
            "machine": f"{device_name(device)}, {platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__},
            "models": results,
            "aims": {text: "reached" if held else "NOT reached" for text, held in verdicts},
        }
        given.json.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
