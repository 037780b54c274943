"""A trained model as a folder that `spatially.load(DIR)`, timm's `local-dir:` and people can read.

config.json says how it is built and how images are prepared, model.safetensors holds its weights, README.md is its card,
recipe.yaml what it was trained with.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from spatially.files import write_whole
from spatially.models.registry import CARDS, PAPERS
from spatially.nn.conv_projection import ConvProjection
from spatially.subject.preprocessing import Preprocessing, from_timm
from spatially.train.library import as_yaml
from spatially.train.log import Row
from spatially.train.recipe import Recipe


@dataclass(frozen=True, kw_only=True)
class Identity:
    """What a model is besides its weights: its timm name, the constructor's arguments, how images are prepared for it.

    `options` are the arguments that loading must repeat, the number of classes aside; `data` says in words what it saw.
    """

    name: str
    preprocessing: Preprocessing
    options: Mapping[str, Any] = field(default_factory=dict)
    data: str = ""


def identity_of(model: nn.Module, size: tuple[int, int]) -> Identity:
    """What a timm model says of itself, for images of this size."""
    configuration = getattr(model, "pretrained_cfg", None) or {}
    name = configuration.get("architecture") or type(model).__name__
    options: dict[str, Any] = {"img_size": list(size)} if configuration.get("fixed_input_size") else {}
    if any(isinstance(one, ConvProjection) and one.heads is not None for one in model.modules()):
        options["qk_norm"] = True
    return Identity(name=name, preprocessing=from_timm(model, size, name), options=options)


def write_model(
    folder: Path,
    weights: Mapping[str, Tensor],
    identity: Identity,
    *,
    classes: Sequence[str],
    recipe: Recipe,
    row: Row | None,
    results: Mapping[str, float] | None = None,
) -> None:
    """The folder of a trained model; each file is replaced as a whole. `row` tells of the epoch the weights are from."""
    tensors = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in weights.items()}
    write_whole(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))
    write_whole(folder / "config.json", json.dumps(configuration(identity, classes), indent=2, ensure_ascii=False))
    write_whole(folder / "recipe.yaml", as_yaml(recipe))
    parameters = sum(value.numel() for name, value in weights.items())
    text = card(identity, classes=classes, recipe=recipe, row=row, results=results or {}, numbers=parameters)
    write_whole(folder / "README.md", text)


def configuration(identity: Identity, classes: Sequence[str]) -> dict[str, Any]:
    """As timm writes it, with the names of the classes."""
    image = identity.preprocessing
    return {
        "architecture": identity.name,
        "num_classes": len(classes),
        "label_names": list(classes),
        "model_args": dict(identity.options),
        "pretrained_cfg": {
            "num_classes": len(classes),
            "input_size": [3, *image.input_size],
            "crop_pct": _crop_share(image.input_size[0], image.resize[0]),
            "crop_mode": image.crop_mode,
            "interpolation": image.interpolation,
            "mean": list(image.mean),
            "std": list(image.std),
        },
    }


def _crop_share(crop: int, resize: int) -> float:
    """The share that timm turns into the same `resize` again: it divides and rounds down.

    >>> _crop_share(224, 256), [size for size in range(32, 512) if math.floor(32 / _crop_share(32, size)) != size]
    (0.875, [])
    """
    share = crop / resize
    return share if math.floor(crop / share) == resize else crop / (resize + 0.25)


def card(
    identity: Identity,
    *,
    classes: Sequence[str],
    recipe: Recipe,
    row: Row | None,
    results: Mapping[str, float],
    numbers: int,
) -> str:
    """The text of README.md: only what is known."""
    known = CARDS.get(identity.name)
    height, width = identity.preprocessing.input_size
    paper = PAPERS.get(recipe.paper, "")
    lines = ["---", "library_name: timm", "tags: [image-classification, spatially]", "---", f"# {identity.name}", ""]
    lines += [f"{known.what} ({PAPERS[known.paper]}).", ""] if known else []
    lines += [
        f"Trained by `spatially train` with the recipe `{recipe.name}`{f' ({paper})' if paper else ''}, see `recipe.yaml`.",
        "",
        "| | |",
        "|---|---|",
        f"| images | {identity.data or 'not said'}, {height}×{width} |",
        f"| classes | {len(classes)} |",
        f"| numbers in the weights | {numbers:,} |",
        f"| epochs | {row['epoch'] + 1 if row else 0} of {recipe.total_epochs} |",
        f"| optimiser | {recipe.optimiser.name}, rate {recipe.learning_rate:g}, batch {recipe.batch} |",
        f"| precision, seed | {recipe.run.precision}, {recipe.run.seed} |",
    ]
    lines += [f"| {name} | {_measured(name, value)} |" for name, value in _measures(row, results)]
    lines += [f"| spatially, torch, timm | {_versions()} |", "", "```python", "import spatially", ""]
    lines += ['subject = spatially.load("this/folder")', "```", ""]
    return "\n".join(lines)


def _measures(row: Row | None, results: Mapping[str, float]) -> list[tuple[str, float]]:
    wanted = ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy", "validation_top5")
    found = {name: row[name] for name in wanted if row and row.get(name) is not None} | dict(results)
    return [(name.replace("_", " "), value) for name, value in found.items()]


def _measured(name: str, value: float) -> str:
    return f"{value:.4f}" if name.endswith("loss") else f"{value:.2%}"


def _versions() -> str:
    from spatially.version import __version__

    return f"{__version__}, {torch.__version__}, {version('timm')}"
