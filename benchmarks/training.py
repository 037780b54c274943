"""Does our training step keep up with timm's, and does a small set that lies on the GPU train faster than through a loader?

`step`: images/s of whole training steps (bf16, the recipe's optimiser, clipping and stochastic depth) on one batch that lies
ready: our models by our loop's step, timm's by a plain step as its training script has it. The two alternate; which goes first
changes with every round, and the ratio is the median over rounds.

`resident`: seconds an epoch of a recipe for small images takes when the set lies on the device, next to the usual way (timm's
transforms in the workers of a DataLoader, timm's Mixup on the device), with the same model and the same step; and next to the
same number of steps on a batch that lies ready, which nothing can beat. The share of time in which the GPU is busy is
nvidia-smi's.

    python benchmarks/training.py step --device cuda --compile --json benchmarks/results/training-step-h200.json
    python benchmarks/training.py resident --device cuda --compile --json benchmarks/results/training-resident-h200.json
    python benchmarks/training.py --batch 2 --rounds 2 --passes 1 --images 64 --batch-small 8 --model resnet18 --workers 1
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import timm
import torch
from timm.data import Mixup
from torch import nn
from torch.utils.data import DataLoader
from training_peers import MEAN, STD, Busy, Pictures, Step, timms_step, usual_way

from spatially.data import Shapes
from spatially.probes.base import device_name
from spatially.train.batch import Batch
from spatially.train.build import build_model
from spatially.train.data import open_training
from spatially.train.library import read_recipe
from spatially.train.recipe import Recipe
from spatially.train.step import training_step

# Our name, timm's name, and the recipe whose step is taken.
PAIRS = {"swin_tiny": ("swin_tiny_patch4_window7_224", "swin"), "pit_small": ("pit_s_224", "deit")}
STEP_AIM, RESIDENT_AIM, BUSY_AIM = 1.0, 3.0, 0.9


def recipe_for(name: str, given: argparse.Namespace, **changes: Any) -> Recipe:
    """A recipe with this run's precision and compilation."""
    precision = "bf16" if given.device.startswith("cuda") else "fp32"
    return read_recipe(name).override({"run.precision": precision, "run.compile": given.compile, **changes})


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds(step: Step, batches: Iterable[Batch], device: torch.device) -> tuple[float, int]:
    """How long training on these batches takes, and how many there were."""
    synchronise(device)
    start, count = time.perf_counter(), 0
    for batch in batches:
        step(batch)
        count += 1
    synchronise(device)
    return time.perf_counter() - start, count


def measure_steps(name: str, given: argparse.Namespace) -> dict[str, Any]:
    """All rounds of one of our models and its peer."""
    peer, recipe_name = PAIRS[name]
    device = torch.device(given.device)
    torch.manual_seed(0)
    torch.compiler.reset()
    recipe = recipe_for(recipe_name, given, batch=given.batch)
    ours = build_model(name, recipe=recipe, classes=1000, size=(224, 224)).model
    theirs = timm.create_model(peer, drop_path_rate=recipe.regularisation.drop_path)
    steps = {"ours": training_step(ours, recipe, device=device), "timm": timms_step(theirs, recipe, device)}
    labels = torch.arange(given.batch, device=device) % 1000
    targets = nn.functional.one_hot(labels, 1000).float()
    ready = Batch(torch.randn(given.batch, 3, 224, 224, device=device), targets, labels)
    for step in steps.values():
        seconds(step, [ready] * 5, device)
    rounds = []
    for number in range(given.rounds):
        order = ("ours", "timm") if number % 2 else ("timm", "ours")
        took = {who: seconds(steps[who], [ready] * given.passes, device)[0] for who in order}
        speed = {who: given.passes * given.batch / took[who] for who in ("ours", "timm")}
        rounds.append({**speed, "ratio": took["timm"] / took["ours"]})
    return {
        "timm's": peer,
        "recipe": recipe_name,
        "ours images/s": median(one["ours"] for one in rounds),
        "timm images/s": median(one["timm"] for one in rounds),
        "ours/timm": median(one["ratio"] for one in rounds),
        "rounds": rounds,
    }


