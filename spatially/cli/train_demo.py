"""``spatially train-demo``: the demo's models, made anew."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from spatially.cli import app
from spatially.cli.train import stopping

EXAMPLES = """
[bold]Examples[/]

  spatially train-demo

  spatially train-demo swin swin_m --set epochs=10 --out runs/trial --folder runs/trial/package
"""


@app.command("train-demo", epilog=EXAMPLES)
def train_demo(
    names: Annotated[list[str] | None, typer.Argument(help="Which of them; default: all.")] = None,
    out: Annotated[str, typer.Option(help="Folder for the runs.")] = "runs/demo-models",
    folder: Annotated[
        str | None, typer.Option(help="Where the small files go; default: this package's models/demo.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change a value of the recipe demo: epochs=10")
    ] = None,
    limit: Annotated[int | None, typer.Option(help="Training images.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
) -> None:
    """Train the small models of the demo on the generated set, and keep them as float16 in the package."""
    from spatially.train.demo import train_demo as run
    from spatially.train.library import parse_setting

    settings = dict(parse_setting(text) for text in set_ or [])
    with stopping():
        made = run(names or (), out, folder=folder, settings=settings, limit=limit, device=device)
    table = Table(
        Column("model", no_wrap=True),
        Column("accuracy", justify="right"),
        Column("weights", justify="right"),
        Column("seconds", justify="right"),
        box=SIMPLE_HEAD,
    )
    for name, facts in made.items():
        table.add_row(f"demo/{name}", f"{facts['accuracy']:.1%}", f"{facts['parameters']:,}", f"{facts['seconds']:.0f}")
    Console().print(table)
