"""A sweep: several sizes of some models, one recipe; loss and accuracy against computation (Heo et al., figures 2 and 3).

Each member is trained in its own folder, OUT/members/NAME, and what it reached is kept there in `member.json`. Interrupted,
the same sweep goes on: finished members are not trained again, and the one that was interrupted goes on where it was.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from spatially.errors import UserError
from spatially.files import write_whole
from spatially.subject import load
from spatially.train.build import build_model, check_model, input_size
from spatially.train.checks import check_answers
from spatially.train.recipe import Recipe
from spatially.train.training import choose, train

SIZES = {
    "nano",
    "tiny",
    "xxsmall",
    "xsmall",
    "small",
    "medium",
    "base",
    "large",
    "huge",
    "ti",
    "xs",
    "s",
    "m",
    "b",
    "l",
}


@dataclass(frozen=True, kw_only=True)
class Member:
    """One training of a sweep: a model, arguments of its constructor, and the line it belongs to in the figures."""

    model: str
    arguments: Mapping[str, Any]
    series: str

    @property
    def name(self) -> str:
        """Its folder's name."""
        words = [f"{key}={value}" for key, value in self.arguments.items()]
        return re.sub(r"[^\w.=-]+", "_", "-".join([self.model, *words])).strip("_")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a member reached in its last epoch, its parameters, and the multiplications (with additions) of one image."""

    model: str
    arguments: Mapping[str, Any]
    series: str
    parameters: int
    macs: int
    train_loss: float
    train_accuracy: float
    validation_loss: float
    validation_accuracy: float
    folder: str


def members(models: Sequence[str], vary: Mapping[str, Sequence[Any]] | None = None) -> list[Member]:
    """Every model with every combination of the varied arguments.

    Models that differ in the word for their size alone make one line: `pit_tiny` and `pit_small` are `pit`; with varied
    arguments each model is a line of its own.

    >>> [one.series for one in members(["pit_tiny", "pit_small", "vit_tiny_unpooled"])]
    ['pit', 'pit', 'vit_unpooled']
    >>> [one.name for one in members(["resnet50_flat"], {"base_width": [64, 96]})]
    ['resnet50_flat-base_width=64', 'resnet50_flat-base_width=96']
    """
    varied = dict(vary or {})
    choices = [dict(zip(varied, values, strict=True)) for values in itertools.product(*varied.values())]
    found = [
        Member(model=model, arguments=chosen, series=model if varied else series_of(model))
        for model in models
        for chosen in choices
    ]
    names = [one.name for one in found]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise UserError(f"a sweep trains each member once, but {twice} is named twice")
    if not found:
        raise UserError("a sweep needs at least one model")
    return found


def series_of(model: str) -> str:
    """A model's name without the words for its size.

    >>> series_of("swin_tiny_patch4_window7_224"), series_of("alternet_50"), series_of("resnet50")
    ('swin_patch4_window7_224', 'alternet', 'resnet')
    """
    first, *words = model.partition(".")[0].split("_")
    layers = [word for word in words if word.isdigit() and word in ("18", "34", "50", "101", "152")]
    rest = [word for word in words if word not in SIZES and word not in layers]
    return "_".join([re.sub(r"^(resnet|vgg|densenet)\d+$", r"\1", first), *rest])


def sweep(
    models: Sequence[str],
    recipe: str | Path | Recipe,
    data: Any,
    out: str | Path,
    *,
    vary: Mapping[str, Sequence[Any]] | None = None,
    settings: Mapping[str, Any] | None = None,
    epochs: int | None = None,
    **options: Any,
) -> list[Outcome]:
    """Train every member and write OUT/sweep.csv and the figures; `options` are those of :func:`spatially.train.train`."""
    from spatially.train.sweep_figures import write_figures

    folder = Path(out)
    chosen = choose(recipe, settings=settings, epochs=epochs)
    wanted = members(models, vary)
    missing = [member for member in wanted if _known(member, chosen, data, folder, options) is None]
    for member in missing:
        _check(member, chosen, options.get("size"))
    outcomes: list[Outcome] = []
    for member in wanted:
        outcomes.append(_outcome(member, chosen, data, folder, options))
        # At once, as the next one may take days or diverge.
        if (member in missing or member is wanted[-1]) and os.environ.get("RANK", "0") == "0":
            write_table(outcomes, folder / "sweep.csv")
            write_figures(outcomes, folder, heading=f"{chosen.name}, epochs: {chosen.total_epochs}")
    return outcomes


def _check(member: Member, recipe: Recipe, size: int | Sequence[int] | None) -> None:
    """That a member can be built and takes the images, so that it does not fail when others have been trained for days."""
    check_model(member.model)
    plain = recipe.override({"initialisation.pretrained": False, "initialisation.checkpoint": None})
    shape = input_size(member.model, plain, size)
    built = build_model(member.model, recipe=plain, classes=2, size=shape, arguments=member.arguments)
    check_answers(built.model, member.model, size=shape, classes=2)


def _asked(member: Member, recipe: Recipe, data: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """All that a member's outcome depends on, as it stands in its record."""
    given = {"recipe": recipe.describe(), "data": str(data), "size": options.get("size"), "limit": options.get("limit")}
    asked: dict[str, Any] = json.loads(json.dumps({**asdict(member), **given}))
    return asked


