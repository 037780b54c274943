"""What looking inside costs, next to the bare model in the same run.

Sections, each a ratio of two things that alternate, the median over rounds:

* **stream**: Fourier and variance at every point of the residual stream in one pass, over the bare forward pass: ≤ 1.3;
  beside it, each probe as users run it, from uint8 crops to outcomes on the CPU.
* **receptive_field**: the probe as users run it, over a bare forward pass and backward pass to the input: at least 90 % of its
  speed; and how much faster an image is in a batch than alone: at least 10× on a GPU.
* **attention**: every weight of every attention layer computed while the model runs its own kernels, over the forward pass of
  the same model with attention written out (no fused kernels): ≤ 2; beside it, the interaction ratio as users run it, and on a
  GPU the most memory that watching takes beyond the bare model.

    python benchmarks/inside.py                                              # CPU
    python benchmarks/inside.py --device cuda                                # a GPU, bf16
    python benchmarks/inside.py --sections stream --models resnet50 --json benchmarks/results/inside-cpu.json
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import timm
import torch
from torch import Tensor, nn

import spatially
from spatially.data import Images
from spatially.observe import Layer, Place, Weights, attention, stream
from spatially.perturb.pixels import as_float
from spatially.probes import Fourier, InteractionRatio, ReceptiveField, Variance
from spatially.probes.ahead import in_turn, settled
from spatially.probes.base import Measurer, Rows, device_name
from spatially.probes.fourier import half_diagonal
from spatially.probes.layers import centre
from spatially.probes.map_numbers import Sums, finish, sum_up, takes
from spatially.probes.receptive_field import frozen
from spatially.probes.variance import spatial_variance


def random_images(count: int, size: tuple[int, int]) -> Images:
    """Noise: what a pass costs does not depend on what is seen."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, *size), dtype=np.uint8)
    numbers = np.arange(count)
    return Images(pixels=pixels, labels=numbers % 1000, index=numbers, description="noise", fingerprint="noise")


Work = Callable[[int], object]  # does a pass so many times


def repeated(once: Callable[[], object]) -> Work:
    """The same thing again and again."""

    def work(passes: int) -> None:
        for _ in range(passes):
            once()

    return work


def chunks(measure: Measurer, rows: Rows) -> Work:
    """The same chunk again and again, as a probe goes through its chunks."""

    def work(passes: int) -> None:
        for _ in in_turn(measure, [rows] * passes):
            pass

    return work


def seconds(work: Work, device: torch.device, passes: int) -> float:
    """Of one pass."""
    _wait(device)
    start = time.perf_counter()
    work(passes)
    _wait(device)
    return (time.perf_counter() - start) / passes


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def ratios(bare: Work, others: dict[str, Work], device: torch.device, *, rounds: int, passes: int) -> dict[str, float]:
    """Each of the others over bare, with bare on both sides of it, so that a machine that drifts favours neither."""
    for work in (bare, *others.values()):
        work(1)
    found: dict[str, list[float]] = {name: [] for name in others}
    bares = []
    for _ in range(rounds):
        before = seconds(bare, device, passes)
        for name, work in others.items():
            this = seconds(work, device, passes)
            after = seconds(bare, device, passes)
            found[name].append(2 * this / (before + after))
            before = after
        bares.append(before)
    return {"bare seconds a pass": median(bares), **{name: median(values) for name, values in found.items()}}


# Sections: subject, images of one batch and options → numbers by name, among them those with a target


@torch.inference_mode()
def measure_stream(subject: spatially.Subject, images: Images, *, rounds: int, passes: int) -> dict[str, float]:
    """Fourier and variance of every point against the bare forward pass."""
    rows = np.arange(len(images))
    pixels = as_float(images.batch(rows, subject.device)[0])

    def look(place: Place, map: Tensor) -> None:
        with torch.autocast(map.device.type, enabled=False):
            if takes(map):
                summed.append(sum_up(map))
            else:
                maps = centre(map)
                numbers.extend([half_diagonal(maps), spatial_variance(maps)])

    numbers: list[Tensor] = []
    summed: list[Sums] = []

    def both() -> None:
        numbers.clear()
        summed.clear()
        with stream(subject, look):
            subject(pixels)
        finish(summed)

    def nothing() -> None:
        with stream(subject, lambda place, map: None):
            subject(pixels)

    others = {
        "(Fourier + variance)/bare": repeated(both),
        "interception alone/bare": repeated(nothing),
        "Fourier probe/bare": chunks(Fourier().measurer(subject, images, batch=len(rows)), rows),
        "variance probe/bare": chunks(Variance().measurer(subject, images, batch=len(rows)), rows),
    }
    return ratios(repeated(lambda: subject(pixels)), others, subject.device, rounds=rounds, passes=passes)


def measure_receptive_field(
    subject: spatially.Subject, images: Images, *, rounds: int, passes: int
) -> dict[str, float]:
    """The probe against the gradient of the middle of the last map with respect to the input."""
    rows, probe = np.arange(len(images)), ReceptiveField()
    place, (row, column) = probe.target(subject)
    measure = probe.measurer(subject, images, batch=len(rows))
    shown = subject.normalise(as_float(images.batch(rows, subject.device)[0]))

    def bare() -> Tensor:
        pixels = shown.detach().clone().requires_grad_()
        with subject.precision():
            features = subject.model.forward_features(pixels)  # type: ignore[operator]
        if features.ndim == 3:
            middle = features[:, place.prefix + row * place.grid[1] + column]
        else:
            middle = features[:, row, column] if place.layout == "nhwc" else features[:, :, row, column]
        return torch.autograd.grad(middle.float().mean(1).sum(), pixels)[0]

    def alone() -> None:
        for one in rows[: min(len(rows), 4)]:
            settled(measure(rows[one : one + 1]))

    with frozen(subject.model):
        found = ratios(
            repeated(bare),
            {"field/bare": chunks(measure, rows), "one by one": repeated(alone)},
            subject.device,
            rounds=rounds,
            passes=passes,
        )
    share = len(rows) / min(len(rows), 4)
    each = found.pop("one by one") * share
    return {
        "bare seconds a pass": found["bare seconds a pass"],
        "field's speed/bare": 1 / found["field/bare"],
        "batch's speed/one by one": each / found["field/bare"],
    }


