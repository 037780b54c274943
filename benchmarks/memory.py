"""How much memory does a sweep over a large set need beyond its memory map?

Makes a memory map of so many 224² images on disk (zeros: sparse, but read like any other), runs a sweep with a small
model over all of them, and reports the largest growth of the process's own (anonymous) memory. It should stay below the
per-image outcomes plus two batches of float pixels, whatever the number of images.

    python benchmarks/memory.py --images 50000
"""

from __future__ import annotations

import argparse
import json
import platform
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=50_000)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    model = nn.Sequential(nn.AvgPool2d(32), nn.Flatten(), nn.Linear(147, 10))
    subject = spatially.load(model, name="pooling", input_size=224, num_classes=10, device="cpu")
    probe = spatially.probes.Sensitivity(kinds=["shuffle", "mask"], blocks=[16], ratios=[0.0, 1.0])
    with tempfile.TemporaryDirectory() as folder:
        shape = (given.images, 3, 224, 224)
        pixels = np.memmap(Path(folder) / "pixels", np.uint8, "w+", shape=shape)
        pixels.flush()
        del pixels
        pixels = np.memmap(Path(folder) / "pixels", np.uint8, "r", shape=shape)
        numbers = np.arange(given.images)
        images = Images(pixels=pixels, labels=numbers % 10, index=numbers, description="zeros", fingerprint="zeros")
        few = Images(
            pixels=pixels[:128], labels=numbers[:128] % 10, index=numbers[:128], description="", fingerprint=""
        )
        probe.run(subject, few, batch=given.batch)
        before = anonymous_bytes()
        watch = Watch()
        watch.start()
        start = time.perf_counter()
        result = probe.run(subject, images, batch=given.batch)
        seconds = time.perf_counter() - start
        watch.running = False
    batch_bytes = given.batch * 3 * 224 * 224 * 4
    growth = watch.largest - before
    table = {
        "command": f"python benchmarks/memory.py --images {given.images} --batch {given.batch}",
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "map MiB": np.prod(shape, dtype=np.int64).item() / 2**20,
        "two batches MiB": 2 * batch_bytes / 2**20,
        "outcomes MiB": result.nbytes / 2**20,
        "growth MiB": growth / 2**20,
        "seconds": seconds,
        "target": "growth − outcomes ≤ two batches of float pixels",
    }
    for name in ("map MiB", "two batches MiB", "outcomes MiB", "growth MiB"):
        print(f"{name:>16} {table[name]:10.1f}")
    print("reached" if growth <= 2 * batch_bytes + result.nbytes else "NOT reached", table["target"])
    if given.json:
        given.json.write_text(json.dumps(table, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
