"""``spatially models`` and ``spatially probes``: what there is."""

from __future__ import annotations

import dataclasses
from fnmatch import fnmatch
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
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
    from spatially.models.demo import DEMO, PREFIX, trained

    # Names with a dot say which trained weights; there are many, so they are listed when asked for.
    known = timm.list_models(pretrained=True) if "." in pattern else timm.list_models()
    ours = [*own.CALIBRATORS, *own.CARDS]
    others = {PREFIX + name: f"this package, trained: {DEMO[name].what}" for name in trained()}
    others |= {name: "timm" for name in known if name not in ours}
    others |= {f"torchvision/{name}": "torchvision" for name in torchvision.models.list_models()}
    if pattern and not any(fnmatch(name, pattern) for name in [*ours, *others]):
        raise unknown("model", pattern, [*ours, *others], hint="(patterns take wildcards: 'swin*')")
    console = Console()
    if chosen := [name for name in ours if fnmatch(name, pattern or "*")]:
        console.print(_own_models(chosen))
    if not pattern:
        console.print(
            "and every model of timm and torchvision: spatially models 'resnet*'; small trained ones: spatially models "
            "'demo/*'; Hugging Face: hf/REPO or a folder"
        )
    elif chosen := [name for name in others if fnmatch(name, pattern)]:
        table = Table(Column("model", overflow="fold"), "source")
        for name in chosen:
            table.add_row(name, others[name])
        console.print(table)


def _own_models(names: list[str]) -> Table:
    """This package's models by paper, with what they cost."""
    from rich.box import SIMPLE_HEAD

    from spatially.models import CALIBRATORS, CARDS, PAPERS
    from spatially.models.costs import SIDE, known

    costs = known()
    shown = {card.paper for name in names if (card := CARDS.get(name))}
    table = Table(
        Column("model", no_wrap=True),
        Column("what it is", overflow="fold"),
        Column("M params", justify="right", no_wrap=True),
        Column("GMACs", justify="right", no_wrap=True),
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
        caption=f"M params: millions of parameters; GMACs: for one {SIDE}×{SIDE} image\n"
        + "\n".join(f"{key}: {title}" for key, title in PAPERS.items() if key in shown),
        caption_justify="left",
    )
    for name in names:
        if name in CALIBRATORS:
            table.add_row(name, CALIBRATORS[name], "", "")
    for paper in PAPERS:
        if paper not in shown:
            continue
        table.add_section()
        table.add_row(f"[bold]{paper}[/]")
        for name in names:
            if (card := CARDS.get(name)) and card.paper == paper:
                cost = costs[name]
                table.add_row(name, card.what, f"{cost.parameters / 1e6:.2f}", f"{cost.macs / 1e9:.2f}")
    return table


@app.command()
def probes() -> None:
    """List the measurements, their options and defaults."""
    from spatially.probes import PROBES
    from spatially.report.reading import READING

    console = Console(highlight=False)
    for name, kind in PROBES.items():
        fields = dataclasses.fields(kind)  # type: ignore[arg-type]
        given = "; ".join(f"{one.name} = {_default(one.default)}" for one in fields)
        asked = READING.get(name, ("",))[0]
        long = "  [yellow]takes long: --probes all leaves it out unless it is named as well[/]" if kind.lengthy else ""
        console.print(f"[bold cyan]{name}[/]{long}")
        for text, style in ((asked, "bold"), (kind.definition, ""), (kind.paper, "dim"), (f"options: {given}", "")):
            console.print(Padding(escape(text), (0, 0, 0, 2)), style=style)
        console.print()
    console.print("an option is set by --set PROBE.OPTION=VALUE, for example --set paste.block=8")


def _default(value: object) -> str:
    """
    >>> _default((8, 16)), _default(0.2 / 3.14159), _default(None)
    ('[8, 16]', '0.0637', 'null')
    """
    if isinstance(value, tuple | list):
        return f"[{', '.join(_default(one) for one in value)}]"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return f"{value:.3g}" if isinstance(value, float) else str(value)
