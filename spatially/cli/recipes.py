"""``spatially recipes``: how models are trained."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Column, Table

from spatially.cli import app

EXAMPLES = """
[bold]Examples[/]

  spatially recipes

  spatially recipes deit > mine.yaml

  spatially recipes deit --set optimiser.lr=1e-3 --set batch=256
"""


@app.command(epilog=EXAMPLES)
def recipes(
    name: Annotated[str, typer.Argument(help="A recipe, or a YAML file; without one, all are listed.")] = "",
    set_: Annotated[list[str] | None, typer.Option("--set", help="Change a value: optimiser.lr=1e-3")] = None,
) -> None:
    """List the recipes, or print one in full: its head and every value, the rate for its batch among them."""
    from spatially.train.library import as_yaml, head_comment, parse_setting, read_recipe

    if not name:
        Console().print(_table())
        return
    recipe = read_recipe(name).override(dict(parse_setting(text) for text in set_ or []))
    for line in head_comment(name).splitlines():
        print(f"# {line}".rstrip())
    print(
        f"\n# in force: lr {recipe.learning_rate:g} at a batch of {recipe.batch}, {recipe.total_epochs} epochs in all"
    )
    print(as_yaml(recipe.resolve()), end="")


def _table() -> Table:
    from spatially.train.library import head_comment, read_recipe, recipe_names

    table = Table(
        Column("recipe", no_wrap=True),
        Column("what it is", overflow="fold"),
        Column("epochs", justify="right"),
        Column("batch", justify="right"),
        Column("optimiser", no_wrap=True),
        Column("paper", no_wrap=True),
        box=SIMPLE_HEAD,
        caption="one in full: spatially recipes NAME; to train: spatially train MODEL --recipe NAME --data DATA",
        caption_justify="left",
    )
    for name in recipe_names():
        recipe = read_recipe(name)
        what = head_comment(name).splitlines()[0].partition(": ")[2]
        rate = f"{recipe.optimiser.name} {recipe.learning_rate:g}"
        table.add_row(name, what, str(recipe.total_epochs), str(recipe.batch), rate, recipe.paper)
    return table
