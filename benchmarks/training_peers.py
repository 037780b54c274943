"""What `training.py` compares with: timm's training step, its transforms in a DataLoader, and nvidia-smi's view of the GPU."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from statistics import mean
from typing import Any

import numpy as np
import torch
from PIL import Image
from timm.data import Mixup
from timm.data.auto_augment import rand_augment_transform
from timm.loss import SoftTargetCrossEntropy
from timm.optim import create_optimizer_v2
from timm.utils import dispatch_clip_grad
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms

from spatially.train.batch import Batch
from spatially.train.recipe import Recipe

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
Step = Callable[[Batch], object]


def timms_step(model: nn.Module, recipe: Recipe, device: torch.device) -> Step:
    """A training step as timm's script takes it."""
    model = model.to(device).train()
    wanted = recipe.optimiser
    optimiser = create_optimizer_v2(model, opt=wanted.name, lr=recipe.learning_rate, weight_decay=wanted.weight_decay)
    loss_of = SoftTargetCrossEntropy()
    run = torch.compile(model) if recipe.run.compile else model

    def step(batch: Batch) -> object:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=recipe.run.precision == "bf16"):
            loss = loss_of(run(batch.images), batch.targets)
        loss.backward()
        if recipe.regularisation.clip is not None:
            dispatch_clip_grad(model.parameters(), value=recipe.regularisation.clip, mode="norm")
        optimiser.step()
        optimiser.zero_grad()
        return loss.detach()

    return step


class Pictures(Dataset[tuple[Tensor, int]]):
    """Images in memory, changed one by one as the recipe says, by timm's and torchvision's transforms."""

    def __init__(self, pixels: np.ndarray, labels: np.ndarray, recipe: Recipe) -> None:
        self.pixels, self.labels = pixels, labels
        wanted = recipe.augmentation
        fill = {"img_mean": tuple(round(255 * one) for one in MEAN)}
        steps: list[Any] = [
            transforms.RandomCrop(pixels.shape[1], padding=wanted.padding),
            transforms.RandomHorizontalFlip(wanted.flip),
        ]
        if wanted.rand_augment:
            steps.append(rand_augment_transform(wanted.rand_augment, fill))
        self.transform = transforms.Compose([*steps, transforms.ToTensor(), transforms.Normalize(MEAN, STD)])

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, row: int) -> tuple[Tensor, int]:
        return self.transform(Image.fromarray(self.pixels[row])), int(self.labels[row])


def usual_way(loader: DataLoader[Any], mixup: Mixup, device: torch.device) -> Iterator[Batch]:
    """Batches from a loader's workers, mixed on the device."""
    for images, labels in loader:
        labels = labels.to(device, non_blocking=True)
        images, targets = mixup(images.to(device, non_blocking=True), labels)
        yield Batch(images, targets, labels)


class Busy:
    """The share of time in which the GPU runs something, as nvidia-smi sees it five times a second; None without it."""

    def __init__(self, device: torch.device) -> None:
        self._known = device.type == "cuda" and shutil.which("nvidia-smi") is not None
        self.share: float | None = None

    def __enter__(self) -> Busy:
        if self._known:
            asked = ["nvidia-smi", "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits", "-lms", "200"]
            self._process = subprocess.Popen(asked, stdout=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_: object) -> None:
        if not self._known:
            return
        self._process.terminate()
        told = [line.strip() for line in self._process.communicate()[0].splitlines()]
        # The first sample looks back to before the epoch.
        values = [float(one) / 100 for one in told[1:] if one.isdigit()]
        self.share = mean(values) if values else None