@torch.inference_mode()
def measure_attention(subject: spatially.Subject, images: Images, *, rounds: int, passes: int) -> dict[str, float]:
    """All attention weights against the eager forward pass."""
    rows = np.arange(len(images))
    pixels = as_float(images.batch(rows, subject.device)[0])

    def look(layer: Layer, weights: Weights) -> None:
        for _, part in weights.local_parts():
            numbers.append(part.sum())

    numbers: list[Tensor] = []

    def watched() -> None:
        numbers.clear()
        with attention(subject, look):
            subject(pixels)

    def eager() -> None:
        with written_out(subject.model):
            subject(pixels)

    others = {
        "all weights/eager": repeated(watched),
        "interaction probe/eager": chunks(InteractionRatio().measurer(subject, images, batch=len(rows)), rows),
        "fused forward/eager": repeated(lambda: subject(pixels)),
    }
    found = ratios(repeated(eager), others, subject.device, rounds=rounds, passes=passes)
    if subject.device.type == "cuda":
        bare, more = (_peak(work, subject.device) for work in (lambda: subject(pixels), watched))
        found["GiB beyond the bare model"] = (more - bare) / 2**30
    return found


@contextmanager
def written_out(model: nn.Module) -> Iterator[None]:
    """timm's layers without fused kernels."""
    fused = [module for module in model.modules() if getattr(module, "fused_attn", False)]
    for module in fused:
        module.fused_attn = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for module in fused:
            module.fused_attn = True  # type: ignore[assignment]


def _peak(work: Callable[[], Any], device: torch.device) -> int:
    torch.cuda.reset_peak_memory_stats(device)
    work()
    _wait(device)
    return torch.cuda.max_memory_allocated(device)


SECTIONS = {"attention": measure_attention, "receptive_field": measure_receptive_field, "stream": measure_stream}
MODELS = {
    "attention": ("vit_small_patch16_224", "vit_base_patch8_224", "swin_tiny_patch4_window7_224"),
    "receptive_field": ("vit_base_patch16_224", "resnet50", "swin_tiny_patch4_window7_224"),
    "stream": ("vit_small_patch16_224", "resnet50", "swin_tiny_patch4_window7_224"),
}
BATCHES = {"attention": 64, "receptive_field": 256, "stream": 256}
# Number → (whether it must not exceed the limit or not fall below it, the limit)
TARGETS = {
    "all weights/eager": ("at most", 2.0),
    "GiB beyond the bare model": ("at most", 2.0),
    "field's speed/bare": ("at least", 0.9),
    "batch's speed/one by one": ("at least", 10.0),  # on a GPU: a CPU is as busy with one image
    "(Fourier + variance)/bare": ("at most", 1.3),
}


ON_A_GPU = ("batch's speed/one by one",)


def reached(name: str, value: float) -> bool | None:
    """None for a number without a target."""
    if name not in TARGETS:
        return None
    direction, limit = TARGETS[name]
    return value <= limit if direction == "at most" else value >= limit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--models", nargs="+", help="default: some of each section's own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, help="default: 8 on CPU; on a GPU what keeps it busy, for attention 64")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", type=int, help="of each work in a round; default: 1 on CPU, 5 on CUDA")
    parser.add_argument("--json", type=Path, help="write the results here")
    given = parser.parse_args()
    results = []
    for section in given.sections:
        for name in given.models or MODELS[section]:
            subject = spatially.load(name, pretrained=False, device=given.device)
            batch = given.batch or (8 if subject.device.type == "cpu" else BATCHES[section])
            images = random_images(batch, subject.preprocessing.input_size)
            passes = given.passes or (1 if subject.device.type == "cpu" else 5)
            numbers = SECTIONS[section](subject, images, rounds=given.rounds, passes=passes)
            print(f"{section}: {name}, batch {batch}, {subject.dtype}")
            for what, value in numbers.items():
                met = None if subject.device.type == "cpu" and what in ON_A_GPU else reached(what, value)
                target = (
                    ""
                    if met is None
                    else f"   target {' '.join(map(str, TARGETS[what]))}: {'met' if met else 'NOT met'}"
                )
                print(f"{what:>32} {value:10.4f}{target}")
            results.append({"section": section, "model": name, "batch": batch, "dtype": str(subject.dtype), **numbers})
            device = subject.device
    if given.json:
        facts = {
            "command": "python benchmarks/inside.py " + " ".join(_words(vars(given))),
            "machine": f"{device_name(device)}, {platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__},
            "targets": {name: " ".join(map(str, target)) for name, target in TARGETS.items()},
            "results": results,
        }
        given.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


def _words(options: dict[str, Any]) -> list[str]:
    """The options as they are typed."""
    words = []
    for name, value in options.items():
        if value is not None and name != "json":
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


if __name__ == "__main__":
    main()
