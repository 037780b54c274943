"""``spatially sweep``: several sizes of some models, one recipe; loss and accuracy against computation."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from spatially.cli import app, options
from spatially.cli.options import IMAGES, MODEL, RUN
from spatially.cli.train import RECIPE, recipe_settings, stopping
from spatially.errors import UserError

EXAMPLES = """
[bold]Examples[/]

  spatially sweep pit_tiny pit_small vit_tiny_unpooled vit_small_unpooled --recipe vanilla --data imagenet --out runs/3

  spatially sweep resnet50_flat --vary base_width=128,192,256 --recipe vanilla --data imagenet --out runs/2
"""

HEADINGS = ("parameters", "GMACs", "training\nloss", "training\naccuracy", "validation\naccuracy")


@app.command(epilog=EXAMPLES)
def sweep(
    models: Annotated[list[str], typer.Argument(help="Names of this package or of timm: spatially models.")],
    *,
    recipe: Annotated[str, typer.Option(help="A name (spatially recipes), or a YAML file.", rich_help_panel=RECIPE)],
    data: Annotated[str, typer.Option(help="As for spatially train.", rich_help_panel=IMAGES)],
    out: Annotated[str, typer.Option(help="Folder for the trainings, the table and the figures.", rich_help_panel=RUN)],
    vary: Annotated[
        list[str] | None,
        typer.Option(help="Values of an argument of the model: base_width=64,96,128", rich_help_panel=MODEL),
    ] = None,
    set_: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change a value of the recipe: optimiser.lr=1e-3", rich_help_panel=RECIPE),
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="In so many epochs, schedule in proportion.", rich_help_panel=RECIPE)
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Images of one step.", rich_help_panel=RECIPE)] = None,
    accumulation: Annotated[int | None, typer.Option(help="Parts of a batch.", rich_help_panel=RECIPE)] = None,
    seed: Annotated[int | None, typer.Option(help="Of weights and augmentation.", rich_help_panel=RECIPE)] = None,
    input_size: options.InputSize = None,
    data_dir: Annotated[str | None, typer.Option(help="Where a named data set lies.", rich_help_panel=IMAGES)] = None,
    limit: Annotated[int | None, typer.Option(help="So many training images.", rich_help_panel=IMAGES)] = None,
    workers: Annotated[int | None, typer.Option(help="Processes that decode.", rich_help_panel=IMAGES)] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.", rich_help_panel=RUN)] = "auto",
) -> None:
    """Train several models by one recipe and draw loss and accuracy against their cost. Interrupted, it goes on."""
    from spatially.train.sweep import sweep as run

    with stopping():
        outcomes = run(
            models,
            recipe,
            data,
            out,
            epochs=epochs,
            vary=dict(_varied(text) for text in vary or []),
            settings=recipe_settings(set_, batch=batch, accumulation=accumulation, seed=seed),
            size=None if input_size is None else options.input_size(input_size),
            root=data_dir,
            limit=limit,
            workers=workers,
            device=device,
        )
    table = Table(
        Column("model", overflow="fold"),
        *(Column(name, justify="right", no_wrap=True) for name in HEADINGS),
        box=SIMPLE_HEAD,
    )
    for one in outcomes:
        name = " ".join([one.model, *(f"{key}={value}" for key, value in one.arguments.items())])
        accuracies = [f"{value:.1%}" for value in (one.train_accuracy, one.validation_accuracy)]
        table.add_row(
            escape(name), f"{one.parameters:,}", f"{one.macs / 1e9:.3g}", f"{one.train_loss:.3f}", *accuracies
        )
    console = Console()
    console.print(table)
    console.print(f"table and figures: {escape(out)}/sweep.csv, sweep.svg, sweep.pdf, sweep.png")


def _varied(text: str) -> tuple[str, list[object]]:
    """`base_width=64,96` as a name and its values."""
    from spatially.train.library import parse_setting

    name, value = parse_setting(text, option="--vary", example="base_width=64,96,128")
    values = value if isinstance(value, list) else [_plain(word) for word in str(text.partition("=")[2]).split(",")]
    if not values or values == [None]:
        raise UserError(f"--vary {name}=… takes values separated by commas, but came as {text!r}")
    return name, values


def _plain(word: str) -> object:
    import yaml

    return yaml.safe_load(word)
