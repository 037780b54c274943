"""How fast is a sweep over block shuffling and masking, next to the bare forward pass and next to the usual way?

Three ways over the same images with the same model, batch and precision, in one run:

* **bare**: the forward pass alone, on a batch that is already normalised and on the device: the ceiling;
* **sweep**: :class:`spatially.probes.Sensitivity` as users run it, from uint8 crops to outcomes on the CPU;
* **usual**: one image at a time with PIL and NumPy in the workers of a DataLoader, as scripts do.

Bare and sweep alternate, and the ratio is the median over rounds, since machines are noisy.

    python benchmarks/sweep.py                                                  # CPU
    python benchmarks/sweep.py --device cuda --batch 256 --rounds 5             # a GPU, bf16
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from statistics import median

import numpy as np
import timm
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

import spatially
from spatially.data import Images
from spatially.perturb.pixels import as_float
from spatially.probes.base import device_name


def random_images(count: int, side: int) -> Images:
    """Noise: what a sweep costs does not depend on what is seen."""
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, 3, side, side), dtype=np.uint8)
    numbers = np.arange(count)
    return Images(pixels=pixels, labels=numbers % 1000, index=numbers, description="noise", fingerprint="noise")


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@torch.inference_mode()
def bare(subject: spatially.Subject, images: Images, batch: int, passes: int) -> float:
    """Images a second of the model alone, over as many passes as the sweep makes."""
    pixels = as_float(images.batch(np.arange(batch), subject.device)[0])
    mean, std = (torch.tensor(value, device=subject.device).view(1, 3, 1, 1) for value in normalisation(subject))
    normalised = (pixels - mean) / std
    half = subject.dtype in (torch.bfloat16, torch.float16)
    wait(subject.device)
    start = time.perf_counter()
    with torch.autocast(subject.device.type, dtype=subject.dtype, enabled=half):
        for _ in range(passes):
            subject.model(normalised)
    wait(subject.device)
    return passes * batch / (time.perf_counter() - start)


def normalisation(subject: spatially.Subject) -> tuple[list[float], list[float]]:
    return list(subject.preprocessing.mean), list(subject.preprocessing.std)


def sweep(subject: spatially.Subject, images: Images, batch: int, probe: spatially.probes.Sensitivity) -> float:
    """Forward passes a second, counted as images, of the whole probe."""
    start = time.perf_counter()
    probe.run(subject, images, batch=batch)
    wait(subject.device)
    return probe.passes * len(images) / (time.perf_counter() - start)


class UsualWay(Dataset):
    """An image at a time: decode, crop, cut, shuffle or fill with NumPy, normalise."""

    def __init__(self, images: Images, subject: spatially.Subject, kind: str, block: int, ratio: float) -> None:
        self.images, self.kind, self.block, self.ratio = images, kind, block, ratio
        self.mean, self.std = (np.array(value, np.float32) for value in normalisation(subject))

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, int]:
        picture = Image.fromarray(self.images.pixels[number].transpose(1, 2, 0))
        pixels = np.asarray(picture.convert("RGB"), dtype=np.float32) / 255
        generator = np.random.default_rng(number)
        rows, columns = pixels.shape[0] // self.block, pixels.shape[1] // self.block
        blocks = [(row, column) for row in range(rows) for column in range(columns)]
        chosen = generator.choice(len(blocks), round(self.ratio * len(blocks)), replace=False)
        result, mean, deviation = pixels.copy(), pixels.mean((0, 1)), pixels.std((0, 1))
        for target, source in zip(chosen, generator.permutation(chosen), strict=True):
            (a, b), (c, d) = blocks[target], blocks[source]
            k = self.block
            place = slice(a * k, (a + 1) * k), slice(b * k, (b + 1) * k)
            if self.kind == "shuffle":
                result[place] = pixels[c * k : (c + 1) * k, d * k : (d + 1) * k]
            else:
                result[place] = generator.normal(mean, deviation, (k, k, 3))
        return torch.from_numpy(((result - self.mean) / self.std).transpose(2, 0, 1).copy()), int(
            self.images.labels[number]
        )


@torch.inference_mode()
def usual(
    subject: spatially.Subject, images: Images, batch: int, workers: int, probe: spatially.probes.Sensitivity
) -> float:
    """Images a second of the usual way, over the middle ratio of every kind and block."""
    half = subject.dtype in (torch.bfloat16, torch.float16)
    start, passes = time.perf_counter(), 0
    for kind in probe.kinds:
        for block in probe.blocks:
            loader = DataLoader(UsualWay(images, subject, kind, block, 0.5), batch_size=batch, num_workers=workers)
            for pixels, _ in loader:
                with torch.autocast(subject.device.type, dtype=subject.dtype, enabled=half):
                    subject.model(pixels.to(subject.device)).argmax(dim=1).cpu()
                passes += len(pixels)
    return passes / (time.perf_counter() - start)


def _words(options: dict) -> list[str]:
    """The options as they are typed."""
    words = []
    for name, value in options.items():
        if value is not None and name != "json":
            words += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return words


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="swin_tiny_patch4_window7_224")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--images", type=int, help="default: one batch on CPU, four on CUDA")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--ratios", type=float, nargs="+", default=[0.0, 0.2, 0.4, 0.6, 0.8, 1.0])
    parser.add_argument("--blocks", type=int, nargs="+", default=[8, 16, 24, 32])
    parser.add_argument("--json", type=Path, help="write the results here")
    given = parser.parse_args()
    subject = spatially.load(given.model, pretrained=False, device=given.device)
    count = given.images or (given.batch if subject.device.type == "cpu" else 4 * given.batch)
    images = random_images(count, subject.preprocessing.input_size[0])
    probe = spatially.probes.Sensitivity(blocks=given.blocks, ratios=given.ratios)
    passes = probe.passes * count // given.batch
    bare(subject, images, given.batch, 3)
    sweep(subject, images, given.batch, spatially.probes.Sensitivity(blocks=given.blocks[:1], ratios=[0.0, 1.0]))
    rounds = []
    for _ in range(given.rounds):
        # Bare on both sides of the sweep, so that a machine that drifts does not favour either.
        before = bare(subject, images, given.batch, passes // 2)
        swept = sweep(subject, images, given.batch, probe)
        after = bare(subject, images, given.batch, passes - passes // 2)
        rounds.append({"bare": (before + after) / 2, "sweep": swept, "ratio": swept / ((before + after) / 2)})
    one_batch = random_images(given.batch, subject.preprocessing.input_size[0])
    slow = usual(subject, one_batch, given.batch, given.workers, probe)
    result = {
        "command": "python benchmarks/sweep.py " + " ".join(_words(vars(given))),
        "machine": f"{device_name(subject.device)}, {platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "timm": timm.__version__},
        "model": given.model,
        "dtype": str(subject.dtype),
        "batch": given.batch,
        "images": count,
        "forward passes a round": probe.passes * count,
        "bare images/s": median(one["bare"] for one in rounds),
        "sweep images/s": median(one["sweep"] for one in rounds),
        "usual images/s": slow,
        "sweep/bare": median(one["ratio"] for one in rounds),
        "sweep/usual": median(one["sweep"] for one in rounds) / slow,
        "rounds": rounds,
        "target": "sweep/bare ≥ 0.95",
    }
    for name in ("bare images/s", "sweep images/s", "usual images/s", "sweep/bare", "sweep/usual"):
        print(f"{name:>16} {result[name]:10.3f}")
    print("reached" if result["sweep/bare"] >= 0.95 else "NOT reached", result["target"])
    if given.json:
        given.json.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
