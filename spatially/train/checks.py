"""What cannot work, said before the first step: output, classes, sizes, batch and memory."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import torch
from torch import Tensor, nn

from spatially.data.sources import IMAGES
from spatially.errors import UserError, first_line
from spatially.subject.subject import logits_of
from spatially.train.recipe import Recipe
from spatially.train.sources import VALIDATION

PRECISIONS = {"bf16": torch.bfloat16, "fp16": torch.float16}
_TRIED = 2  # images: batch normalisation in training needs two


def check_output(out: Path) -> None:
    """That results can be written there; the folder itself is made when the training begins."""
    try:
        there = next(folder for folder in (out, *out.absolute().parents) if folder.exists())
        trial = there / f".trial.{os.getpid()}"
        trial.write_bytes(b"")
        trial.unlink()
    except OSError as error:
        raise UserError(
            f"--out {out} cannot be written: {os.strerror(error.errno or 0)}; choose another folder"
        ) from error


def check_folder(root: Path) -> None:
    """That every class folder of a folder, or of its train/ and val/, holds an image, and that there are two of them."""
    splits = [root / name for name in ("train", *VALIDATION, "test") if (root / name).is_dir()]
    for part in splits if (root / "train").is_dir() else [root]:
        folders = sorted(path for path in part.iterdir() if path.is_dir() and not path.name.startswith("."))
        if not folders:
            continue  # what else may lie there is the reader's matter
        empty = [folder.name for folder in folders if not _has_image(folder)]
        if empty:
            shown = ", ".join(empty[:5]) + (f" and {len(empty) - 5} more" if len(empty) > 5 else "")
            raise UserError(f"class folders of {part} without images: {shown}; add images to them, or remove them")
        if len(folders) == 1:
            raise UserError(_one_class(str(part), folders[0].name))
        _check_names(part, folders)


def _has_image(folder: Path) -> bool:
    """Whether an image lies in a folder or below it."""
    return next(_holding(folder), None) is not None


def _holding(folder: Path) -> Iterator[Path]:
    """The folders, itself or below, that images lie in; nothing that is hidden counts."""
    for root, below, names in os.walk(folder, followlinks=True):
        below[:] = [name for name in below if not name.startswith(".")]
        if any(name.lower().endswith(IMAGES) and not name.startswith(".") for name in names):
            yield Path(root)


def _check_names(part: Path, folders: list[Path]) -> None:
    """That no two folders would become one class: an image's class is the name of the folder that it lies in."""
    seen: dict[str, Path] = {}
    for place in (place for folder in folders for place in _holding(folder)):
        _check_text(place.name, where=str(part))
        other = seen.setdefault(place.name, place)
        if other != place:
            raise UserError(
                f"an image's class is the name of the folder it lies in, and {part} has two that are called {place.name}: "
                f"{other.relative_to(part)} and {place.relative_to(part)}; put images right into {part}/CLASS/"
            )


def _one_class(where: str, name: str) -> str:
    return f"{where} has one class, {name!r}, and a classifier needs at least two; give a folder of class folders"


