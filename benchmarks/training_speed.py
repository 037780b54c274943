"""Does training cost no more with our models than with timm's?

Forward and backward of each of our models and of its twin in timm, in one process, on the same images, with equal weights:
first their logits are compared, then the two alternate, and the ratio is the median over rounds, since machines are noisy.
Which of the two goes first changes with every round, so that a machine that drifts does not favour either.

    python benchmarks/training_speed.py                                        # CPU
    python benchmarks/training_speed.py --device cuda --batch 128 --bfloat16   # a GPU
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import timm
import torch
from torch import Tensor, nn

from spatially.probes.base import device_name

# Our name, the family it is in, timm's name.
PAIRS = {
    "pit_small": ("spatially.models.pit", "pit_s_224"),
    "swin_tiny": ("spatially.models.swin", "swin_tiny_patch4_window7_224"),
}
TARGET = 1.02


def twins(name: str, images: Tensor) -> tuple[nn.Module, nn.Module, float]:
    """Our model with timm's weights, timm's own, both in training, and the largest difference of their logits before."""
    family, peer = import_module(PAIRS[name][0]), PAIRS[name][1]
    theirs = timm.create_model(peer, drop_path_rate=0.0).to(images.device).eval()
    ours = timm.create_model(name, drop_path_rate=0.0).to(images.device).eval()
    ours.load_state_dict(family.checkpoint_filter(theirs.state_dict(), ours))
    with torch.inference_mode():
        difference = (ours(images) - theirs(images)).abs().max().item()
    return ours.train(), theirs.train(), difference


def seconds(model: nn.Module, images: Tensor, labels: Tensor, passes: int, half: bool) -> float:
    """How long so many forward and backward passes take."""
    device = images.device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(passes):
        model.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=half):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def compare(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one pair."""
    torch.manual_seed(0)
    images = torch.randn(given.batch, 3, 224, 224, device=given.device)
    labels = torch.arange(given.batch, device=given.device) % 1000
    ours, theirs, difference = twins(name, images)
    models = {"ours": ours, "timm": theirs}
    for model in models.values():
        seconds(model, images, labels, 2, given.bfloat16)
    rounds = []
    for number in range(given.rounds):
        order = ("ours", "timm") if number % 2 else ("timm", "ours")
        took = {who: seconds(models[who], images, labels, given.passes, given.bfloat16) for who in order}
        speed = {who: given.passes * given.batch / took[who] for who in models}
        rounds.append({**speed, "ratio": took["ours"] / took["timm"]})
    return {
        "timm's": PAIRS[name][1],
        "largest difference of logits": difference,
        "ours images/s": median(one["ours"] for one in rounds),
        "timm images/s": median(one["timm"] for one in rounds),
        "time ours/timm": median(one["ratio"] for one in rounds),
        "rounds": rounds,
    }


def command(given: argparse.Namespace) -> str:
    """The options as they are typed."""
    words = ["python benchmarks/training_speed.py --models", *given.models]
    for name in ("device", "batch", "passes", "rounds", "threads"):
        if getattr(given, name) is not None:
            words += [f"--{name}", str(getattr(given, name))]
    return " ".join([*words, *["--bfloat16"] * given.bfloat16])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--passes", type=int, default=2, help="forward and backward passes of each model a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--threads", type=int, help="default: what PyTorch takes")
    parser.add_argument("--bfloat16", action="store_true", help="under autocast")
    parser.add_argument("--json", type=Path, help="write the results here")
    given = parser.parse_args()
    if given.threads:
        torch.set_num_threads(given.threads)
    results = {}
    print(f"{'model':>12} {'ours images/s':>14} {'timm images/s':>14} {'time ours/timm':>15} {'logits differ':>14}")
    for name in given.models:
        results[name] = one = compare(name, given)
        speeds = f"{one['ours images/s']:14.2f} {one['timm images/s']:14.2f} {one['time ours/timm']:15.3f}"
        print(f"{name:>12} {speeds} {one['largest difference of logits']:14.1e}", flush=True)
    target = f"time ours/timm ≤ {TARGET}"
    reached = all(one["time ours/timm"] <= TARGET for one in results.values())
    print("reached" if reached else "NOT reached", target)
    if given.json:
        device = torch.device(given.device)
        table = {
            "command": command(given),
            "machine": f"{device_name(device)}, {platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__},
            "models": results,
            "target": target,
        }
        given.json.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
