"""Weights from a file, without ever running code from it."""

import argparse
import pickle
import pickletools
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from spatially.errors import UserError

# averaged weights first, as timm does: they are the ones a recipe reports
WRAPPERS = ("state_dict_ema", "model_ema", "state_dict", "model", "module")
PREFIXES = ("module.", "_orig_mod.", "model.")
SHOWN = 8


def read_checkpoint(path: str | Path) -> dict[str, Tensor]:
    """The tensors in a weights file by name: `.safetensors`, or anything `torch.save` wrote as plain tensors."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"checkpoint: there is no file {path}")
    content = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pickle(path)
    while isinstance(content, Mapping) and (wrapper := _wrapper(content)):
        content = content[wrapper]
    if not isinstance(content, Mapping) or not any(isinstance(value, Tensor) for value in content.values()):
        raise UserError(f"checkpoint: {path} holds no weights by name, but {type(content).__name__}")
    return {str(name): value for name, value in content.items() if isinstance(value, Tensor)}


def load_checkpoint(model: nn.Module, path: str | Path, *, keep: Sequence[str] = ()) -> None:
    """Put the weights in a file into a model; every weight must be there and fit.

    Parts of the model named in `keep`, such as the head of another data set, stay as they are, whatever the file has there.
    """
    weights = _without_prefixes(read_checkpoint(path), model)
    kept = _kept(model, weights, keep)
    if not _differences(model, kept):
        model.load_state_dict(kept)
        return
    # weights as their authors published them: families know how to rename and resize them
    renamed = _filtered(model, weights)
    renamed = None if renamed is None else _kept(model, renamed, keep)
    if renamed is not None and not _differences(model, renamed):
        model.load_state_dict(renamed)
        return
    raise UserError(f"checkpoint: {path} does not fit the model: {'; '.join(_differences(model, kept))}")


def _kept(model: nn.Module, weights: Mapping[str, Tensor], keep: Sequence[str]) -> dict[str, Tensor]:
    """The weights, with the model's own for the parts that it keeps."""
    parts = tuple(f"{part}." for part in keep)
    others = {name: value for name, value in weights.items() if not name.startswith(parts)}
    return others | {name: value for name, value in model.state_dict().items() if name.startswith(parts)}


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"checkpoint: {path} is damaged or not a safetensors file ({error})") from error


def _read_pickle(path: Path) -> Any:
    try:
        # timm's training checkpoints carry their command line as a Namespace, which only holds values
        with torch.serialization.safe_globals([argparse.Namespace]):
            return torch.load(path, map_location="cpu", weights_only=True)
    except pickle.UnpicklingError as error:
        wanted = _code_wanted(path)
        if wanted is None:
            raise UserError(f"checkpoint: {path} is damaged or not a weights file") from error
        raise UserError(
            f"checkpoint: {path} wants to run code when opened and was refused{wanted}; "
            "if you trust it, convert it to safetensors where it was made"
        ) from error
    except Exception as error:  # torch raises whatever its readers stumble over: EOFError, KeyError, RuntimeError, …
        reason = (
            f" ({_first_line(error)})" if isinstance(error, RuntimeError) else ""
        )  # others do not say what is wrong
        raise UserError(f"checkpoint: {path} is damaged or not a weights file{reason}") from error


def _code_wanted(path: Path) -> str | None:
    """What a refused pickle wanted to call, read without running it; None if it is no pickle at all."""
    try:
        return f" ({', '.join(torch.serialization.get_unsafe_globals_in_checkpoint(path))})"
    except (ValueError, RuntimeError):
        pass  # not written by torch.save
    operations: set[str] = set()
    with path.open("rb") as file:
        try:
            while True:  # torch's older format is several pickles, then the bytes of the tensors
                operations |= {operation.name for operation, _, _ in pickletools.genops(file)}
        except Exception:  # bytes that are no pickle, or no more bytes; genops raises many things for the first
            pass
    return "" if operations & {"GLOBAL", "STACK_GLOBAL", "INST", "REDUCE"} else None


def _wrapper(content: Mapping[Any, Any]) -> str | None:
    """The entry of a training checkpoint that holds the weights."""
    return next((name for name in WRAPPERS if content.get(name) and isinstance(content[name], Mapping)), None)


def _without_prefixes(weights: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Names without what DistributedDataParallel, torch.compile or Lightning put before all of them."""
    own = model.state_dict()
    changed = True
    while changed:
        changed = False
        for prefix in PREFIXES:
            if all(name.startswith(prefix) for name in weights) and not any(name.startswith(prefix) for name in own):
                weights = {name.removeprefix(prefix): value for name, value in weights.items()}
                changed = bool(weights)
    return weights


def _differences(model: nn.Module, weights: Mapping[str, Tensor]) -> list[str]:
    own = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    missing = [name for name in own if name not in weights]
    unexpected = [name for name in weights if name not in own]
    other = [
        f"{name} {list(weights[name].shape)} instead of {list(value.shape)}"
        for name, value in own.items()
        if name in weights and weights[name].shape != value.shape
    ]
    parts = (("missing", missing), ("not in the model", unexpected), ("of another shape", other))
    return [f"{len(names)} {what}: {_shown(names)}" for what, names in parts if names]


def _filtered(model: nn.Module, weights: dict[str, Tensor]) -> dict[str, Tensor] | None:
    from spatially.models import CARDS

    card = CARDS.get((getattr(model, "pretrained_cfg", None) or {}).get("architecture", ""))
    timm_filter = getattr(sys.modules.get(type(model).__module__), "checkpoint_filter_fn", None)
    convert = card.checkpoint_filter if card else timm_filter
    if convert is None:
        return None
    try:
        return dict(convert(dict(weights), model))
    except UserError as error:
        raise UserError(f"checkpoint: the weights do not fit the model: {error}") from error
    except Exception:
        # a filter fed with another family's weights fails anyhow; the differences say more than its error
        return None


def _shown(names: list[str]) -> str:
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