def measure_resident(given: argparse.Namespace) -> dict[str, Any]:
    """One epoch each way, after a few steps that count for nothing."""
    device = torch.device(given.device)
    recipe = recipe_for(given.recipe, given, **({"batch": given.batch_small} if given.batch_small else {}))
    size = (32, 32)
    shapes = Shapes(size=size, families=8, seed=1)
    pieces = [shapes.images(torch.arange(a, min(a + 512, given.images))) for a in range(0, given.images, 512)]
    pixels, labels = (torch.cat(parts).numpy() for parts in zip(*pieces, strict=True))
    source = {"train": (pixels, labels), "validation": (pixels[:64], labels[:64]), "classes": shapes.classes}
    options: dict[str, Any] = {"recipe": recipe, "size": size, "mean": MEAN, "std": STD, "device": device}
    resident = open_training(source, resident=True, **options)[0]
    model = build_model(given.model, recipe=recipe, classes=len(shapes.classes), size=size).model
    step = training_step(model, recipe, device=device)
    wanted = recipe.augmentation
    workers = given.workers if given.workers is not None else os.cpu_count() or 1
    loader = DataLoader(
        Pictures(np.ascontiguousarray(pixels.transpose(0, 2, 3, 1)), labels, recipe),
        batch_size=recipe.batch,
        shuffle=True,
        drop_last=True,
        num_workers=workers,
        pin_memory=device.type == "cuda",
        persistent_workers=workers > 0,
    )
    mixup = Mixup(
        wanted.mixup,
        wanted.cutmix,
        prob=wanted.mix_probability,
        switch_prob=wanted.mix_switch,
        label_smoothing=recipe.regularisation.smoothing,
        num_classes=len(shapes.classes),
    )
    ready = next(iter(resident.batches(0)))
    ways: dict[str, Callable[[int], Iterable[Batch]]] = {
        "resident": lambda epoch: resident.batches(epoch),
        "CPU loader": lambda epoch: usual_way(loader, mixup, device),
        "ready batch": lambda epoch: [ready] * resident.steps_per_epoch,
    }
    result: dict[str, Any] = {"images": given.images, "batch": recipe.batch, "workers": workers, "model": given.model}
    seconds(step, [ready] * 5, device)
    for name, batches in ways.items():
        seconds(lambda batch: None, batches(0), device)  # workers start, graphs are captured
        with Busy(device) as busy:
            took, count = zip(
                *(seconds(step, batches(epoch), device) for epoch in range(1, 1 + given.epochs)), strict=True
            )
        epoch_seconds = median(took)
        result[name] = {"seconds an epoch": epoch_seconds, "steps": count[0], "GPU busy": busy.share, "epochs": took}
        result[name]["images/s"] = count[0] * recipe.batch / epoch_seconds
    alone, count = seconds(lambda batch: None, resident.batches(1), device)
    result["making a batch, ms"] = 1000 * alone / count
    result["CPU loader/resident"] = result["CPU loader"]["seconds an epoch"] / result["resident"]["seconds an epoch"]
    result["ready batch/resident"] = result["ready batch"]["seconds an epoch"] / result["resident"]["seconds an epoch"]
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", help="step, resident; default: both")
    parser.add_argument("--models", nargs="+", choices=list(PAIRS), default=list(PAIRS), help="of the section step")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=128, help="of the section step")
    parser.add_argument("--passes", type=int, default=10, help="steps of each model a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--model", default="vit_tiny_patch16_224", help="of the section resident")
    parser.add_argument("--recipe", default="park-cifar", help="of the section resident")
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--batch-small", type=int, help="of the section resident; default: the recipe's")
    parser.add_argument("--epochs", type=int, default=2, help="timed, each way")
    parser.add_argument("--workers", type=int, help="of the CPU loader; default: one a processor")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results here")
    given = parser.parse_args()
    sections = given.sections or ["step", "resident"]
    if unknown := set(sections) - {"step", "resident"}:
        parser.error(f"unknown section {', '.join(sorted(unknown))}: choose from step, resident")
    results: dict[str, Any] = {}
    verdicts: list[tuple[str, bool]] = []
    if "step" in sections:
        results["step"] = {name: measure_steps(name, given) for name in given.models}
        for name, one in results["step"].items():
            print(f"{name}: ours {one['ours images/s']:.1f}, timm {one['timm images/s']:.1f} images/s", flush=True)
            verdicts.append(
                (f"{name}: speed ours/timm {one['ours/timm']:.3f} ≥ {STEP_AIM}", one["ours/timm"] >= STEP_AIM)
            )
    if "resident" in sections:
        one = results["resident"] = measure_resident(given)
        for name in ("resident", "CPU loader", "ready batch"):
            busy = "" if one[name]["GPU busy"] is None else f", GPU busy {one[name]['GPU busy']:.0%}"
            print(f"{name}: {one[name]['seconds an epoch']:.2f} s an epoch, {one[name]['images/s']:.0f} images/s{busy}")
        print(
            f"making a batch takes {one['making a batch, ms']:.2f} ms; of the possible speed {one['ready batch/resident']:.1%}"
        )
        ratio, busy = one["CPU loader/resident"], one["resident"]["GPU busy"]
        verdicts.append((f"resident {ratio:.2f} × faster than a CPU loader, ≥ {RESIDENT_AIM}", ratio >= RESIDENT_AIM))
        if busy is not None:
            verdicts.append((f"GPU busy {busy:.0%} ≥ {BUSY_AIM:.0%}", busy >= BUSY_AIM))
    for text, held in verdicts:
        print("reached:" if held else "NOT reached:", text)
    if given.json:
        device = torch.device(given.device)
        table = {
            "command": " ".join(["python benchmarks/training.py", *sys.argv[1:]]),
            "machine": f"{device_name(device)}, {platform.machine()}, {os.cpu_count()} processors",
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__},
            **results,
            "aims": {text: "reached" if held else "NOT reached" for text, held in verdicts},
        }
        given.json.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
