"""``spatially report``: the page and figures of a study."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from spatially.cli import app


@app.command(epilog="[bold]Example[/]\n\n  spatially report runs/compare")
def report(folder: Annotated[str, typer.Argument(help="Folder of a study.")]) -> None:
    """Draw a study: FOLDER/report.html, one page that works offline, with figures and tables beside it."""
    from spatially.report.study import report_study

    page = report_study(folder)
    Console().print(f"wrote {escape(str(page))}")
