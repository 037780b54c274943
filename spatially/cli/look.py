"""``spatially look``: one image, clean, shuffled and masked, through the eyes of several models (Xu, figures 1 and 5)."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spatially.cli import app, options
from spatially.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor

    from spatially.report.look import LookRow, LookView
    from spatially.subject import Subject

ANSWERS = 3
EXAMPLES = """
[bold]Examples[/]

  spatially look redshank.jpg --models resnet50.a1_in1k,swin_tiny_patch4_window7_224.ms_in1k

  spatially look shapes:7 --models bag_of_patches,rigid_template --block 16 --out look.png
"""


@app.command(epilog=EXAMPLES)
def look(
    context: typer.Context,
    image: Annotated[str, typer.Argument(help="An image file, or shapes:N for image N of the generated set.")],
    *,
    models: Annotated[str, typer.Option(help="Models, separated by commas.")],
    block: Annotated[int, typer.Option(help="Block size k in pixels.")] = 8,
    shuffle_ratio: Annotated[float, typer.Option(help="Ratio of blocks that are shuffled.")] = 1.0,
    mask_ratio: Annotated[float, typer.Option(help="Ratio of blocks that are masked.")] = 0.8,
    label: Annotated[
        str | None, typer.Option(help="Class to follow, by name or number; default: each model's clean answer.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the draw.")] = 0,
    out: Annotated[str, typer.Option(help="The picture: .png, .pdf or .svg.")] = "look.png",
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
    """One image, clean, shuffled and masked, and what each model says to it: a picture and a table."""
    from spatially.files import write_whole
    from spatially.report.files import render, settle
    from spatially.report.look import draw_look
    from spatially.subject import load

    names = [name for name in models.split(",") if name]
    form = Path(out).suffix.lstrip(".").lower()
    if form not in ("png", "pdf", "svg"):
        raise UserError(f"--out must end in .png, .pdf or .svg, but came as {out!r}")
    if checkpoint is not None and len(names) > 1:
        raise UserError("--checkpoint goes with one model")
    shared = options.model_options(context)
    subjects = [load(name, device=device, **shared) for name in names]
    if not subjects:
        raise UserError("--models must name at least one model")
    ratios = {"shuffle": shuffle_ratio, "mask": mask_ratio}
    looked = [_look(subject, image, block=block, ratios=ratios, label=label, seed=seed) for subject in subjects]
    rows = [row for row, _ in looked]
    _print(rows, looked[0][1])
    # Models may crop differently; the picture shows the first one's crop.
    figure = settle(draw_look(rows, views=looked[0][1]))
    write_whole(Path(out), render(figure, form, dpi=200))
    Console().print(f"wrote {escape(out)}")


def _look(
    subject: Subject, image: str, *, block: int, ratios: dict[str, float], label: str | None, seed: int
) -> tuple[LookRow, list[LookView]]:
    import torch

    from spatially.perturb import mask_blocks, shuffle_blocks
    from spatially.report.look import LookRow, LookView

    if subject.answers < 1:
        raise UserError(
            f"{subject.name} has no classifier, so it has no answers to look at; give num_classes or a checkpoint"
        )
    pixels, number = _crop(subject, image)
    shuffled = shuffle_blocks(pixels, block=block, ratio=ratios["shuffle"], index=[number], seed=seed)
    masked = mask_blocks(pixels, block=block, ratio=ratios["mask"], index=[number], seed=seed)
    pictures = {
        "clean": pixels,
        f"shuffled, {block}×{block}, α = {ratios['shuffle']:g}": shuffled,
        f"masked, {block}×{block}, α = {ratios['mask']:g}": masked,
    }
    with torch.inference_mode():
        probability = subject(torch.cat(list(pictures.values())).to(subject.device)).softmax(dim=1).float().cpu()
    names = subject.class_names or tuple(f"class {number}" for number in range(subject.answers))
    best = probability.topk(min(ANSWERS, len(names)), dim=1)
    followed = int(best.indices[0, 0]) if label is None else _find(label, names)
    answers = [
        [(names[int(place)], float(share)) for share, place in zip(shares, places, strict=True)]
        for shares, places in zip(best.values, best.indices, strict=True)
    ]
    row = LookRow(subject.name, answers, names[followed], probability[:, followed].tolist())
    shown = [(one[0].clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy() for one in pictures.values()]
    return row, [LookView(one, caption) for one, caption in zip(shown, pictures, strict=True)]


def _crop(subject: Subject, image: str) -> tuple[Tensor, int]:
    """The crop as float ``(1, 3, H, W)``, and the number that fixes its draw."""
    import torch

    from spatially.data import Shapes
    from spatially.data.decode import BrokenImage, decode

    if image.startswith("shapes:") and image[7:].isdigit():
        pixels, _ = Shapes(size=subject.preprocessing.input_size).images(torch.tensor([int(image[7:])]))
        return pixels / 255, int(image[7:])
    try:
        crop = subject.preprocessing.crop(decode(image))
    except BrokenImage as error:
        raise UserError(f"{image} cannot be read: {error}") from None
    return torch.from_numpy(crop)[None] / 255, 0


def _find(label: str, names: tuple[str, ...]) -> int:
    from spatially.errors import unknown

    if label.isdigit() and int(label) < len(names):
        return int(label)
    lowered = [name.lower() for name in names]
    if label.lower() not in lowered:
        raise unknown("class", label, names)
    return lowered.index(label.lower())


def _print(rows: list[LookRow], views: list[LookView]) -> None:
    table = Table(
        "model",
        "class",
        *(view.caption for view in views),
        caption="probability of the class; in brackets what the model says instead",
        caption_justify="left",
    )
    for row in rows:
        shares = row.reference_probability or [0.0] * len(views)
        cells = [
            f"{share:.1%} [dim](says {escape(answers[0][0])})[/]"
            if answers[0][0] != row.reference
            else f"[bold]{share:.1%}[/]"
            for share, answers in zip(shares, row.answers, strict=True)
        ]
        table.add_row(escape(row.model), escape(row.reference), *cells)
    Console().print(table)
