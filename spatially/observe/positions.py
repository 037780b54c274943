r"""Where a model keeps positions, and what they are: embeddings added to tokens, biases added to attention logits.

* absolute (``absolute`` if learned, ``sinusoidal`` if fixed): a vector for every patch, :math:`E[y, x]`, and for class,
  distillation or register tokens where they have one.
* ``relative``: a value for every pair of a query n and a key m and every head, :math:`B_h[n, m]`, mostly a function of their
  offset n − m: a table (Swin, BEiT, MaxViT), a network (Swin V2, CoAtNet, ViT with relative positions), LeViT's table of
  distances.
* ``gaussian``: :math:`A^2 \exp(-|n - m|^2 / 2σ^2)`, ours.
* ``decomposed``: vectors for the offset down and across, multiplied with the query (MViT): no bias without an image.
* ``rotary``: rotations of queries and keys; reported with the numbers they are made of.

Embeddings are found through :mod:`spatially.surgery.hosts`, which knows the parameters that hold positions, and else by
their name and shape; biases by the attributes that hold them, which the libraries share: see
:mod:`spatially.observe.position_biases`.

>>> import spatially
>>> subject = spatially.load("vit_tiny_patch16_224", pretrained=False, device="cpu")
>>> [(one.name, one.kind, one.grid) for one in positions(subject)]
[('pos_embed', 'absolute', (14, 14))]
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
import xarray as xr
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.observe.position import Grid, Position, as_array, grid_of_tokens, labelled
from spatially.observe.position_biases import biases
from spatially.observe.position_grids import EMBEDDING, RELATIVE, ROTARY, Grids
from spatially.subject import Subject
from spatially.surgery.hosts import Position as HostPosition
from spatially.surgery.hosts import find


def positions(subject: Subject | nn.Module) -> list[Position]:
    """Every embedding and bias of a model: embeddings first, then the biases, layer by layer.

    A plain module is looked at where it stands; a subject tells its input size, which some grids depend on.
    """
    model = subject.model if isinstance(subject, Subject) else subject
    size = subject.preprocessing.input_size if isinstance(subject, Subject) else None
    with torch.no_grad():
        grids = Grids(subject if isinstance(subject, Subject) else None, model)
        layers = list(biases(model, grids))
        return [*_embeddings(model, size, grids), *_rotary(model, size), *layers]


# Embeddings


def _embeddings(model: nn.Module, size: Grid | None, grids: Grids) -> Iterator[Position]:
    known = [
        (name, parameter)
        for position in _known(model)
        if position.kind == "absolute"
        for name, parameter in zip(position.names, position.parameters, strict=True)
    ]
    tables = [(name, one.weight) for name, one in model.named_modules() if isinstance(one, nn.Embedding)]
    named = [
        (name, tensor)
        for name, tensor in [*tables, *model.named_parameters(), *model.named_buffers()]
        if EMBEDDING.search(name.rpartition(".")[2]) and tensor.is_floating_point()
    ]
    others = {name for name, module in model.named_modules() if _has_others(module)}
    seen: set[int] = set()
    for name, tensor in [*known, *named]:
        if id(tensor) in seen or name.rpartition(".")[0] in others or tensor.ndim < 2:
            continue
        seen.add(id(tensor))
        kind = "absolute" if isinstance(tensor, nn.Parameter) and tensor.requires_grad else "sinusoidal"
        yield _embedding(name, tensor, "absolute" if (name, tensor) in known else kind, size)
    for name, module in model.named_modules():
        if EMBEDDING.search(name.rpartition(".")[2]) and (made := grids.made_by(name)) is not None:
            learned = any(parameter.requires_grad for parameter in module.parameters())
            yield _embedding(name, made, "absolute" if learned else "sinusoidal", size)


def _has_others(module: nn.Module) -> bool:
    """Whether what looks like an embedding in a module is none: a rotation, or a table of offsets."""
    held = (*module._buffers, *vars(module))
    return bool(ROTARY.search(type(module).__name__)) or any(RELATIVE.search(name) for name in held)


def _known(model: nn.Module) -> list[HostPosition]:
    """The parameters that surgery would reset."""
    found: list[HostPosition] = []
    for host in find(model):
        try:
            found += host.positions()
        except UserError:  # a relative of a network that can be changed, such as torchvision's Swin V2
            continue
    return found


def _embedding(name: str, tensor: Tensor, kind: str, size: Grid | None) -> Position:
    values = as_array(tensor)
    while values.ndim > 2 and values.shape[0] == 1:
        values = values[0]
    if values.ndim == 3:  # a map: channels first as a rule, last where the grid is seen to come first
        first = size is not None and values.shape[0] * size[1] == values.shape[1] * size[0] and values.shape[0] > 1
        turned = values if first and values.shape[2] > values.shape[0] else values.transpose(1, 2, 0)
        if not _is_map(turned, size):  # such as the tokens of each of several blocks
            return Position(name, kind, None, {"vectors": labelled(values, "block", "token", "channel")})
        values = turned
        return Position(name, kind, values.shape[:2], {"embedding": labelled(values, "y", "x", "channel")})
    values = values.reshape(-1, values.shape[-1])
    split = grid_of_tokens(len(values), size)
    if split is None:
        return Position(name, kind, None, {"prefix": labelled(values, "token", "channel")})
    prefix, grid = split
    arrays = {"embedding": labelled(values[prefix:].reshape(*grid, -1), "y", "x", "channel")}
    if prefix:
        arrays["prefix"] = labelled(values[:prefix], "token", "channel")
    return Position(name, kind, grid, arrays)


def _is_map(values: np.ndarray, size: Grid | None) -> bool:
    """Whether (rows, columns, channels) can be one: about the image's proportions, and channels enough to tell places apart.

    Patches need not divide an image evenly.
    """
    rows, columns, channels = values.shape
    height, width = size or (rows, columns)
    return 2 / 3 < rows * width / (columns * height) < 3 / 2 and channels >= min(rows, columns)


# Rotary


def _rotary(model: nn.Module, size: Grid | None) -> Iterator[Position]:
    found = [(name, module) for name, module in model.named_modules() if ROTARY.search(type(module).__name__)]
    own = [(name, module) for name, module in found if not list(module.children())]
    for name, module in own or found[:1]:
        tensors = [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]
        arrays = {label: _rotation(label, as_array(tensor), size) for label, tensor in tensors if tensor.numel()}
        grids = [(array.sizes["y"], array.sizes["x"]) for array in arrays.values() if "y" in array.dims]
        yield Position(name, "rotary", grids[0] if grids else None, arrays)


def _rotation(label: str, values: np.ndarray, size: Grid | None) -> xr.DataArray:
    if values.ndim == 2 and (split := grid_of_tokens(len(values), size)) is not None and split[0] == 0:
        return labelled(values.reshape(*split[1], -1), "y", "x", "channel")
    if values.ndim == 1:
        return labelled(values, "frequency")
    return labelled(values, *(f"{label}_{number}" for number in range(values.ndim)))
