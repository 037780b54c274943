"""`train`: a model by name, a recipe and data become a folder that `spatially.load` opens."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import is_comet_ml_available, is_mlflow_available, is_tensorboard_available, is_wandb_available
from rich.console import Console
from rich.markup import escape

from spatially.data.shapes import Shapes
from spatially.errors import UserError, unknown
from spatially.study.processes import PATIENCE
from spatially.train.build import build_model, check_model, input_size, normalisation
from spatially.train.card import Identity
from spatially.train.checks import (
    check_answers,
    check_classes,
    check_folder,
    check_memory,
    check_output,
    check_part,
    check_processes,
    free_memory,
)
from spatially.train.data import open_training
from spatially.train.distillation import load_teacher
from spatially.train.library import read_recipe
from spatially.train.loop import fit
from spatially.train.processes import check_launched, joining, launched, on_cpu
from spatially.train.recipe import Recipe
from spatially.train.resume import before, check_same, facts_of

TRACKERS = {
    "tensorboard": is_tensorboard_available,
    "wandb": is_wandb_available,
    "mlflow": is_mlflow_available,
    "comet_ml": is_comet_ml_available,
}


def train(
    model: str,
    recipe: str | Path | Recipe,
    data: Any,
    out: str | Path | None = None,
    *,
    settings: Mapping[str, Any] | None = None,
    epochs: int | None = None,
    arguments: Mapping[str, Any] | None = None,
    size: int | Sequence[int] | None = None,
    root: str | Path | None = None,
    limit: int | None = None,
    workers: int | None = None,
    resident: bool | None = None,
    device: str = "auto",
    resume: str | Path | None = "auto",
    trackers: Sequence[str] | None = None,
    quiet: bool = False,
) -> Path:
    """Train a model and return the folder it is in; interrupted, the same call goes on where it was.

    Args:
        model: a name of this package or of timm: `spatially models`.
        recipe: a name (`spatially recipes`), a YAML file, or a :class:`Recipe`.
        data: a folder of class folders, or one with `train/` and `val/`; `shapes`; a name of timm's readers
            (`torch/cifar100`, `hfds/…`, `wds/…`); a folder of parquet shards; or arrays, (uint8 images, labels).
        out: where everything goes; by default `runs/MODEL-RECIPE`.
        settings: changes to the recipe by dotted keys, `{"optimiser.lr": 0.001}`.
        epochs: the recipe in so many epochs, its warm-up and milestones in proportion.
        arguments: of the model's constructor.
        size: side of the images, or (height, width); by default the recipe's, else the model's own.
        root: where a named data set lies.
        limit: so many training images, drawn by the seed.
        workers: that decode images.
        resident: whether images stay in the device's memory; by default as the training began, and at first where they fit.
        device: auto, cpu or cuda.
        resume: `auto` goes on in `out` where there is something; another run's folder or checkpoint, from there, unless
            `out` has gone on from it already; None begins anew.
        trackers: of accelerate's, such as wandb; by default tensorboard where it is installed.
        quiet: say nothing.
    """
    check_model(model)
    chosen = choose(recipe, settings=settings, epochs=epochs)
    if device not in ("auto", "cpu", "cuda"):
        raise UserError(f"device must be auto, cpu or cuda, but came as {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise UserError("device cuda was asked for, but there is none here: --device cpu")
    folder = Path(out) if out is not None else default_out(model, chosen)
    check_output(folder)
    accelerator = _accelerator(folder, cpu=on_cpu(asked=device == "cpu"), trackers=trackers)
    place, processes = accelerator.device, accelerator.num_processes
    check_launched(processes)
    chosen = in_force(chosen, place)
    console = Console(stderr=True, quiet=quiet or not accelerator.is_main_process, highlight=False)
    shape = input_size(model, chosen, size)
    where = str(data) if isinstance(data, str | Path) else "the arrays"
    check_processes(chosen, processes)
    if isinstance(data, str | Path) and Path(data).is_dir():
        check_folder(Path(data))

    start = before(folder, resume)
    if start is not None and resident is None:
        resident = start.facts.get("resident")

    mean, std = normalisation(model)
    with accelerator.main_process_first():  # which decodes the set for all
        training, validation, test = open_training(
            data,
            recipe=chosen,
            size=shape,
            mean=mean,
            std=std,
            device=place,
            rank=accelerator.process_index,
            world=processes,
            split=chosen.data.split,
            seed=chosen.run.seed,
            root=root,
            limit=limit,
            workers=workers,
            resident=resident,
        )
    check_classes(training.classes, where=where)

    built = build_model(model, recipe=chosen, classes=len(training.classes), size=shape, arguments=arguments)
    check_answers(built.model, model, size=shape, classes=len(training.classes))
    built.model.to(place)
    check_part(built.model, chosen, size=shape, processes=processes)
    free = free_memory(place)
    check_memory(built.model, chosen, size=shape, processes=processes, free=free)
    preprocessing = validation.preprocessing
    identity = Identity(name=model, options=built.arguments, preprocessing=preprocessing, data=described(data))
    if start is not None:
        check_same(start, facts_of(chosen, identity, training))
    teacher = load_teacher(chosen, training.classes, preprocessing, place)

    parameters = sum(value.numel() for value in built.model.parameters())
    console.print(
        f"[bold]{escape(model)}[/], {parameters:,} parameters, {shape[0]}×{shape[1]}, "
        f"{len(training.classes)} classes; recipe [bold]{chosen.name}[/], epochs: {chosen.total_epochs} of "
        f"{training.images_per_epoch:,} images in batches of {chosen.batch}, {chosen.optimiser.name} at "
        f"{chosen.learning_rate:g}; into [bold]{escape(str(folder))}[/]"
    )
    small = [*(["patch_size"] if chosen.model.patch_size else []), *chosen.model.arguments]
    if small and set(small) <= set(built.unused):
        console.print(f"{escape(model)} takes nothing of what the recipe asks of a model ({', '.join(small)})")
    if "drop_path_rate" in built.unused and chosen.regularisation.drop_path:
        console.print(f"{escape(model)} has no stochastic depth: the recipe's drop_path has no effect")
    history = fit(
        built.model,
        training,
        validation,
        chosen,
        folder,
        identity=identity,
        resume=resume,
        test=test,
        teacher=teacher,
        accelerator=accelerator,
        console=console,
    )
    return Path(history.out)


def _accelerator(folder: Path, *, cpu: bool, trackers: Sequence[str] | None) -> Accelerator:
    """Processes, device and trackers; the recipe says the precision."""
    names = list(trackers) if trackers is not None else ["tensorboard"] if is_tensorboard_available() else []
    for name in names:
        if name not in TRACKERS:
            raise unknown("tracker", name, TRACKERS)
    handlers = [InitProcessGroupKwargs(timeout=PATIENCE)] if launched() > 1 else []
    missing = [name for name in names if not TRACKERS[name]()]
    if missing:
        raise UserError(f"the tracker {missing[0]} is not installed: pip install {missing[0]}")
    with joining():
        return Accelerator(
            cpu=cpu, mixed_precision="no", log_with=names or None, project_dir=folder, kwargs_handlers=handlers
        )


def choose(
    recipe: str | Path | Recipe, *, settings: Mapping[str, Any] | None = None, epochs: int | None = None
) -> Recipe:
    """A recipe by name, from a file or as it is, in so many epochs and with values changed."""
    chosen = recipe if isinstance(recipe, Recipe) else read_recipe(recipe)
    if epochs is not None:
        if epochs < 1:
            raise UserError(f"epochs must be a whole number of at least 1, but came as {epochs}")
        chosen = chosen.within(epochs)
    return chosen.override(settings or {})


def in_force(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe with what depends on the machine decided: bf16 on CUDA and fp32 on CPU where it leaves the precision open."""
    if recipe.run.precision != "auto":
        return recipe
    return recipe.override({"run.precision": "bf16" if device.type == "cuda" else "fp32"})


def described(data: Any) -> str:
    """The data in words for the model's card, which must not carry the layout of somebody's disk.

    >>> described("/home/me/sets/imagenet-100"), described("torch/cifar100"), described("shapes")
    ('sets/imagenet-100', 'torch/cifar100', 'generated shapes')
    """
    if not isinstance(data, str | Path):
        return "generated shapes" if isinstance(data, Shapes) else "arrays in memory"
    return "generated shapes" if data == "shapes" else "/".join(Path(data).parts[-2:])


def default_out(model: str, recipe: Recipe) -> Path:
    """`runs/MODEL-RECIPE`."""
    return Path("runs") / re.sub(r"[^\w.-]+", "_", f"{model}-{recipe.name}")
