"""``spatially probe``: measure models on images."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from spatially.cli import app, options
from spatially.cli.options import IMAGES, PROBING, RUN
from spatially.errors import UserError

EXAMPLES = """
[bold]Examples[/]

  spatially probe resnet50.a1_in1k swin_tiny_patch4_window7_224.ms_in1k --data imagenet/val --out runs/compare

  spatially probe torchvision/resnet50 --data imagenet/val --limit 5000 --blocks 8,16 --precision 0.01 --out runs/quick

  spatially probe my_package.models:build --input-size 96 --data images/ --class-map classes.json --out runs/mine

  spatially probe vit_tiny_patch16_224 --no-pretrained --data shapes --out runs/untrained

  torchrun --nproc-per-node 8 -m spatially probe --study study.yaml --out runs/all
"""


BESIDE_A_STUDY = ("study", "out", "device", "dry_run", "overwrite")


@app.command(epilog=EXAMPLES)
def probe(
    context: typer.Context,
    models: Annotated[
        list[str] | None,
        typer.Argument(help="timm names, torchvision/NAME, hf/REPO, a folder, package.module:callable."),
    ] = None,
    *,
    out: Annotated[str, typer.Option(help="Folder for the results.", rich_help_panel=RUN)],
    data: Annotated[
        str | None,
        typer.Option(help="A folder of class folders, shapes, torch/…, hfds/…, wds/….", rich_help_panel=IMAGES),
    ] = None,
    data_dir: Annotated[str | None, typer.Option(help="Where a named data set lies.", rich_help_panel=IMAGES)] = None,
    split: Annotated[str | None, typer.Option(help="Split of a named data set.", rich_help_panel=IMAGES)] = None,
    limit: Annotated[
        int | None, typer.Option(help="So many images, drawn fairly (of wds/…: the first).", rich_help_panel=IMAGES)
    ] = None,
    strict: Annotated[
        bool, typer.Option("--strict", help="Stop at an image that cannot be read.", rich_help_panel=IMAGES)
    ] = False,
    workers: Annotated[int | None, typer.Option(help="Threads that decode.", rich_help_panel=IMAGES)] = None,
    cache: Annotated[str | None, typer.Option(help="Folder for decoded crops.", rich_help_panel=IMAGES)] = None,
    probes: Annotated[
        str,
        typer.Option(help="Names, separated by commas; all for what applies and is quick.", rich_help_panel=PROBING),
    ] = "sensitivity",
    kinds: Annotated[str | None, typer.Option(help="shuffle,mask", rich_help_panel=PROBING)] = None,
    blocks: Annotated[
        str | None, typer.Option(help="Block sizes k in pixels: 8,16,24,32", rich_help_panel=PROBING)
    ] = None,
    ratios: Annotated[str | None, typer.Option(help="Ratios α of blocks: 0,0.1,…,1", rich_help_panel=PROBING)] = None,
    precision: Annotated[
        float | None,
        typer.Option(help="Stop each point once its accuracy is known to ± this.", rich_help_panel=PROBING),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of every draw.", rich_help_panel=PROBING)] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any option of a probe: paste.block=32", rich_help_panel=PROBING)
    ] = None,
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
    class_map: options.ClassMap = None,
    compile: options.Compile = False,
    channels_last: options.ChannelsLast = False,
    device: options.Device = "auto",
    batch: Annotated[
        int | None, typer.Option(help="Images in a forward pass, and in a chunk that is kept.", rich_help_panel=RUN)
    ] = None,
    study: Annotated[
        str | None, typer.Option(help="Models, data and probes from a YAML file.", rich_help_panel=RUN)
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and stop.", rich_help_panel=RUN)] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace results that were measured otherwise.", rich_help_panel=RUN)
    ] = False,
) -> None:
    """Measure models on images: plan, progress, results in OUT/results. Interrupted, the same command goes on."""
    from spatially.probes import probe_class
    from spatially.study import Study, read_study, run_study
    from spatially.study.spec import ALL

    if study is not None:
        beside = [name for name in given_by_user(context) if name not in BESIDE_A_STUDY]
        if beside:
            raise UserError(f"--study FILE says it all; put {', '.join(beside)} into the file, or leave --study out")
        spec = read_study(study)
    else:
        if not models or data is None:
            raise UserError("name at least one model and give --data: spatially probe MODEL --data FOLDER --out DIR")
        if checkpoint is not None and len(models) > 1:
            raise UserError("--checkpoint goes with one model; put several into a study (--study FILE)")
        names = [ALL if name.strip() == ALL else probe_class(name.strip()).name for name in probes.split(",")]
        chosen = {name: options.given(seed=seed) for name in names}
        sugar = options.given(
            kinds=None if kinds is None else [kind.strip() for kind in kinds.split(",")],
            blocks=None if blocks is None else options.numbers(blocks, "--blocks"),
            ratios=None if ratios is None else options.numbers(ratios, "--ratios", float),
            precision=precision,
        )
        if sugar and ALL in chosen:
            chosen.setdefault("sensitivity", {})
        if sugar and "sensitivity" not in chosen:
            raise UserError(
                f"--{next(iter(sugar))} belongs to the probe sensitivity, which is not among --probes {probes}"
            )
        chosen.get("sensitivity", {}).update(sugar)
        for name, more in options.settings(set_ or []).items():
            known = ALL if name == ALL else probe_class(name).name
            if known not in chosen and ALL not in chosen:
                raise UserError(f"--set {name}.… belongs to a probe that is not among --probes {probes}")
            chosen.setdefault(known, {}).update(more)
        shared = options.model_options(context)
        spec = Study(
            models=[{"model": name, **shared} for name in models],
            data={
                "source": data,
                **options.given(
                    root=data_dir,
                    split=split,
                    limit=limit,
                    strict=strict or None,
                    workers=workers,
                    cache=cache,
                    seed=seed,
                ),
            },
            probes=chosen,
            batch=64 if batch is None else batch,
        )
    store = run_study(spec, out, device=device, dry_run=dry_run, overwrite=overwrite)
    if not dry_run:
        show_results(store.results())
        folder = escape(str(store.folder))
        print_once(f"\nresults in {folder}/results; the page: [bold]spatially report {folder}[/]")


def given_by_user(context: typer.Context) -> list[str]:
    """The options that stand on the command line."""
    sources = {name: context.get_parameter_source(name) for name in context.params}
    return [name for name, source in sources.items() if source is not None and source.name == "COMMANDLINE"]


def print_once(text: Any) -> None:
    """Print in the main process alone."""
    if os.environ.get("RANK", "0") == "0":
        Console().print(text)


def show_results(results) -> None:  # type: ignore[no-untyped-def]
    """The headline numbers in the terminal: how much each model relies on structure, by the size of the blocks."""
    shuffled = {
        model: result.sel(kind="shuffle")
        for model, result in results.get("sensitivity", {}).items()
        if "shuffle" in result["kind"].values and {0.0, 1.0} <= set(result["ratio"].values.tolist())
    }
    if not shuffled:
        return
    blocks = sorted({int(block) for curve in shuffled.values() for block in curve["block"].values})
    table = Table(
        title="Structure reliance: 0 bag of patches … 1 rigid template",
        title_justify="left",
        caption="with 95 % intervals; of k×k pixel blocks, all of them shuffled",
        caption_justify="left",
        box=SIMPLE_HEAD,
        padding=(0, 0, 0, 1),
    )
    table.add_column("model", overflow="fold")
    table.add_column("clean\naccuracy", justify="right")
    for block in blocks:
        table.add_column(f"k = {block}", justify="right", no_wrap=True)
    for model, curve in shuffled.items():
        clean = float(curve["accuracy"].sel(ratio=0.0).max())
        table.add_row(escape(model), f"{clean:.1%}", *(_reliance(curve, block) for block in blocks))
        table.add_section()
    print_once(table)
    for remark in _remarks({model: results["sensitivity"][model] for model in shuffled}):
        print_once(escape(remark))


def _remarks(results) -> Iterator[str]:  # type: ignore[no-untyped-def]
    """What the numbers do not say: how much of the image was shuffled, and why a model has none."""
    from spatially.drawing.values import covered_note, undefined_because

    if note := covered_note(results):
        yield note
    for model, result in results.items():
        if result["structure_reliance"].isnull().all():
            yield f"{model} undefined: {undefined_because(result, kind='shuffle', block=int(result['block'][0]))}"


def _reliance(curve, block: int) -> str:  # type: ignore[no-untyped-def]
    if block not in curve["block"].values:
        return ""
    point = curve.sel(block=block)
    value, low, high = (float(point[f"structure_reliance{end}"]) for end in ("", "_low", "_high"))
    # NaN: the clean accuracy is not above chance.
    return "undefined" if value != value else f"{value:.2f}\n{low:.2f}–{high:.2f}"
