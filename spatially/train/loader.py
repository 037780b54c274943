"""Large sets: decoded, cropped and coloured by worker processes through timm's transforms, finished on the device.

The random numbers of an image are those of (seed, epoch, image, repeat): Python's, NumPy's and PyTorch's generators are set
from its state before its transforms and put back after them, so no worker count and no restart changes a batch.
Normalisation, erasing, mixing and targets are the device's, as for sets that lie there.
"""

from __future__ import annotations

import atexit
import os
import random
import signal
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from spatially.data.decode import BrokenImage, decode
from spatially.errors import UserError
from spatially.subject.preprocessing import Preprocessing
from spatially.train.augment import Finish
from spatially.train.augment.mix import mixing
from spatially.train.batch import Batch
from spatially.train.order import Order
from spatially.train.sources import Part

_TRIES = 10
Item = tuple[Tensor, int]


class LoadedTraining:
    """Batches whose images worker processes make."""

    resident = False

    def __init__(
        self,
        part: Part,
        finish: Finish,
        order: Order,
        *,
        preprocessing: Preprocessing,
        classes: tuple[str, ...],
        device: torch.device,
        workers: int | None = None,
    ) -> None:
        self.classes, self.size = classes, preprocessing.input_size
        self.steps_per_epoch, self.images_per_epoch = order.steps, order.steps * order.batch
        self.fingerprint = ""
        self._order, self._finish, self._device = order, finish, device
        self._plan: list[list[tuple[int, int]]] = []
        count = default_workers(order.world) if workers is None else workers
        self._loader: DataLoader[Item] = DataLoader(
            Transformed(part, transform(finish.augmentation, preprocessing)),
            batch_sampler=_Plan(self._plan),  # an item is named by its row and its state
            num_workers=count,
            pin_memory=device.type == "cuda",
            persistent_workers=count > 0,
            worker_init_fn=_ignore_signals,
            generator=torch.Generator(),  # a loader draws from the global one otherwise
        )
        atexit.register(_end_workers, weakref.ref(self._loader))

    def batches(self, epoch: int, *, first_step: int = 0) -> Iterator[Batch]:
        """This process's share of the batches of an epoch, from a step on."""
        rows, state = self._order.epoch(epoch)
        pairs = zip(rows[first_step:].tolist(), state[first_step:].tolist(), strict=True)
        self._plan[:] = [list(zip(*pair, strict=True)) for pair in pairs]
        if not self._plan:
            return
        table = mixing(self._order.seed, epoch, self.steps_per_epoch, self.size, self._finish.augmentation)
        state, table = state.to(self._device), table.to(self._device)
        plan = self._finish.plan(state.flatten(), self.size).unflatten(0, state.shape)
        for step, (pixels, labels) in enumerate(self._loader, start=first_step):
            levels = pixels.to(self._device, non_blocking=True).float()
            labels = labels.to(self._device, non_blocking=True)
            images, targets = self._finish(levels, labels, state[step], plan[step], table[step])
            yield Batch(images, targets, labels)


class _Plan:
    """The batches of the epoch under way, as lists of (row, state)."""

    def __init__(self, batches: list[list[tuple[int, int]]]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(list(self._batches))


def _ignore_signals(_: int) -> None:
    """Let the main process, to whose whole group a signal may go, save what is there before it ends its workers."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _end_workers(reference: weakref.ref[DataLoader[Item]]) -> None:
    """Before Python ends: workers that are left over it would ask by a signal, which they ignore, and wait for."""
    loader = reference()
    iterator = getattr(loader, "_iterator", None)
    if iterator is not None:
        iterator._shutdown_workers()
        for worker in iterator._workers:
            worker.kill()


def default_workers(world: int) -> int:
    """This process's share of the machine's processors, sixteen at most."""
    every = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(16, every // min(world, every)))


def transform(augmentation: Any, preprocessing: Preprocessing) -> Any:
    """From a picture to bytes ``(3, H, W)``, by timm's and torchvision's transforms."""
    from timm.data import create_transform
    from torchvision import transforms

    given = augmentation
    stages = create_transform(
        preprocessing.input_size,
        is_training=True,
        scale=given.scale,
        ratio=given.ratio,
        hflip=given.flip,
        color_jitter=given.jitter or None,
        auto_augment=given.rand_augment,
        interpolation=given.interpolation,
        mean=preprocessing.mean,
        use_prefetcher=True,  # bytes, not normalised: the device does that
        separate=True,
    )
    for operation in (one for stage in stages[1].transforms for one in getattr(stage, "ops", ())):
        if operation.name.startswith("Posterize"):
            operation.aug_fn = _posterize
    if given.crop == "resized":
        return transforms.Compose(stages)
    middle: list[Any] = [_Middle(preprocessing)]
    if given.crop == "padded":
        middle.append(transforms.RandomCrop(preprocessing.input_size, padding=given.padding))
    return transforms.Compose([*middle, transforms.RandomHorizontalFlip(given.flip), *stages[1:]])


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep the upper bits, or none: which Pillow refuses since version 13, but timm asks for at the largest magnitudes."""
    return ImageOps.posterize(image, bits) if bits else Image.new("RGB", image.size)


class _Middle:
    """The crop that validation sees, as a picture."""

    def __init__(self, preprocessing: Preprocessing) -> None:
        self._preprocessing = preprocessing

    def __call__(self, image: Image.Image) -> Image.Image:
        return Image.fromarray(np.ascontiguousarray(self._preprocessing.crop(image).transpose(1, 2, 0)))


class Transformed(Dataset[Item]):
    """Images by (row, state). One that cannot be read is replaced by the next one, with a warning."""

    def __init__(self, part: Part, transform: Any) -> None:
        self._part, self._transform = part, transform

    def __len__(self) -> int:
        return len(self._part)

    def __getitem__(self, place: tuple[int, int]) -> Item:
        row, state = place
        image, label = self._read(row)
        with _Seeded(state):
            return torch.as_tensor(self._transform(image)), label

    def _read(self, row: int) -> tuple[Image.Image, int]:
        for further in range(_TRIES):
            number = int(self._part.numbers[(row + further) % len(self._part)])
            try:
                encoded, label = self._part.source.read(number)
                try:
                    return decode(encoded), label
                finally:
                    encoded.close()
            except (BrokenImage, OSError) as error:
                name = self._part.source.name(number)
                warnings.warn(f"{name} cannot be read ({error}); the next image takes its place", stacklevel=2)
        raise UserError(f"{name} and the images after it cannot be read; mend or remove them")


class _Seeded:
    """Every generator that transforms draw from, set from a state, and put back afterwards."""

    def __init__(self, state: int) -> None:
        self._seed = state & 0xFFFFFFFF

    def __enter__(self) -> None:
        self._before = random.getstate(), np.random.get_state(), torch.get_rng_state()  # noqa: NPY002  timm draws from it
        random.seed(self._seed)
        np.random.seed(self._seed)  # noqa: NPY002
        torch.default_generator.manual_seed(self._seed)  # the host's alone: a GPU's draws belong to the model

    def __exit__(self, *_: object) -> None:
        plain, array, tensor = self._before
        random.setstate(plain)
        np.random.set_state(array)  # noqa: NPY002
        torch.set_rng_state(tensor)