def _known(member: Member, recipe: Recipe, data: Any, out: Path, options: Mapping[str, Any]) -> Outcome | None:
    """What a member reached, where it is trained already."""
    folder = out / "members" / member.name
    record = folder / "member.json"
    if not record.is_file():
        return None
    try:
        known = json.loads(record.read_text(encoding="utf-8"))
        was, outcome = dict(known["asked"]), Outcome(**known["outcome"])
    except (ValueError, KeyError, TypeError):
        return None  # damaged: the finished training beside it tells all of it again
    asked = _asked(member, recipe, data, options)
    if was != asked:
        changed = [key for key in asked if was.get(key) != asked[key]]
        raise UserError(f"{folder} was trained with another {' and '.join(changed)}; give another --out")
    return outcome


def _outcome(member: Member, recipe: Recipe, data: Any, out: Path, options: Mapping[str, Any]) -> Outcome:
    """What a member reached; it is trained only if that is not known."""
    known = _known(member, recipe, data, out, options)
    if known is not None:
        return known
    folder = out / "members" / member.name
    trained = train(member.model, recipe, data, folder, arguments=member.arguments, **options)
    with (trained / "log.csv").open(newline="", encoding="utf-8") as file:
        last = list(csv.DictReader(file))[-1]
    parameters, macs = cost(trained)
    outcome = Outcome(
        model=member.model,
        arguments=dict(member.arguments),
        series=member.series,
        parameters=parameters,
        macs=macs,
        train_loss=float(last["train_loss"]),
        train_accuracy=float(last["train_accuracy"]),
        validation_loss=float(last["validation_loss"] or "nan"),
        validation_accuracy=float(last["validation_accuracy"]),
        folder=str(Path("members") / member.name),
    )
    record = {"asked": _asked(member, recipe, data, options), "outcome": asdict(outcome)}
    write_whole(folder / "member.json", json.dumps(record, indent=1))
    return outcome


def cost(folder: Path) -> tuple[int, int]:
    """Parameters of a trained model, and multiplications with their additions for one image of its size."""
    subject = load(str(folder), device="cpu", dtype="float32")
    image = torch.zeros(1, 3, *subject.preprocessing.input_size)
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        subject.model(image)
    return sum(value.numel() for value in subject.model.parameters()), int(counter.get_total_flops()) // 2


def write_table(outcomes: Sequence[Outcome], path: Path) -> None:
    """A row a member."""
    rows = [{**asdict(one), "arguments": json.dumps(dict(one.arguments))} for one in outcomes]
    text = io.StringIO()
    table = csv.DictWriter(text, fieldnames=list(rows[0]), lineterminator="\n")
    table.writeheader()
    table.writerows(rows)
    write_whole(path, text.getvalue())
