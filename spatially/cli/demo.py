"""``spatially demo``: the whole instrument on generated images, with nothing to download."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from spatially.cli import app

MODELS = ("bag_of_patches", "rigid_template")


@app.command(epilog="[bold]Example[/]\n\n  spatially demo --out runs/demo")
def demo(
    out: Annotated[str, typer.Option(help="Folder for results and page.")] = "runs/demo",
    limit: Annotated[int, typer.Option(help="Generated images.")] = 1200,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
) -> None:
    """Every probe on the two calibrators, whose answers are known: a bag of patches reads 0, a rigid template 1."""
    from spatially.cli.probe import show_results
    from spatially.report.study import report_study
    from spatially.study import Study, run_study

    study = Study(
        models=[{"model": name} for name in MODELS],
        data={"source": "shapes", "limit": limit},
        probes={"sensitivity": {"blocks": [4, 8, 16, 32]}, "paste": {"block": 8}},
        batch=120,
    )
    store = run_study(study, out, device=device)
    show_results(store.results())
    page = report_study(out)
    Console().print(f"\nopen [bold]{escape(str(page))}[/] in a browser")