def _check_text(name: str, *, where: str) -> None:
    """That a class has a name that can be written down: a folder's may be any bytes."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        shown = name.encode(errors="backslashreplace").decode()
        raise UserError(f"a class's name must be UTF-8, but in {where} one came as {shown}: rename it") from error


def check_classes(classes: tuple[str, ...], *, where: str) -> None:
    """That there are classes to tell apart."""
    if len(classes) < 2:
        raise UserError(_one_class(where, classes[0] if classes else ""))
    twice = [name for name, count in Counter(classes).items() if count > 1]
    if twice:
        raise UserError(f"classes of {where} must have different names, but {twice[0]!r} comes twice")
    for name in classes:
        _check_text(name, where=where)


def check_processes(recipe: Recipe, processes: int) -> None:
    """That the batch can be cut into equal parts for the processes and the accumulated micro-batches."""
    parts = processes * recipe.run.accumulation
    if recipe.batch % parts:
        above = -(-recipe.batch // parts) * parts
        raise UserError(
            f"the batch of {recipe.batch} cannot be cut into {processes} processes × {recipe.run.accumulation} "
            f"accumulated parts: give --batch {above}"
        )


def check_answers(model: nn.Module, name: str, *, size: tuple[int, int], classes: int) -> None:
    """That the model takes images of this size and answers in so many classes."""
    weight = next(model.parameters())
    black = torch.zeros(1, 3, *size, dtype=weight.dtype, device=weight.device)
    try:
        with _as_before(model), torch.no_grad():
            output = logits_of(model.eval()(black))
    except (RuntimeError, AssertionError, ValueError, IndexError, TypeError) as error:
        raise UserError(
            f"{name} cannot take images of {size[0]}×{size[1]} ({first_line(error)}): give another --input-size, or change "
            "the model with --model-arg"
        ) from error
    if output.shape != (1, classes):
        raise UserError(f"{name} answers with {tuple(output.shape)} numbers for one image, not with {classes} classes")


def check_part(model: nn.Module, recipe: Recipe, *, size: tuple[int, int], processes: int) -> None:
    """That the model can train on as many images as a process takes at a time, where that is a single one."""
    if recipe.batch > processes * recipe.run.accumulation:
        return
    try:
        with _as_before(model), torch.no_grad():
            _answer(model.train(), recipe, size, 1)
    except ValueError as error:  # batch normalisation's
        parts = f"{processes} processes × {recipe.run.accumulation} accumulated parts"
        raise UserError(
            f"the batch of {recipe.batch} in {parts} leaves one image at a time, on which this model cannot be trained "
            f"({first_line(error)}): give --batch {2 * recipe.batch} or more, or a smaller --accumulation"
        ) from error


def check_memory(model: nn.Module, recipe: Recipe, *, size: tuple[int, int], processes: int, free: int | None) -> None:
    """That a step fits into `free` bytes of the device's memory, by what a step on two images keeps for its backward pass.

    A step holds weights, gradients, the optimiser's moments and an average of the weights (where there are such), and for
    each image of a micro-batch what the backward pass needs. On CUDA an estimate above `free` is tried before it is believed.
    """
    if free is None:
        return
    part = recipe.batch // (processes * recipe.run.accumulation)
    fixed, each = step_bytes(model, recipe, size)
    if fixed + part * each <= free or (_device(model).type == "cuda" and _fits(model, recipe, size, part)):
        return
    needed = f"a step of {part} images needs about {_words(fixed + part * each)} and {_words(free)} are free"
    possible = (free - fixed) // each if each else 0
    if possible < 1:
        raise UserError(f"{needed}, too little for one image: choose a smaller model or --input-size")
    share = recipe.batch // processes
    accumulation = next(count for count in range(1, share + 1) if share % count == 0 and share // count <= possible)
    raise UserError(
        f"{needed}: give --accumulation {accumulation}, which takes the batch in {accumulation} parts, "
        f"or --batch {possible * processes} or less"
    )


def step_bytes(model: nn.Module, recipe: Recipe, size: tuple[int, int]) -> tuple[int, int]:
    """Bytes that a step takes whatever its batch, and more for each image."""
    held = sum(value.numel() * value.element_size() for value in model.parameters())
    # The weights themselves are there already; gradients, moments and an average come on top.
    copies = 1 + (1 if recipe.optimiser.name == "sgd" else 2) + (recipe.regularisation.ema is not None)
    few, more = (_kept_bytes(model, recipe, size, images) for images in (_TRIED, 2 * _TRIED))
    each = max(0, more - few) // _TRIED
    return held * copies + max(0, few - _TRIED * each), each


def _kept_bytes(model: nn.Module, recipe: Recipe, size: tuple[int, int], images: int) -> int:
    """What a forward pass on so many images keeps for the backward pass, besides the weights."""
    weights = {value.untyped_storage().data_ptr() for value in [*model.parameters(), *model.buffers()]}
    kept: dict[int, int] = {}

    def keep(value: Tensor) -> Tensor:
        storage = value.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return value

    with _as_before(model), torch.autograd.graph.saved_tensors_hooks(keep, lambda value: value):
        answers = _answer(model.train(), recipe, size, images)  # kept until here, so that no memory is used twice
    del answers
    return sum(kept.values())


def _answer(model: nn.Module, recipe: Recipe, size: tuple[int, int], images: int) -> Tensor:
    """The sum of the model's answers to black images, as training computes them."""
    weight = next(model.parameters())
    black = torch.zeros(images, 3, *size, dtype=weight.dtype, device=weight.device)
    dtype = PRECISIONS.get(recipe.run.precision)
    with nullcontext() if dtype is None else torch.autocast(weight.device.type, dtype):
        output = model(black)
    pair = output if isinstance(output, tuple | list) else (output,)
    return torch.stack([one.float().sum() for one in pair]).sum()


def _fits(model: nn.Module, recipe: Recipe, size: tuple[int, int], images: int) -> bool:
    """Whether a forward and a backward pass run through."""
    try:
        with _as_before(model):
            _answer(model.train(), recipe, size, images).backward()
    except torch.cuda.OutOfMemoryError:
        return False
    finally:
        model.zero_grad(set_to_none=True)
        torch.cuda.empty_cache()
    return True


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Leaves modes, buffers (batch normalisation counts) and random numbers as they were."""
    modes = {module: module.training for module in model.modules()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    device = _device(model)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            for module, training in modes.items():
                module.training = training
            with torch.no_grad():
                for name, value in model.named_buffers():
                    value.copy_(buffers[name])


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on the device; None where nobody tells."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration, ValueError, IndexError):
        return None


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device


def _words(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"
