"""The model to train: by its name from our registry or timm, for so many classes, as the recipe and the user want it.

What a recipe asks of a model is a wish: the side of its patches, say, is left out for a model that has none. What a user asks
for by name must be there. Random weights are drawn from the recipe's seed alone.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from spatially.errors import UserError, first_line, unknown
from spatially.nn.conv_projection import NORMALISED
from spatially.subject.checkpoint import load_checkpoint, read_checkpoint
from spatially.subject.from_timm import check_name
from spatially.subject.hub import cache_only_without_network
from spatially.subject.preprocessing import Preprocessing, from_timm, size
from spatially.subject.source import construction
from spatially.surgery.positions import reset_positions
from spatially.train.recipe import SMALLEST, Recipe

Size = tuple[int, int]
Colour = tuple[float, float, float]


@dataclass(frozen=True)
class BuiltModel:
    """A model, the constructor's arguments that loading it must repeat, its preprocessing, and wishes it has no use for."""

    model: nn.Module
    name: str
    arguments: dict[str, Any]
    preprocessing: Preprocessing
    unused: tuple[str, ...]


def check_model(name: str) -> None:
    """That there is such a model here or in timm."""
    import timm

    import spatially.models  # noqa: F401  (registers them)

    if name.startswith(("torchvision/", "hf/", "hf-hub:", "local-dir:")) or ":" in name or Path(name).is_dir():
        raise UserError(
            f"{name} cannot be trained by a recipe, whose models come from here and from timm: spatially models; "
            "to go on from a trained folder, name its architecture and give --checkpoint FOLDER"
        )
    if not timm.is_model(name.partition(".")[0]):
        raise unknown("model", name, timm.list_models(), hint="They are listed by: spatially models")
    check_name(name)


def input_size(name: str, recipe: Recipe, given: int | Sequence[int] | None) -> Size:
    """Height and width of the images: as given, as the recipe has it, or the model's own."""
    import timm

    if given is not None:
        return _wide_enough(size("input_size", given))
    if recipe.model.input_size is not None:
        return recipe.model.input_size, recipe.model.input_size
    configuration = timm.get_pretrained_cfg(name)
    return tuple(configuration.input_size[-2:]) if configuration is not None else (224, 224)


def _wide_enough(given: Size) -> Size:
    """That a user's size is one that a recipe may hold; augmentation looks at neighbours, which smaller images lack."""
    if min(given) < SMALLEST:
        raise UserError(f"input_size must be at least {SMALLEST}, but came as {given[0]}×{given[1]}")
    return given


def normalisation(name: str) -> tuple[Colour, Colour]:
    """Mean and standard deviation that the model's pixels are normalised with."""
    import timm
    from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

    configuration = timm.get_pretrained_cfg(name)
    if configuration is None:
        return IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
    return tuple(configuration.mean), tuple(configuration.std)


def build_model(
    name: str, *, recipe: Recipe, classes: int, size: Size, arguments: Mapping[str, Any] | None = None
) -> BuiltModel:
    """The model on the CPU, with the weights that its training starts from."""
    check_model(name)
    start = recipe.initialisation
    # To timm None means its own default: what is not there cannot be repeated wrongly.
    strict = {key: value for key, value in (arguments or {}).items() if value is not None}
    _check_arguments({**recipe.model.arguments, **strict})
    wishes = {key: value for key, value in _wishes(name, recipe, size, strict).items() if key not in strict}
    pretrained = start.pretrained and start.checkpoint is None
    with construction(name, recipe.run.seed), cache_only_without_network():
        with _mistaken(name, {**recipe.model.arguments, **strict}):
            model, unused = _create(name, strict | {"num_classes": classes}, wishes, pretrained=pretrained)
        if start.checkpoint is not None:
            _load(model, start.checkpoint, keep_head=start.head == "keep")
        elif pretrained and start.head == "reset":
            model.reset_classifier(classes)  # type: ignore[operator]
    if start.positions != "keep" and (pretrained or start.checkpoint is not None):
        _forget_positions(name, model, zero=start.positions == "zero", seed=recipe.run.seed)
    if recipe.run.checkpointing:
        _save_memory(name, model)
    # Some of timm's constructors take any name and do nothing with it.
    constructors = [vars(kind)["__init__"] for kind in type(model).__mro__ if "__init__" in vars(kind)]
    known = {one for constructor in constructors for one in inspect.signature(constructor).parameters}
    unused += [key for key in wishes if key not in known and key not in unused]
    taken = {key: value for key, value in wishes.items() if key not in unused and not key.startswith("drop")}
    return BuiltModel(model, name, taken | strict, from_timm(model, size, name), tuple(unused))


