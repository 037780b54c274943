"""How much memory does a sweep over a large set need beyond its memory map?

Makes a memory map of so many 224² images on disk (zeros: sparse, but read like any other), runs a sweep with a small
model over all of them, and reports the largest growth of the process's own (anonymous) memory. It should stay below the
per-image outcomes plus two batches of float pixels, whatever the number of images. Measured twice: with the C library told
to hand freed blocks back at once (what the sweep needs; slow, so over the first 2,000 images), and as it comes, over all of
them (what the process holds, the C library's slack included).

    python benchmarks/memory.py --images 50000
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import spatially
from spatially.data import Images


def anonymous_bytes() -> int:
    """Memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


class Watch(threading.Thread):
    """The largest anonymous memory seen, looked at every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.largest, self.running = 0, True

    def run(self) -> None:
        while self.running:
            self.largest = max(self.largest, anonymous_bytes())
            time.sleep(0.002)


def measure(images: int, batch: int) -> dict[str, float]:
    """One sweep in this process, in MiB."""
    model = nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(147, 10))
    subject = spatially.load(model, name="pooling", input_size=224, num_classes=10, device="cpu")
    probe = spatially.probes.Sensitivity(kinds=["shuffle", "mask"], blocks=[16], ratios=[0.0, 1.0])
    with tempfile.TemporaryDirectory() as folder:
        shape = (images, 3, 224, 224)
        np.memmap(Path(folder) / "pixels", np.uint8, "w+", shape=shape).flush()
        pixels = np.memmap(Path(folder) / "pixels", np.uint8, "r", shape=shape)
        numbers = np.arange(images)
        many = Images(pixels=pixels, labels=numbers % 10, index=numbers, description="zeros", fingerprint="zeros")
        few = Images(
            pixels=pixels[:128], labels=numbers[:128] % 10, index=numbers[:128], description="", fingerprint=""
        )
        probe.run(subject, few, batch=batch)
        before = anonymous_bytes()
        watch = Watch()
        watch.start()
        start = time.perf_counter()
        result = probe.run(subject, many, batch=batch)
        watch.running = False
    return {
        "map": pixels.nbytes / 2**20,
        "outcomes": result.nbytes / 2**20,
        "growth": (watch.largest - before) / 2**20,
        "seconds": time.perf_counter() - start,
    }


def child(images: int, batch: int, environment: dict[str, str]) -> dict[str, float]:
    """The same in a process of its own."""
    words = [sys.executable, __file__, "--images", str(images), "--batch", str(batch), "--child"]
    done = subprocess.run(words, env=os.environ | environment, capture_output=True, check=True, text=True)
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        print(json.dumps(measure(given.images, given.batch)))
        return
    needed = child(min(given.images, 2000), given.batch, {"MALLOC_MMAP_THRESHOLD_": "65536"})
    held = child(given.images, given.batch, {})
    two_batches = 2 * given.batch * 3 * 224 * 224 * 4 / 2**20
    table = {
        "command": f"python benchmarks/memory.py --images {given.images} --batch {given.batch}",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "map MiB": held["map"],
        "two batches MiB": two_batches,
        "outcomes MiB": held["outcomes"],
        "needed MiB": needed["growth"],
        "held MiB": held["growth"],
        "seconds": held["seconds"],
        "target": "needed − outcomes ≤ two batches of float pixels",
    }
    for name in ("map MiB", "two batches MiB", "outcomes MiB", "needed MiB", "held MiB"):
        print(f"{name:>16} {table[name]:10.1f}")
    print("reached" if needed["growth"] - needed["outcomes"] <= two_batches else "NOT reached", table["target"])
    if given.json:
        given.json.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
