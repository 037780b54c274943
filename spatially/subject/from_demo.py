"""The demo's models, which come with this package: `demo/swin_m`. Weights are kept as float16 and computed with as float32."""

import json
from typing import Any

from spatially.errors import UserError, unknown
from spatially.subject import from_timm
from spatially.subject.checkpoint import load_checkpoint
from spatially.subject.classes import ClassNames
from spatially.subject.preprocessing import Preprocessing
from spatially.subject.source import Built, Request

PREFIX = "demo/"


def build(name: str, request: Request) -> Built:
    from dataclasses import replace

    from spatially.models import demo

    short = name.removeprefix(PREFIX)
    if short not in demo.DEMO:
        raise unknown("model", name, [PREFIX + one for one in demo.DEMO])
    member = demo.DEMO[short]
    facts: dict[str, Any] = {}
    if request.pretrained:
        if short not in demo.trained():
            raise UserError(
                f"{name} is not trained here: make it with spatially train-demo {short}, or --no-pretrained"
            )
        facts = json.loads(demo.facts_file(short).read_text(encoding="utf-8"))
    wanted = replace(
        request,
        pretrained=False,
        num_classes=len(facts["classes"]) if facts else request.num_classes,
        input_size=request.input_size or (demo.SIDE, demo.SIDE),
        model_options={**member.arguments, **request.model_options},
    )
    built = from_timm.build(member.architecture, wanted)
    if not facts:
        return replace(built, name=name, source="demo")
    load_checkpoint(built.model, demo.weights_file(short))
    return replace(
        built,
        name=name,
        source="demo",
        classes=ClassNames(tuple(facts["classes"])),
        preprocessing=_preprocessing(facts, request),
    )


def _preprocessing(facts: dict[str, Any], request: Request) -> Preprocessing:
    known = facts["preprocessing"]
    size = request.input_size or tuple(known["input_size"])
    scale = [side * new / old for side, new, old in zip(known["resize"], size, known["input_size"], strict=True)]
    return Preprocessing(
        input_size=size,
        resize=(round(scale[0]), round(scale[1])),
        **{name: known[name] for name in ("mean", "std", "interpolation", "crop_mode")},
    )
