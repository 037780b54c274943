"""Options that several commands share, and how their values are read."""

from __future__ import annotations

import re
from typing import Annotated, Any

import typer
import yaml

from spatially.errors import UserError

MODEL, IMAGES, PROBING, RUN = "Model", "Images", "Probes", "Run"
SEVERAL = re.compile(r"\s*[-+.\d/]+(\s*,\s*[-+.\d/]+)+\s*")  # numbers or fractions, with commas between them


def numbers(text: str, what: str, kind: type = int) -> list[Any]:
    """``8,16,32`` as a list."""
    try:
        return [kind(word) for word in text.replace(" ", ",").split(",") if word]
    except ValueError:
        raise UserError(f"{what} takes numbers separated by commas, but came as {text!r}") from None


def input_size(text: str) -> int | list[int]:
    """``224`` or ``224x192`` (height × width)."""
    words = re.split("[x,]", text.lower())
    if len(words) not in (1, 2) or not all(word.strip().isdecimal() for word in words):
        raise UserError(f"--input-size takes SIDE or HEIGHTxWIDTH, but came as {text!r}")
    sides = [int(word) for word in words]
    return sides[0] if len(sides) == 1 else sides


def settings(words: list[str]) -> dict[str, dict[str, Any]]:
    """``paste.block=32`` words as probe → option → value; values are read as YAML, and ``8,16`` as ``[8, 16]``."""
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        name, equals, value = word.partition("=")
        probe, dot, option = name.partition(".")
        if not (equals and dot and option):
            raise UserError(f"--set takes PROBE.OPTION=VALUE, but came as {word!r}")
        try:
            found.setdefault(probe, {})[option] = yaml.safe_load(f"[{value}]" if SEVERAL.fullmatch(value) else value)
        except yaml.YAMLError:
            raise UserError(f"--set cannot read the value in {word!r}") from None
    return found


def given(**options: Any) -> dict[str, Any]:
    """The options that were given at all."""
    return {name: value for name, value in options.items() if value is not None}


Pretrained = Annotated[bool, typer.Option(help="Load trained weights, or draw random ones.", rich_help_panel=MODEL)]
Checkpoint = Annotated[
    str | None, typer.Option(help="Weights from a file (safetensors, or a .pth without code).", rich_help_panel=MODEL)
]
NumClasses = Annotated[int | None, typer.Option(help="Number of classes of the model.", rich_help_panel=MODEL)]
InputSize = Annotated[
    str | None,
    typer.Option(help="SIDE or HEIGHTxWIDTH of the crop, where the model does not say it.", rich_help_panel=MODEL),
]
Resize = Annotated[int | None, typer.Option(help="Shorter side before the crop.", rich_help_panel=MODEL)]
CropMode = Annotated[str | None, typer.Option(help="center, squash or border.", rich_help_panel=MODEL)]
Mean = Annotated[str | None, typer.Option(help="Normalisation: R,G,B.", rich_help_panel=MODEL)]
Std = Annotated[str | None, typer.Option(help="Normalisation: R,G,B.", rich_help_panel=MODEL)]
Interpolation = Annotated[str | None, typer.Option(help="bilinear, bicubic, …", rich_help_panel=MODEL)]
Dtype = Annotated[
    str,
    typer.Option(
        help="auto (bf16 on CUDA, float32 on CPU), float32, bfloat16, float16, float64.", rich_help_panel=MODEL
    ),
]
ClassMap = Annotated[
    str | None, typer.Option(help="JSON: data class → model class number(s) or name.", rich_help_panel=MODEL)
]
Compile = Annotated[bool, typer.Option("--compile", help="torch.compile the model.", rich_help_panel=MODEL)]
ChannelsLast = Annotated[bool, typer.Option("--channels-last", help="Channels-last memory.", rich_help_panel=MODEL)]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …", rich_help_panel=RUN)]


def model_options(context: typer.Context) -> dict[str, Any]:
    """The options of :func:`spatially.load` among a command's own, as far as they differ from its defaults."""
    said = context.params
    return given(
        pretrained=None if said["pretrained"] else False,
        checkpoint=said["checkpoint"],
        num_classes=said["num_classes"],
        input_size=None if said["input_size"] is None else input_size(said["input_size"]),
        resize=said["resize"],
        crop_mode=said["crop_mode"],
        mean=None if said["mean"] is None else numbers(said["mean"], "--mean", float),
        std=None if said["std"] is None else numbers(said["std"], "--std", float),
        interpolation=said["interpolation"],
        dtype=None if said["dtype"] == "auto" else said["dtype"],
        class_map=said.get("class_map"),
        compile=said["compile"] or None,
        channels_last=said["channels_last"] or None,
    )
