"""``spatially anatomy``: the residual stream of a model, point by point."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from spatially.cli import app, options

if TYPE_CHECKING:
    from spatially.observe import Place

EXAMPLES = """
[bold]Examples[/]

  spatially anatomy swin_tiny_patch4_window7_224 --no-pretrained

  spatially anatomy torchvision/resnet50 --input-size 256x192
"""
COLOURS = {"stem": "bold", "attention": "magenta", "mlp": "cyan", "convolution": "green", "subsampling": "blue"}


@app.command(epilog=EXAMPLES)
def anatomy(
    context: typer.Context,
    model: Annotated[
        str, typer.Argument(help="timm name, torchvision/NAME, hf/REPO, a folder, package.module:callable.")
    ],
    *,
    pretrained: options.Pretrained = True,
    checkpoint: options.Checkpoint = None,
    num_classes: options.NumClasses = None,
    input_size: options.InputSize = None,
    resize: options.Resize = None,
    crop_mode: options.CropMode = None,
    mean: options.Mean = None,
    std: options.Std = None,
    interpolation: options.Interpolation = None,
    dtype: options.Dtype = "auto",
    compile: options.Compile = False,
    channels_last: options.ChannelsLast = False,
    device: options.Device = "auto",
) -> None:
    """Where a model's residual stream runs: what is added to it, layer by layer, and the grid of its map."""
    from spatially.observe import stream
    from spatially.subject import load

    subject = load(model, device=device, **options.model_options(context))
    height, width = subject.preprocessing.input_size
    places = stream(subject).places()
    Console().print(anatomy_table(subject.name, places, size=(height, width)))


def anatomy_table(name: str, places: Sequence[Place], *, size: tuple[int, int]) -> Table:
    """A line a point; a rule where the grid changes."""
    table = Table(
        Column("", justify="right", no_wrap=True),
        Column("what is added", overflow="fold", min_width=30),
        Column("kind", no_wrap=True),
        Column("grid", justify="right", no_wrap=True),
        Column("channels", justify="right", no_wrap=True),
        Column("layout", no_wrap=True),
        title=f"{escape(name)}, residual stream for images of {size[0]}×{size[1]}",
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    for place, following in pairwise([*places, None]):
        assert place is not None
        table.add_row(
            str(place.index),
            escape(place.name),
            f"[{COLOURS[place.kind]}]{place.kind}[/]",
            f"{place.grid[0]}×{place.grid[1]}" + (f" + {place.prefix}" if place.prefix else ""),
            str(place.channels),
            place.layout,
            end_section=following is not None and following.grid != place.grid,
        )
    kinds = Counter(place.kind for place in places)
    table.caption = f"{len(places)} points: " + ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    if any(place.prefix for place in places):
        table.caption += "; + n: tokens beside the grid, such as the class token"
    return table
