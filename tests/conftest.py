"""Small subjects and small folders of images that many tests share."""

import os

import torch

# Without a GPU the kernels run step by step in Triton's interpreter, which must be asked for before Triton is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

import spatially


class SmallNetwork(nn.Module):
    """A convolution, a global pool and a linear head: 4 classes, any size."""

    num_classes = 4

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 5, stride=2), nn.GELU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())
        self.head = nn.Linear(32, 4)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(images)) * 8


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No test reads or fills the user's cache."""
    monkeypatch.setenv("SPATIALLY_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def subject() -> spatially.Subject:
    torch.manual_seed(0)
    return spatially.load(SmallNetwork(), name="small", input_size=32, device="cpu")


@pytest.fixture
def memory_images(subject: spatially.Subject) -> spatially.data.Images:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (50, 32, 32, 3), dtype=np.uint8)
    return spatially.open_images(pixels, subject, labels=generator.integers(0, 4, 50))


@pytest.fixture
def make_folder(tmp_path: Path) -> Callable[..., Path]:
    """Make ``classes`` folders with ``each`` PNG images of random pixels."""

    def make(*, classes: int = 4, each: int = 5, size: tuple[int, int] = (40, 36)) -> Path:
        generator = np.random.default_rng(1)
        root = tmp_path / "images"
        for label in range(classes):
            folder = root / f"class{label}"
            folder.mkdir(parents=True)
            for number in range(each):
                pixels = generator.integers(0, 256, (*size, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / f"{number}.png")
        return root

    return make