def _check_arguments(arguments: Mapping[str, Any]) -> None:
    """That they leave to the data what the data decides."""
    if "num_classes" in arguments:
        raise UserError(
            f"the model's argument num_classes is the data's number of classes, but came as {arguments['num_classes']}: "
            "leave it out"
        )
    if arguments.get("in_chans", 3) != 3:
        raise UserError(f"the model's argument in_chans must be 3 (RGB images), but came as {arguments['in_chans']}")


def _wishes(name: str, recipe: Recipe, size: Size, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """What the recipe asks of the model's constructor, beside the arguments that a user gave."""
    from spatially.models import CARDS
    from spatially.models.pit import PoolingTransformer

    wishes: dict[str, Any] = {"drop_path_rate": recipe.regularisation.drop_path, **recipe.model.arguments}
    if recipe.regularisation.dropout:
        wishes["drop_rate"] = recipe.regularisation.dropout
    if size != input_size(name, recipe.override({"model.input_size": None}), None):
        wishes["img_size"] = size
    card = CARDS.get(name)
    if card is not None and {**card.options, **arguments}.get("convolved"):
        wishes.setdefault("qk_norm", _normalises(recipe))
    patch = recipe.model.patch_size
    if patch is not None:
        wishes["patch_size"] = patch
        # Patches of a PiT, ours or timm's, overlap by half: their stride shrinks with them.
        if (card is not None and card.kind is PoolingTransformer) or (card is None and name.startswith("pit_")):
            own = {"patch_size": 16, "stride": 8, **(card.options if card else {})}
            wishes["stride"] = max(1, own["stride"] * patch // own["patch_size"])
    return wishes


def _normalises(recipe: Recipe) -> bool:
    """Whether queries and keys are to be normalised: what weights were trained without it would mean something else."""
    start, wanted = recipe.initialisation, recipe.model.qk_norm
    if wanted is not None:
        return wanted
    if start.checkpoint is None:
        return not start.pretrained
    return any(name.endswith(f".{NORMALISED}") for name in read_checkpoint(_weights_file(start.checkpoint)))


@contextmanager
def _mistaken(name: str, given: Mapping[str, Any]) -> Iterator[None]:
    """Makes a constructor's complaint about arguments that a user gave the user's mistake; unknown ones are told outside."""
    try:
        yield
    except UserError:
        raise
    except (TypeError, ValueError, AssertionError, ArithmeticError, LookupError, AttributeError, RuntimeError) as error:
        if not given or (isinstance(error, TypeError) and "keyword argument" in str(error)):
            raise
        listed = ", ".join(f"{key}={value!r}" for key, value in given.items())
        raise UserError(
            f"{name} cannot be built with {listed} ({first_line(error)}): give other values with --model-arg"
        ) from error


def _create(
    name: str, strict: dict[str, Any], wishes: dict[str, Any], *, pretrained: bool
) -> tuple[nn.Module, list[str]]:
    """The model with as many of the wishes as its constructor takes, and the names of the others."""
    import timm

    unused: list[str] = []
    while True:
        options = strict | {key: value for key, value in wishes.items() if key not in unused}
        try:
            return timm.create_model(name, pretrained=pretrained, **options), unused
        except TypeError as error:
            found = re.search(r"(?:unexpected|multiple values for) keyword argument '(\w+)'", str(error))
            if found is None or found[1] not in wishes or found[1] in unused:
                raise
            unused.append(found[1])
        except (OSError, RuntimeError) as error:
            if not pretrained or (isinstance(error, RuntimeError) and "pretrained" not in str(error)):
                raise
            raise UserError(
                f"there are no pretrained weights for {name} here, which this recipe starts from (none exist, or they could "
                "not be downloaded): give --checkpoint FILE, or --set initialisation.pretrained=false to start from nothing"
            ) from error


def _load(model: nn.Module, checkpoint: str, *, keep_head: bool) -> None:
    """The weights of a file, or of a trained folder; the head's too, if they shall be kept."""
    heads = (getattr(model, "pretrained_cfg", None) or {}).get("classifier") or ()
    names = [heads] if isinstance(heads, str) else list(heads)
    load_checkpoint(model, _weights_file(checkpoint), keep=() if keep_head else names)


def _weights_file(checkpoint: str) -> Path:
    path = Path(checkpoint)
    return path / "model.safetensors" if path.is_dir() else path


def _forget_positions(name: str, model: nn.Module, *, zero: bool, seed: int) -> None:
    try:
        reset_positions(model, absolute="zero" if zero else True, seed=seed)
    except UserError as error:
        raise UserError(
            f"the positions of {name} cannot be re-initialised ({error}): --set initialisation.positions=keep leaves them"
        ) from error


def _save_memory(name: str, model: nn.Module) -> None:
    if not hasattr(model, "set_grad_checkpointing"):
        raise UserError(f"{name} has no gradient checkpointing: --set run.checkpointing=false")
    model.set_grad_checkpointing(True)  # type: ignore[operator]
