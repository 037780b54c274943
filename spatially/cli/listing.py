"""``spatially models`` and ``spatially probes``: what there is."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatch
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Column, Table

from spatially.cli import app
from spatially.errors import unknown


@app.command(
    epilog="[bold]Examples[/]\n\n  spatially models\n\n  spatially models 'swin*'\n\n  spatially models 'torchvision/*'"
)
def models(
    pattern: Annotated[str, typer.Argument(help="A name with wildcards; without one, this package's own models.")] = "",
) -> None:
    """List models that can be named: this package's own, timm's, and torchvision's."""
    import timm
    import torchvision

    import spatially.models as own

    names = {name: f"spatially, {what}" for name, what in own.NAMES.items()}
    if pattern:
        # Names with a dot say which trained weights; there are many, so they are listed when asked for.
        known = timm.list_models(pretrained=True) if "." in pattern else timm.list_models()
        names |= {name: "timm" for name in known if name not in names}
        names |= {f"torchvision/{name}": "torchvision" for name in torchvision.models.list_models()}
    if pattern and not any(fnmatch(name, pattern) for name in names):
        raise unknown("model", pattern, names, hint="(patterns take wildcards: 'swin*')")
    table = Table(Column("model", overflow="fold"), Column("source", overflow="fold"))
    for name, source in names.items():
        if not pattern or fnmatch(name, pattern):
            table.add_row(name, source)
    Console().print(table)
    if not pattern:
        Console().print(
            "and every model of timm and torchvision: spatially models 'resnet*'; Hugging Face: hf/REPO or a folder"
        )


@app.command()
def probes() -> None:
    """List the measurements, their options and defaults."""
    from spatially.probes import PROBES

    table = Table("probe", "what it measures", "paper", "options", show_lines=True)
    for kind in PROBES.values():
        fields = dataclasses.fields(kind)  # type: ignore[arg-type]
        table.add_row(
            kind.name, kind.definition, kind.paper, "\n".join(f"{one.name} = {one.default}" for one in fields)
        )
    Console().print(table)
