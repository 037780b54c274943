"""What the curvature of a loss costs, next to other ways in the same run.

Sections:

* **hessian**: the five largest eigenvalues of a mini-batch to 1e-3 of the largest.
  Products: ours (Lanczos, by its own residuals) against power iteration with deflation, counted (a) until its residual is as
  small, (b) until its eigenvalue is that close to the truth, which only a tighter search knows, and (c) until its estimate
  changes by less than 1e-3, as PyHessian stops, whose error is printed beside it. (b) over ours: at least 5;
  where a power iteration was cut off (``--most``), the true ratio is larger still.
  Time of one product: ours (kept graph) over curvlinops' Hessian operator: below 1; beside it forward over reverse without
  curvlinops, and ours with the making of the graph shared out over a search.
  Memory: the peak of making the graph and multiplying, over the peak of a product of curvlinops: at most 1.2. The weights are
  in both. What the search's basis takes comes beside it.
* **landscape**: see ``landscape.py``.

    python benchmarks/curvature.py --models resnet18 vit_tiny_patch16_224 --batch 4
    python benchmarks/curvature.py --sections hessian --device cuda --batch 16 --rounds 10 --json curvature-h200.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

import landscape
import numpy as np
import torch
from memory import Watch, anonymous_bytes
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp
from torch.nn.functional import cross_entropy

import spatially
from spatially import randomness
from spatially.probes.base import device_name
from spatially.probes.hessian_vector import HessianVector, twice_differentiable
from spatially.probes.lanczos import lanczos

COUNT, TOLERANCE = 5, 1e-3
MODELS = {"hessian": ("resnet18", "vit_tiny_patch16_224"), "landscape": ("resnet50", "vit_tiny_patch16_224")}
# Number → (whether it must not exceed the limit or not fall below it, the limit)
TARGETS = {
    "products, power iteration/ours": ("at least", 5.0),
    "seconds, ours/curvlinops": ("at most", 1.0),
    "memory, ours/curvlinops": ("at most", 1.2),
    "landscape/bare": ("at most", 1.1),
}


# What is multiplied


def prepare(name: str, *, device: str, batch: int, size: int | None) -> tuple[spatially.Subject, Tensor, Tensor]:
    """A model in float32 and a batch of noise, normalised, with labels."""
    subject = spatially.load(name, pretrained=False, device=device, dtype="float32", input_size=size, seed=0)
    index = torch.arange(batch, device=subject.device)
    noise = randomness.normal(randomness.stream(0, "benchmark"), index, (3, *subject.preprocessing.input_size))
    return subject, noise, index % subject.answers


def ours(subject: spatially.Subject, images: Tensor, labels: Tensor) -> HessianVector:
    return HessianVector(cross_entropy(subject.model(images), labels), list(subject.model.parameters()))


def curvlinops_operator(subject: spatially.Subject, images: Tensor, labels: Tensor) -> Any:
    from curvlinops import HessianLinearOperator

    parameters = list(subject.model.parameters())
    data = [(images, labels)]
    return HessianLinearOperator(
        subject.model, nn.CrossEntropyLoss(), parameters, data, check_deterministic=False, num_data=len(images)
    )


def forward_over_reverse(subject: spatially.Subject, images: Tensor, labels: Tensor) -> Callable[[Tensor], Tensor]:
    named = {name: one.detach() for name, one in subject.model.named_parameters()}
    sizes = [one.numel() for one in named.values()]

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        return cross_entropy(functional_call(subject.model, parameters, (images,)), labels)

    def product(vector: Tensor) -> Tensor:
        given = {name: part.view_as(named[name]) for name, part in zip(named, vector.split(sizes), strict=True)}
        found = jvp(grad(loss), (named,), (given,))[1]
        return torch.cat([one.reshape(-1) for one in found.values()])

    return product


def draw(number: int, dimension: int, device: torch.device) -> Tensor:
    index = torch.tensor([number], device=device)
    shape = (4, -(-dimension // 4), 1)
    return randomness.normal(randomness.stream(0, "vector"), index, shape).reshape(-1)[:dimension]


# Power iteration with deflation


def power_iteration(
    product: Callable[[Tensor], Tensor], start: Callable[[int], Tensor], stop: Callable[..., bool], *, most: int
) -> tuple[list[float], int]:
    """The eigenvalues of largest magnitude, one after another, each orthogonal to those before; and the products taken."""
    vectors: list[Tensor] = []
    values: list[float] = []
    used = 0
    for rank in range(COUNT):
        vector, before = start(rank), float("nan")
        while True:
            for earlier in vectors:
                vector = vector - (vector @ earlier) * earlier
            vector = vector / vector.norm()
            image = product(vector)
            used += 1
            value = float(vector @ image)
            residual = float((image - value * vector).norm())
            if stop(rank=rank, value=value, before=before, residual=residual) or used >= most:
                break
            vector, before = image, value
        vectors.append(vector)
        values.append(value)
    return values, used


def count_products(product: HessianVector, *, device: torch.device, most: int) -> dict[str, float]:
    """Products until the five largest are known to 1e-3, by each way."""

    def start(number: int) -> Tensor:
        return draw(number, product.dimension, device)

    truth = lanczos(product, start, count=COUNT, tolerance=1e-5, products=600, room=100)
    found = lanczos(product, start, count=COUNT, tolerance=TOLERANCE)
    scale = float(np.abs(truth.values).max())
    sizes = np.sort(np.abs(truth.values))[::-1]

    def error(values: list[float]) -> float:
        return float(np.abs(np.sort(np.abs(values))[::-1] - sizes).max() / scale)

    ways: dict[str, Callable[..., bool]] = {
        "residual": lambda residual, **_: residual <= TOLERANCE * scale,
        "truth": lambda rank, value, **_: abs(abs(value) - sizes[rank]) <= TOLERANCE * scale,
        "change": lambda value, before, **_: abs(value - before) < TOLERANCE * (abs(before) + 1e-6),
    }
    numbers = {
        "products, ours": float(found.products),
        "error, ours": error(list(found.values)),
    }
    for name, stop in ways.items():
        values, used = power_iteration(product, start, stop, most=most)
        numbers[f"products, power iteration ({name})"] = float(used)
        numbers[f"error, power iteration ({name})"] = error(values)
    numbers["products, power iteration/ours"] = numbers["products, power iteration (truth)"] / found.products
    return numbers


# Time and memory


def seconds(work: Callable[[], Any], device: torch.device, passes: int) -> float:
    """Of one pass."""
    _wait(device)
    begin = time.perf_counter()
    for _ in range(passes):
        work()
    _wait(device)
    return (time.perf_counter() - begin) / passes


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def time_products(
    subject: spatially.Subject, images: Tensor, labels: Tensor, *, rounds: int, passes: int, products: float
) -> dict[str, float]:
    """The ways in turn, ours on both sides of each other one."""
    device = subject.device
    making = seconds(lambda: ours(subject, images, labels), device, 1)
    making = min(making, seconds(lambda: ours(subject, images, labels), device, 1))
    product = ours(subject, images, labels)
    vector = draw(0, product.dimension, device)
    operator = curvlinops_operator(subject, images, labels)
    forward = forward_over_reverse(subject, images, labels)
    others = {"curvlinops": lambda: operator @ vector, "forward over reverse": lambda: forward(vector)}
    for work in (lambda: product(vector), *others.values()):
        work()
    found: dict[str, list[float]] = {name: [] for name in others}
    own = []
    for _ in range(rounds):
        before = seconds(lambda: product(vector), device, passes)
        for name, work in others.items():
            this = seconds(work, device, passes)
            after = seconds(lambda: product(vector), device, passes)
            found[name].append((before + after) / 2 / this)
            before = after
        own.append(before)
    mine = median(own)
    ratio = median(found["curvlinops"])
    return {
        "seconds a product, ours": mine,
        "seconds of making the graph": making,
        "seconds, ours/curvlinops": ratio,
        "seconds, ours/forward over reverse": median(found["forward over reverse"]),
        "seconds with the graph shared out, ours/curvlinops": ratio * (mine + making / products) / mine,
        "difference from forward over reverse": _difference(product(vector), forward(vector)),
        "difference from curvlinops": _difference(product(vector), operator @ vector),
    }


def _difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / one.norm())


def peak(way: str, name: str, *, device: str, batch: int, size: int | None) -> int:
    """Bytes of one product at their highest, with whatever is kept for it and with the weights."""
    subject, images, labels = prepare(name, device=device, batch=batch, size=size)
    before, watch = anonymous_bytes(), Watch()
    if subject.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    else:
        watch.start()
    with twice_differentiable():
        vector = draw(0, sum(one.numel() for one in subject.model.parameters()), subject.device)
        if way == "ours":
            product = ours(subject, images, labels)
            product(vector)
            product(vector)
        else:
            operator = curvlinops_operator(subject, images, labels)
            operator @ vector
            operator @ vector
    watch.running = False
    if subject.device.type == "cuda":
        return torch.cuda.max_memory_allocated()
    weights = sum(one.numel() * one.element_size() for one in subject.model.parameters())
    return watch.largest - before + weights


def peak_elsewhere(way: str, name: str, *, device: str, batch: int, size: int | None) -> int:
    """The same in a process of its own, whose C library hands freed blocks back at once."""
    words = [sys.executable, __file__, "--child", way, "--models", name, "--device", device, "--batch", str(batch)]
    words += [] if size is None else ["--size", str(size)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(words, env=environment, capture_output=True, check=True, text=True)
    return int(done.stdout.split()[-1])


# Sections


def measure_hessian(name: str, given: argparse.Namespace) -> dict[str, float]:
    options = {"device": given.device, "batch": given.batch, "size": given.size}
    subject, images, labels = prepare(name, **options)
    passes = given.passes or (1 if subject.device.type == "cpu" else 5)
    with twice_differentiable():
        numbers = count_products(ours(subject, images, labels), device=subject.device, most=given.most)
        numbers |= time_products(
            subject, images, labels, rounds=given.rounds, passes=passes, products=numbers["products, ours"]
        )
    del images, labels
    mine, theirs = (peak_elsewhere(way, name, **options) for way in ("ours", "curvlinops"))
    weights = sum(one.numel() * one.element_size() for one in subject.model.parameters())
    return {
        **numbers,
        "MiB, ours": mine / 2**20,
        "MiB, curvlinops": theirs / 2**20,
        "memory, ours/curvlinops": mine / theirs,
        "MiB of the search's basis": weights * min(numbers["products, ours"], 64) / 2**20,
    }


def measure_landscape(name: str, given: argparse.Namespace) -> dict[str, float]:
    subject = spatially.load(name, pretrained=False, device=given.device, input_size=given.size)
    images = landscape.random_images(given.batch, subject.preprocessing.input_size)
    found = landscape.measure(subject, images, points=given.points, batch=given.batch, rounds=given.rounds)
    return {
        "seconds, landscape": median(found["landscape"]),
        "seconds, bare": median(found["bare"]),
        "landscape/bare": median(found["ratio"]),
        "seconds, the usual way, scaled up": found["usual way, scaled up"],
    }


SECTIONS = {"hessian": measure_hessian, "landscape": measure_landscape}


def reached(name: str, value: float) -> str:
    """Empty for a number without a target."""
    if name not in TARGETS:
        return ""
    direction, limit = TARGETS[name]
    met = value <= limit if direction == "at most" else value >= limit
    return f"   target {direction} {limit}: {'met' if met else 'NOT met'}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sections", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    parser.add_argument("--models", nargs="+", help="default: some of each section's own")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--size", type=int, help="side of the images; default: the model's own")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--passes", type=int, help="of each product in a round; default: 1 on CPU, 5 on CUDA")
    parser.add_argument("--most", type=int, default=2000, help="products of a power iteration, at the most")
    parser.add_argument("--points", type=int, default=5, help="of the landscape, along each side")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--child", choices=("ours", "curvlinops"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(peak(given.child, given.models[0], device=given.device, batch=given.batch, size=given.size))
        return
    results = []
    for section in given.sections:
        for name in given.models or MODELS[section]:
            numbers = SECTIONS[section](name, given)
            print(f"{section}: {name}, batch {given.batch}")
            for what, value in numbers.items():
                print(f"{what:>52} {value:12.5g}{reached(what, value)}")
            results.append({"section": section, "model": name, **numbers})
    if given.json:
        words = [word for word in sys.argv[1:] if word != str(given.json) and word != "--json"]
        facts = {
            "command": "python benchmarks/curvature.py " + " ".join(words),
            "machine": f"{device_name(torch.device(given.device))}, {platform.machine()}, {torch.get_num_threads()} threads",
            "versions": {name: version(name) for name in ("torch", "timm", "numpy", "curvlinops-for-pytorch")},
            "targets": {name: " ".join(map(str, target)) for name, target in TARGETS.items()},
            "results": results,
        }
        given.json.write_text(json.dumps(facts, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
