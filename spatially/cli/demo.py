"""``spatially demo``: the whole instrument on generated images, with nothing to download."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from spatially.cli import app

CALIBRATORS = ("bag_of_patches", "rigid_template")
EXAMPLES = """
[bold]Examples[/]

  spatially demo --out runs/demo

  spatially demo --models calibrators --limit 1200 --out runs/calibration

  spatially demo --models demo/cnn,demo/swin,demo/swin_m --probes sensitivity --out runs/three
"""


@app.command(epilog=EXAMPLES)
def demo(
    out: Annotated[str, typer.Option(help="Folder for results and page.")] = "runs/demo",
    limit: Annotated[int, typer.Option(help="Generated images.")] = 480,
    models: Annotated[
        str, typer.Option(help="all: the calibrators and the small trained models; calibrators; or names, by commas.")
    ] = "all",
    probes: Annotated[str, typer.Option(help="Names, separated by commas; all for all that apply.")] = "all",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda.")] = "auto",
) -> None:
    """Every probe on two calibrators, whose answers are known, and on small models of the families, trained beforehand.

    A bag of patches reads 0, a rigid template 1; the others lie where they lie.
    """
    from spatially.cli.probe import show_results
    from spatially.report.study import report_study
    from spatially.study import run_study
    from spatially.study.spec import make_study

    study = make_study(
        models=demo_models(models), data={"source": "shapes", "limit": limit}, probes=demo_probes(probes), batch=120
    )
    store = run_study(study, out, device=device)
    show_results(store.results())
    page = report_study(out)
    Console().print(f"\nopen [bold]{escape(str(page))}[/] in a browser")


def demo_models(wanted: str) -> list[dict[str, Any]]:
    """The models of a demo by name."""
    from spatially.models.demo import PREFIX, trained

    every = [*CALIBRATORS, *(PREFIX + name for name in trained())]
    names = {"all": every, "calibrators": list(CALIBRATORS)}.get(wanted) or [one.strip() for one in wanted.split(",")]
    return [{"model": name} for name in names if name]


def demo_probes(wanted: str) -> dict[str, dict[str, Any]]:
    """The probes of a demo, with options for images of 64×64 and a few minutes on two cores."""
    fitting: dict[str, dict[str, Any]] = {
        "sensitivity": {"blocks": [4, 8, 16, 32], "ratios": [0.0, 0.25, 0.5, 0.75, 1.0]},
        "paste": {"block": 8},
        # The object fills the centre half, so that nothing would be left of it; and a step of 1/255 changes nothing.
        "robustness": {"occlusion": 0.25, "epsilons": ["1/255", "4/255"]},
        # Mirrored or cut, an arrangement is another one: the models were trained on whole images that are never flipped.
        "hessian": {"augmentation": "none"},
        "landscape": {"points": 5, "augmentation": "none"},
    }
    names = [one.strip() for one in wanted.split(",") if one.strip()]
    chosen = {name: fitting.get(name, {}) for name in names}
    return chosen | fitting if "all" in chosen else chosen
