"""``open_training``: training, validation and test images of any source, for one of several processes.

Where the decoded set fits into the device's memory it is held there (`resident`), otherwise images are decoded and augmented
by worker processes for every batch (`loader`). Batches are the same for any number of processes, and after a restart at any
step; the two ways draw different crops of the same images.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from spatially.data.parquet import Shards
from spatially.data.sources import Folder, Stream
from spatially.errors import UserError
from spatially.subject.preprocessing import Preprocessing
from spatially.train.augment import Augment, Finish
from spatially.train.batch import Batch, TrainingData, ValidationData
from spatially.train.fingerprint import fingerprint
from spatially.train.loader import LoadedTraining
from spatially.train.order import Order
from spatially.train.resident import Crops, ResidentTraining
from spatially.train.sources import Parts, labels_of, open_parts
from spatially.train.stored import Stored, store, stored_size, usual_size

if TYPE_CHECKING:
    from spatially.train.recipe import Recipe

__all__ = ["Batch", "TrainingData", "ValidationData", "open_training"]

_SHARE = 0.4  # of the free memory of a GPU that a set may take; a quarter of the host's
_HOST_SHARE = 0.25
_SEEN = 0.875  # of a larger image's shorter side, as timm's default


def open_training(
    source: Any,
    *,
    recipe: Recipe,
    size: tuple[int, int],
    mean: tuple[float, float, float],
    std: tuple[float, float, float],
    device: torch.device | str,
    rank: int = 0,
    world: int = 1,
    split: tuple[float, float, float] = (0.7, 0.15, 0.15),
    seed: int = 0,
    root: str | Path | None = None,
    limit: int | None = None,
    resident: bool | None = None,
    graph: bool | None = None,
    workers: int | None = None,
    progress: bool | None = None,
) -> tuple[TrainingData, ValidationData, ValidationData | None]:
    """Training, validation and, where there are some, test images of a source.

    Args:
        source: a folder of class folders, or one with ``train`` and ``val`` inside; ``"shapes"`` or a :class:`Shapes`; one of
            timm's reader names (with ``root``); Parquet shards by their pattern; or arrays: ``(pixels, labels)``, or a mapping
            of ``train``, ``validation``, ``test`` to such pairs.
        recipe: its batch (over all processes), augmentation and smoothing are used.
        size, mean, std: what the model takes.
        split: shares of training, validation and test images, for a source without validation images of its own.
        limit: only so many training images.
        resident: hold the set on the device; by default where it takes at most 40 % of a GPU's free memory, or a quarter of
            the host's.
        graph: make batches by a CUDA graph; by default on a GPU.
        workers: threads that decode a set once, or processes that load it again and again.
    """
    if workers is not None and workers < 0:
        raise UserError(f"workers must be a whole number of at least 0, but came as {workers}")
    place = torch.device(device)
    parts = open_parts(source, size=size, split=split, seed=seed, root=root, limit=limit)
    given = recipe.augmentation
    order = Order(
        count=len(parts.train),
        batch=recipe.batch,
        seed=seed,
        repeats=given.repeats,
        pairs=bool(given.mixup or given.cutmix),
        rank=rank,
        world=world,
    )
    usual = usual_size(parts.train)
    preprocessing = held_out_preprocessing(usual, size, mean, std, given.interpolation)
    kept = stored_size(usual, size, given.crop)
    if resident is None:
        resident = fits(len(parts.train), kept, place)
    decoding: dict[str, Any] = {"workers": workers, "progress": progress}
    stored = None
    if resident:
        stored = store(parts.train, kept, None if given.crop == "resized" else preprocessing, **decoding)
        check_readable(parts, stored)
        order = replace(order, count=len(stored))
    elif isinstance(parts.train.source, Stream):
        raise UserError(
            f"{parts.train.source.description} can only be read from front to back, and is too large to be held in memory; "
            "give it as a folder, or as a set that is read by number (hfds/…)"
        )
    held_out = [store(part, size, preprocessing, **decoding) for part in (parts.validation, parts.test) if part]
    if rank == 0:
        tell_skipped([one for one in (stored, *held_out) if one])
    classes = class_names(parts, [one for one in (stored, *held_out) if one])
    finish = Finish(
        given,
        classes=len(classes),
        smoothing=recipe.regularisation.smoothing,
        mean=mean,
        std=std,
        seed=seed,
        device=place,
    )
    training: TrainingData
    if stored is not None:
        augment = Augment(given, size=size, mean=mean, seed=seed, device=place)
        training = ResidentTraining(stored, augment, finish, order, classes=classes, device=place, graph=graph)
    else:
        training = LoadedTraining(
            parts.train, finish, order, preprocessing=preprocessing, classes=classes, device=place, workers=workers
        )
    training.fingerprint = f"{fingerprint(parts.train)}; {fingerprint(parts.validation)}"
    validation, *test = (
        Crops(
            one,
            finish,
            preprocessing,
            classes=classes,
            batch=max(1, order.share // recipe.run.accumulation),  # what fits into memory in training does here
            device=place,
            rank=rank,
            world=world,
            resident=fits(len(one), size, place),
        )
        for one in held_out
    )
    return training, validation, test[0] if test else None


def check_readable(parts: Parts, stored: Stored) -> None:
    """That no class has lost all of its training images, where it is known before decoding what they are of."""
    source = parts.train.source
    if parts.classes is None or not isinstance(source, Folder | Shards):
        return
    wanted = labels_of(source)[parts.train.numbers]
    lost = [parts.classes[label] for label in np.setdiff1d(wanted, stored.labels).tolist()]
    if lost:
        named = ", ".join(lost[:5]) + (f" and {len(lost) - 5} more" if len(lost) > 5 else "")
        first = stored.skipped[0]
        raise UserError(
            f"none of the training images of these classes of {source.description} can be read: {named} "
            f"({first.name}: {first.reason}, …); mend them, or remove the classes"
        )


def tell_skipped(stored: Sequence[Stored]) -> None:
    """Warn of images that could not be read, some of them by name: a training must not lose them in silence."""
    skipped = [one for part in stored for one in part.skipped]
    if skipped:
        named = "; ".join(f"{one.name} ({one.reason})" for one in skipped[:3]) + ("; …" if len(skipped) > 3 else "")
        warnings.warn(f"left out because they cannot be read, {len(skipped):,} of the images: {named}", stacklevel=3)


def class_names(parts: Parts, stored: list[Stored]) -> tuple[str, ...]:
    """The classes' names, or their numbers where a source only shows labels as it is read; no label may lie beyond."""
    most = max(int(one.labels.max()) for one in stored)
    if parts.classes is None:
        return tuple(str(number) for number in range(most + 1))
    if most >= len(parts.classes):
        raise UserError(f"labels must lie below the number of classes, {len(parts.classes)}, but reach {most}")
    return parts.classes


def held_out_preprocessing(
    usual: tuple[int, int], size: tuple[int, int], mean: Any, std: Any, interpolation: str
) -> Preprocessing:
    """The middle of larger images, of which 87.5 % of the shorter side is seen; all of those no larger than ``size``."""
    larger = usual[0] > size[0] and usual[1] > size[1]
    resize = (int(size[0] / _SEEN), int(size[1] / _SEEN)) if larger else size
    filters = "bicubic" if interpolation == "random" else interpolation
    return Preprocessing(size, resize=resize, mean=mean, std=std, interpolation=filters)


def fits(count: int, size: tuple[int, int], device: torch.device) -> bool:
    """Whether so many images of this size may be held on the device."""
    needed = count * 3 * size[0] * size[1]
    if device.type == "cuda":
        return needed <= _SHARE * torch.cuda.mem_get_info(device)[0]
    try:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return needed <= 1 << 31
    return needed <= _HOST_SHARE * free
