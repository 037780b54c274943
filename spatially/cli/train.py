"""``spatially train``: a model, a recipe and data become a trained folder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from rich.markup import escape

from spatially.cli import app, options
from spatially.cli.options import IMAGES, MODEL, RUN
from spatially.cli.probe import print_once

RECIPE = "Recipe"
EXAMPLES = """
[bold]Examples[/]

  spatially train swin_tiny_m --recipe xu-1h --data imagenet-100

  spatially train vit_tiny_patch16_224 --recipe park-cifar --data torch/cifar100 --data-dir data --out runs/cifar

  spatially train pit_small --recipe deit --data imagenet --set augmentation.repeats=3 --accumulation 4

  spatially train swin_tiny --recipe xu-1h --data shapes --input-size 64 --batch 64 --epochs 5

  torchrun --nproc-per-node 8 -m spatially train swin_tiny_m --recipe swin --data imagenet
"""


@app.command(epilog=EXAMPLES)
def train(
    model: Annotated[str, typer.Argument(help="A name of this package or of timm: spatially models.")],
    *,
    recipe: Annotated[str, typer.Option(help="A name (spatially recipes), or a YAML file.", rich_help_panel=RECIPE)],
    data: Annotated[
        str,
        typer.Option(
            help="A folder of class folders, or with train/ and val/; shapes; torch/…, hfds/…, wds/…; parquet shards.",
            rich_help_panel=IMAGES,
        ),
    ],
    out: Annotated[
        str | None, typer.Option(help="Folder for everything; default runs/MODEL-RECIPE.", rich_help_panel=RUN)
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a value of the recipe: optimiser.lr=1e-3", rich_help_panel=RECIPE),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="In so many epochs, schedule in proportion.", rich_help_panel=RECIPE)
    ] = None,
    batch: Annotated[
        int | None, typer.Option(help="Images of one step, over all processes.", rich_help_panel=RECIPE)
    ] = None,
    accumulation: Annotated[
        int | None, typer.Option(help="Take each batch in so many parts, for less memory.", rich_help_panel=RECIPE)
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of weights, split and augmentation.", rich_help_panel=RECIPE)
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option(help="Start from these weights: a file or a trained folder.", rich_help_panel=MODEL)
    ] = None,
    model_arg: Annotated[
        list[str] | None,
        typer.Option("--model-arg", help="Argument of the model's constructor: patch_size=2", rich_help_panel=MODEL),
    ] = None,
    input_size: options.InputSize = None,
    data_dir: Annotated[str | None, typer.Option(help="Where a named data set lies.", rich_help_panel=IMAGES)] = None,
    limit: Annotated[int | None, typer.Option(help="So many training images.", rich_help_panel=IMAGES)] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that decode.", rich_help_panel=IMAGES)] = None,
    resident: Annotated[
        bool | None,
        typer.Option(
            "--resident/--loader",
            help="Images in the device's memory, or read again each epoch; default: by size.",
            rich_help_panel=IMAGES,
        ),
    ] = None,
    resume: Annotated[
        str,
        typer.Option(help="auto: go on in --out; never: begin anew; or another run's folder.", rich_help_panel=RUN),
    ] = "auto",
    tracker: Annotated[
        list[str] | None,
        typer.Option(help="tensorboard (where installed), wandb, mlflow, comet_ml.", rich_help_panel=RUN),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.", rich_help_panel=RUN)] = "auto",
) -> None:
    """Train a model as a paper says. Interrupted, the same command goes on where it was."""
    from spatially.train.training import train as run

    with stopping():
        folder = run(
            model,
            recipe,
            data,
            out,
            settings=recipe_settings(set_, batch=batch, accumulation=accumulation, seed=seed)
            | ({} if checkpoint is None else {"initialisation.checkpoint": checkpoint}),
            arguments=model_arguments(model_arg),
            epochs=epochs,
            size=None if input_size is None else options.input_size(input_size),
            root=data_dir,
            limit=limit,
            workers=workers,
            resident=resident,
            resume=None if resume == "never" else resume,
            trackers=tracker,
            device=device,
        )
    print_once(f"\ntrained: [bold]{escape(str(folder))}[/]; measure it: spatially probe {escape(str(folder))} --data …")


@contextmanager
def stopping() -> Iterator[None]:
    """A training that was asked to stop and is saved has said so; the command ends with the code that belongs to it."""
    from spatially.train.guard import Stopped

    try:
        yield
    except Stopped as stop:
        raise typer.Exit(int(stop.code or 0)) from None


def recipe_settings(set_: list[str] | None, **shortcuts: int | None) -> dict[str, Any]:
    """The recipe's values that a command line changes."""
    from spatially.train.library import parse_setting

    keys = {"accumulation": "run.accumulation", "seed": "run.seed"}
    short = {keys.get(name, name): value for name, value in shortcuts.items() if value is not None}
    return short | dict(parse_setting(text) for text in set_ or [])


def model_arguments(given: list[str] | None) -> dict[str, Any]:
    """`patch_size=2` for the model's constructor."""
    from spatially.train.library import parse_setting

    return dict(parse_setting(text, option="--model-arg", example="patch_size=2") for text in given or [])
