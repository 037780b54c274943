"""What a loss landscape costs, next to the bare forward passes it is made of, in the same run.

A grid of points over some images, from uint8 crops to the Dataset: directions, augmentation, weights of every point, losses.
Between its rows as many bare passes over the same batches, which lie ready on the device: the ratio should be at most 1.1.
Beside it the median ratio of single rows, without what is done once, which a disturbed machine changes less. And the usual
way: at every point a copy of the state dict is moved and loaded and the images are augmented again; measured at a few points
and scaled up.

    python benchmarks/landscape.py                                                  # CPU, a small grid
    python benchmarks/landscape.py --device cuda --points 21 --images 1024 --batch 256 --rounds 3
    python benchmarks/landscape.py --points 5 --images 8 --batch 8 --models vit_tiny_patch16_224 --json result.json
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import spatially
from spatially.data import Images
from spatially.perturb import training_batch
from spatially.perturb.pixels import as_float
from spatially.probes import Landscape
from spatially.probes.base import Measurer, Rows, cut, device_name
from spatially.probes.weight_paths import Plane

TARGET = 1.1
USUAL = 3  # points that the usual way is measured at


def random_images(count: int, size: tuple[int, int]) -> Images:
    """Noise: what a pass costs does not depend on what is seen."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, *size), dtype=np.uint8)
    numbers = np.arange(count)
    return Images(pixels=pixels, labels=numbers % 1000, index=numbers, description="noise", fingerprint="noise")


def seconds(work: Callable[[], Any], device: torch.device) -> float:
    """Of one call, the device's work included."""
    _wait(device)
    start = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def usual_way(subject: spatially.Subject, images: Images, *, batch: int, points: int) -> None:
    """Copies of the state dict, as scripts around the papers do it."""
    model = copy.deepcopy(subject.model)
    start = copy.deepcopy(model.state_dict())
    directions = Plane(model, seed=0).directions
    for number in range(points):
        moved = copy.deepcopy(start)
        for name in directions[0]:
            moved[name] = start[name] + number * 0.1 * directions[0][name] + number * 0.2 * directions[1][name]
        model.load_state_dict(moved)
        total = 0.0
        for rows in cut(images, batch=batch, seed=0):
            pixels, labels, index = images.batch(rows, subject.device)
            shown, targets = training_batch(pixels, labels, index=index, classes=1000)
            with subject.precision():
                logits = model(subject.normalise(shown))
            total += float(cross_entropy(logits.float(), targets, reduction="sum"))


@torch.inference_mode()
def measure(subject: spatially.Subject, images: Images, *, points: int, batch: int, rounds: int) -> dict[str, Any]:
    """Seconds of the landscape, of as many bare passes in between, and of the usual way."""
    ready = [as_float(images.batch(rows, subject.device)[0]) for rows in cut(images, batch=batch, seed=0)]
    view = subject.align(images.classes, images.labels)

    def bare(times: int) -> None:
        for _ in range(times):
            for pixels in ready:
                view(pixels)

    Landscape(points=2).run(subject, images, batch=batch)
    found: dict[str, list[float]] = {name: [] for name in ("landscape", "bare", "ratio", "ratio of rows")}
    for _ in range(rounds):
        whole, rows = one_round(subject, images, bare, points=points, batch=batch)
        found["landscape"].append(whole)
        found["bare"].append(sum(passes for _, passes in rows))
        found["ratio"].append(whole / found["bare"][-1])
        found["ratio of rows"].append(median(own / passes for own, passes in rows))
    usual = seconds(lambda: usual_way(subject, images, batch=batch, points=USUAL), subject.device)
    return {**found, "usual way, scaled up": usual / USUAL * points**2}


def one_round(
    subject: spatially.Subject, images: Images, bare: Callable[[int], None], *, points: int, batch: int
) -> tuple[float, list[tuple[float, float]]]:
    """Seconds of a landscape, and of its rows and the bare passes of each.

    The two take turns, row by row and each first in every other row, so that a disturbance of some seconds meets both. What
    ``Landscape.run`` does before, between and after its points counts as the landscape's.
    """
    begun = time.perf_counter()
    rows: list[tuple[float, float]] = []
    others = 0.0

    def pause() -> float:
        """The bare passes of a row, which are not the landscape's."""
        nonlocal others
        passed = seconds(lambda: bare(points), subject.device)
        others += passed
        return passed

    class Alternating(Landscape):
        def measurer(self, subject: spatially.Subject, images: Images, *, batch: int) -> Measurer:
            measure, state = super().measurer(subject, images, batch=batch), {"point": 0, "start": 0.0, "bare": 0.0}

            def point(numbers: Rows, *, stopped: Any = None) -> Any:
                row, place = divmod(int(state["point"]), points)
                if place == 0:
                    state["bare"] = pause() if row % 2 else 0.0
                    state["start"] = time.perf_counter()
                made = measure(numbers, stopped=stopped)
                if place == points - 1:
                    _wait(subject.device)
                    own = time.perf_counter() - state["start"]
                    rows.append((own, state["bare"] or pause()))
                state["point"] += 1
                return made

            return point

    Alternating(points=points).run(subject, images, batch=batch)
    _wait(subject.device)
    return time.perf_counter() - begun - others, rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="resnet50,vit_tiny_patch16_224")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--points", type=int, default=9)
    parser.add_argument("--images", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    results = {}
    for name in chosen.models.split(","):
        subject = spatially.load(name, pretrained=False, device=chosen.device, dtype=chosen.dtype)
        images = random_images(chosen.images, subject.preprocessing.input_size)
        found = measure(subject, images, points=chosen.points, batch=chosen.batch, rounds=chosen.rounds)
        results[name] = found
        ratio = median(found["ratio"])
        print(
            f"{name}: {chosen.points}×{chosen.points} points of {chosen.images} images in {median(found['landscape']):.2f} s,"
            f" bare passes {median(found['bare']):.2f} s, ratio {ratio:.3f}"
            f" ({'reached' if ratio <= TARGET else 'missed'}: ≤ {TARGET}),"
            f" of single rows {median(found['ratio of rows']):.3f};"
            f" the usual way {found['usual way, scaled up']:.2f} s"
        )
    if chosen.json is not None:
        where = {"machine": device_name(torch.device(chosen.device)), "system": platform.platform()}
        content = {"command": sys.argv, **where, "torch": torch.__version__, "target": TARGET, "results": results}
        chosen.json.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
