"""`load`: a model by its name, from whichever library it comes, made measurable."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from spatially.errors import UserError, first_line
from spatially.subject import from_demo, from_huggingface, from_python, from_timm, from_torchvision
from spatially.subject.checkpoint import load_checkpoint
from spatially.subject.classes import read_class_map
from spatially.subject.preprocessing import size
from spatially.subject.source import Built, Request
from spatially.subject.subject import Subject, logits_of

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
WEIGHT_FILES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")


def load(
    model: str | nn.Module,
    *,
    pretrained: bool = True,
    checkpoint: str | Path | None = None,
    num_classes: int | None = None,
    name: str | None = None,
    input_size: int | Sequence[int] | None = None,
    resize: int | Sequence[int] | None = None,
    crop_mode: str | None = None,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    interpolation: str | None = None,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    class_map: str | Path | Mapping[str, Any] | None = None,
    compile: bool = False,
    channels_last: bool = False,
    seed: int = 0,
    model_options: Mapping[str, Any] | None = None,
) -> Subject:
    """Make a model measurable.

    Args:
        model: a timm name (`resnet50.a1_in1k`), `demo/NAME`, `torchvision/NAME`, `hf/REPO`, a folder of a trained model,
            `package.module:callable` (the current directory is importable), or an `nn.Module`. A module is not copied:
            it is moved to the device and set to eval mode. One from `torch.compile` runs as it was compiled.
        pretrained: with the weights its library offers, else random ones drawn from `seed`.
        checkpoint: a file of weights to use instead; implies `pretrained=False`.
        num_classes: how many classes the classifier has, where it is not the usual number.
        name: what to call it in results.
        input_size: side of the crop the model sees, or (height, width). Models that do not say theirs need it.
        resize: length of the image's shorter side before the crop, or (height, width) to be covered.
        crop_mode: center (cut the sides), squash (lose the proportions) or border (add a border), as in timm.
        mean, std: normalisation of pixels between 0 and 1. Without any, from user or model, they stay as they are.
        interpolation: nearest, bilinear, bicubic, box, hamming or lanczos.
        device: auto (CUDA if there), cpu, cuda, cuda:1, …
        dtype: auto (bfloat16 autocast on CUDA, float32 elsewhere), float32, float64, or bfloat16 and float16 by autocast.
        class_map: JSON file or dictionary from class of the data to index, indices or name of class of the model.
        compile: run it through `torch.compile`.
        channels_last: lay out images and weights channels last.
        seed: of random weights; the same in every process.
        model_options: further arguments of the model's constructor.
    """
    request = Request(
        pretrained=pretrained and checkpoint is None,
        num_classes=_number_of_classes(num_classes),
        input_size=None if input_size is None else size("input_size", input_size),
        model_options=dict(model_options or {}),
        seed=seed,
    )
    chosen_device = _device(device)
    chosen_dtype = _dtype(dtype, chosen_device)
    chosen_map = None if class_map is None else read_class_map(class_map)

    built = _build(model, request)
    module = from_python.uncompiled(built.model)
    preprocessing = built.preprocessing.override(
        resize=resize, mean=mean, std=std, interpolation=interpolation, crop_mode=crop_mode
    )
    if checkpoint is not None:
        load_checkpoint(module, checkpoint)
    subject_name = name or built.name
    answers = built.answers
    if answers is None or request.input_size is not None:
        columns = _columns(module, subject_name, preprocessing.input_size)
        answers = columns if answers is None else answers
    if num_classes is not None and answers != num_classes:
        raise UserError(f"num_classes: {subject_name} answers in {answers} classes, got {num_classes}")
    return Subject(
        module,
        preprocessing,
        name=subject_name,
        answers=answers,
        device=chosen_device,
        dtype=chosen_dtype,
        classes=built.classes,
        class_map=chosen_map,
        facts={
            "source": built.source,
            "weights": _weights(built, request, checkpoint),
            **({"model_options": dict(model_options)} if model_options else {}),
        },
        compile=compile if module is built.model else built.model,
        channels_last=channels_last,
    )


def _build(model: str | nn.Module, request: Request) -> Built:
    if isinstance(model, nn.Module):
        return from_python.build_module(model, request)
    if not isinstance(model, str):
        raise UserError(f"model: must be a name or a torch.nn.Module, got {type(model).__name__}")
    if model.startswith(from_timm.PREFIXES):
        return from_timm.build(model, request)
    if model.startswith(from_demo.PREFIX):
        return from_demo.build(model, request)
    if model.startswith(from_torchvision.PREFIX):
        return from_torchvision.build(model, request)
    if model.startswith("hf/timm/"):  # timm's own repositories, which transformers would only wrap
        return from_timm.build(model.replace("hf/", "hf-hub:", 1), request)
    if model.startswith(from_huggingface.PREFIX):
        return from_huggingface.build(model, request)
    if Path(model).is_dir() and (os.sep in model or (Path(model) / "config.json").is_file()):
        return _build_folder(model, request)
    if model.endswith(WEIGHT_FILES) and Path(model).is_file():
        raise UserError(f"model: {model} is a file of weights; give the model's name and checkpoint={model}")
    if ":" in model:
        return from_python.build_callable(model, request)
    return from_timm.build(model, request)


def _build_folder(folder: str, request: Request) -> Built:
    """A folder of Hugging Face's or of timm's, told apart by their `config.json`."""
    try:
        configuration = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"model: the folder {folder} has no readable config.json, so it holds no model") from error
    if "architecture" in configuration and "model_type" not in configuration:
        return replace(from_timm.build(f"local-dir:{os.fspath(folder)}", request), name=os.fspath(folder))
    return from_huggingface.build(folder, request)


def _columns(model: nn.Module, name: str, input_size: tuple[int, int]) -> int:
    """How many numbers the model answers with, by asking it about a black image where it stands.

    Looking at its last linear layer would be cheaper and wrong for models with auxiliary heads; and a size or a number of
    channels it does not take shows here, and not in the middle of a study.
    """
    weight = next((value for value in model.parameters() if value.is_floating_point()), torch.zeros(()))
    black = torch.zeros(1, 3, *input_size, device=weight.device, dtype=weight.dtype)
    training = [module for module in model.modules() if module.training]
    try:
        with torch.no_grad():
            output = logits_of(model.eval()(black))
    except (RuntimeError, AssertionError, ValueError, IndexError, TypeError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{name} cannot take RGB images of input_size {list(input_size)} ({first_line(error)})"
        ) from error
    finally:
        for module in training:
            module.training = True
    if output.ndim != 2:
        raise UserError(f"{name}: must answer with one row of logits for each image, got shape {tuple(output.shape)}")
    return output.shape[1]


def _weights(built: Built, request: Request, checkpoint: str | Path | None) -> str:
    if checkpoint is not None:
        return f"checkpoint {Path(checkpoint).name}"
    if built.source in ("module", "callable"):
        return "as given"
    return "pretrained" if request.pretrained else f"random, seed {request.seed}"


def _number_of_classes(given: int | None) -> int | None:
    if given is not None and (not isinstance(given, int) or given < 1):
        raise UserError(f"num_classes: must be a whole number above 0, got {given!r}")
    return given


def _device(given: str | torch.device) -> torch.device:
    if given == "auto":
        return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    try:
        device = torch.device(given)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"device: must be auto, cpu or a device of this machine, got {str(given)!r} ({first_line(error)})"
        ) from error
    return torch.device("cuda", torch.cuda.current_device()) if device == torch.device("cuda") else device


def _dtype(given: str | torch.dtype, device: torch.device) -> torch.dtype:
    if given == "auto":
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = DTYPES.get(given) if isinstance(given, str) else given
    if chosen is None or chosen not in DTYPES.values():
        raise UserError(f"dtype: must be one of auto, {', '.join(DTYPES)}, got {given!r}")
    return chosen
