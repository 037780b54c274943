"""The command line: ``spatially demo | probe | report | look | anatomy | train | sweep | models | probes | recipes``."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence

import typer
from rich.console import Console
from rich.text import Text

from spatially.errors import UserError
from spatially.version import __version__

# Some releases of typer bring their own click, others import it; either way this is its class.
_UsageError: type[Exception] = typer.BadParameter.__bases__[0]

app = typer.Typer(
    help="Does a vision model see spatial structure, or a bag of patches?",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with [bold]spatially demo --out runs/demo[/]: no downloads, one page, a few minutes.",
)


@app.callback(invoke_without_command=True)
def _root(version: bool = typer.Option(False, "--version", help="Print the version and stop.")) -> None:
    if version:
        print(f"spatially {__version__}")
        raise typer.Exit


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line. A user's mistake is one line and exit code 2."""
    from spatially.cli import commands  # noqa: F401  (registers them)
    from spatially.files import WriteError
    from spatially.study.processes import leave

    before, warnings.formatwarning = warnings.formatwarning, _one_line
    errors = Console(stderr=True, soft_wrap=True, highlight=False, emoji=False)
    # Under a launcher every process meets the same mistake; one of them says it.
    speaks = os.environ.get("RANK", "0") == "0"
    code = 0
    try:
        result = app(args=arguments, standalone_mode=False)
        code = result if isinstance(result, int) else 0
    except UserError as error:
        code = _say(errors, str(error), 2, speaks)
    except _UsageError as error:
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            code = 2
        else:
            code = _say(errors, error.format_message(), 2, speaks)  # type: ignore[attr-defined]
    except WriteError as error:
        code = _say(errors, str(error.strerror), 1, speaks)
    except (KeyboardInterrupt, typer.Abort):
        code = _say(errors, "stopped; the same command goes on from here", 130, speaks)
    except typer.Exit as stop:
        code = stop.exit_code
    finally:
        warnings.formatwarning = before
    leave()
    sys.exit(code)


def _one_line(message: Warning | str, *_: object, **__: object) -> str:
    """A warning without the place in the code that gave it, which tells a user of the command line nothing."""
    return f"warning: {' '.join(str(message).split())}\n"


def _say(console: Console, message: str, code: int, speaks: bool) -> int:
    if speaks:
        text = " ".join(message.split())
        console.print(Text.assemble(("error: ", "bold red"), text))
    return code


__all__ = ["app", "main"]
