"""Trains the models of `spatially demo` on the generated set and puts them into the package."""

from __future__ import annotations

import json
import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save
from torch import Tensor

from spatially.data import open_images
from spatially.errors import unknown
from spatially.files import write_whole
from spatially.models import demo
from spatially.subject import Subject, load
from spatially.train.training import train

RECIPE = "demo"
MEASURED = 1200  # generated images of another seed than those in training


def train_demo(
    names: Sequence[str] = (),
    out: str | Path = "runs/demo-models",
    *,
    folder: str | Path | None = None,
    settings: Mapping[str, Any] | None = None,
    limit: int | None = None,
    measured: int | None = None,
    device: str = "auto",
    quiet: bool = False,
) -> dict[str, dict[str, Any]]:
    """Train the demo's models (those named, else all) in `out`, and write each to `folder`: weights and facts by name.

    `limit` is the number of training images, `measured` that of the images whose accuracy is written down.
    """
    for name in names:
        if name not in demo.DEMO:
            raise unknown("model of the demo", name, demo.DEMO)
    places = Path(out), Path(folder or demo.FOLDER)
    options: dict[str, Any] = {"settings": settings or {}, "limit": limit, "device": device, "quiet": quiet}
    return {name: _train_one(name, *places, measured or MEASURED, options) for name in names or demo.DEMO}


def _train_one(name: str, runs: Path, folder: Path, measured: int, options: Mapping[str, Any]) -> dict[str, Any]:
    member = demo.DEMO[name]
    begun = time.perf_counter()
    trained = train(member.architecture, RECIPE, "shapes", runs / name, arguments=member.arguments, **options)
    seconds = time.perf_counter() - begun
    subject = load(str(trained), device="cpu", dtype="float32")
    kept = halved(load_file(trained / "model.safetensors"))
    subject.model.load_state_dict(kept)
    configuration = json.loads((trained / "config.json").read_text(encoding="utf-8"))
    facts = {
        "architecture": member.architecture,
        "arguments": dict(member.arguments),
        "what": member.what,
        "parameters": sum(value.numel() for value in subject.model.parameters()),
        "classes": configuration["label_names"],
        "preprocessing": subject.preprocessing.describe(),
        "command": shlex.join(_command(name, options["settings"], options["limit"])),
        "recipe": _recipe(trained),
        "data": "generated shapes, seed 1",
        "accuracy": accuracy(subject, measured),
        "measured_on": f"{measured} generated shapes, seed 0",
        "seconds": round(seconds, 1),
        "machine": _machine(),
    }
    write_whole(demo.weights_file(name, folder), save(kept, metadata={"format": "pt"}))
    write_whole(demo.facts_file(name, folder), json.dumps(facts, indent=1, ensure_ascii=False) + "\n")
    return facts


def _command(name: str, settings: Mapping[str, Any], limit: int | None) -> list[str]:
    changes = [word for key, value in settings.items() for word in ("--set", f"{key}={json.dumps(value)}")]
    return ["spatially", "train-demo", name, *changes, *([] if limit is None else ["--limit", str(limit)])]


def halved(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Floating-point numbers as float16, the others as they are."""
    return {name: value.half() if value.is_floating_point() else value for name, value in weights.items()}


@torch.no_grad()
def accuracy(subject: Subject, count: int) -> float:
    """The share of right answers to generated images that no training saw."""
    images = open_images("shapes", subject, limit=count)
    right = 0
    for first in range(0, count, 100):
        pixels = torch.from_numpy(images.pixels[first : first + 100].copy()).float() / 255
        answers = subject(pixels.to(subject.device)).argmax(dim=-1).cpu()
        right += int((answers == torch.from_numpy(images.labels[first : first + 100].copy())).sum())
    return right / len(images)


def _recipe(trained: Path) -> dict[str, Any]:
    import yaml

    content: dict[str, Any] = yaml.safe_load((trained / "recipe.yaml").read_text(encoding="utf-8"))
    return content


def _machine() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return f"{device}, torch {torch.__version__}"
