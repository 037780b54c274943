"""Weights of other Swins for ours: timm's and the authors' names, other windows, linear layers where a convolution is."""

import re
import warnings

import torch
import torch.nn.functional as F
from timm.layers import resample_patch_embed
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.models.weights import Grid, StateDict, source_grid, unwrap
from spatially.nn.conv_projection import NORMALISED, PARTS, ConvProjection
from spatially.nn.resize import resize


def checkpoint_filter(state_dict: StateDict, model: nn.Module) -> StateDict:
    """Weights of timm's Swin, of the authors' (Liu et al.) and of this family, as `model` names and shapes them.

    A table that the model does not have is dropped, one of another window resized. Its number of rows tells the window:
    a square one if that has so many, else the model's own (`weights.source_grid`); so a table of 7×2 windows is not told
    from one of 2×7, and weights of a wide image must not be given to a model for a tall one. A linear projection
    becomes the centre of a dense convolution, so that the layer computes the same; a depth-wise one has no place for it and
    keeps its initial values, with a warning. A Gaussian bias that the weights do not know keeps its initial values.
    """
    own = model.state_dict()
    modules = dict(model.named_modules())
    result: StateDict = {}
    untouched: list[str] = []
    for name, value in _timm_names(unwrap(state_dict)).items():
        parent, _, last = name.rpartition(".")
        target = modules.get(parent)
        if last == "relative_position_bias_table":
            if name in own:
                result[name] = _resized_table(name, value, modules[parent].window_size)
        elif isinstance(target, ConvProjection) and last != NORMALISED:
            fitted = _split_projection(value, target)
            result |= {f"{parent}.{part}.{last}": tensor for part, tensor in fitted.items()}
            if target.depthwise:
                untouched.append(f"{parent}.{target.convolved}.{last}")
        elif name == "patch_embed.proj.weight" and value.shape[-2:] != own[name].shape[-2:]:
            result[name] = resample_patch_embed(value, list(own[name].shape[-2:]))
        else:
            result[name] = value
    result |= {name: own[name] for name in untouched}
    result |= {name: tensor for name, tensor in own.items() if ".gaussian_bias." in name and name not in result}
    if untouched:
        warnings.warn(
            f"linear weights have no place in a depth-wise convolution; left at their initial values: {', '.join(untouched)}",
            stacklevel=2,
        )
    return result


def _timm_names(state_dict: StateDict) -> StateDict:
    """Without what is computed anew, under timm's names: there a stage begins with its merging, at the authors' it ends so."""
    authors = any(name.startswith("layers.0.downsample.") for name in state_dict)

    def rename(name: str) -> str:
        if authors:
            name = re.sub(r"^layers\.(\d+)\.downsample", lambda found: f"layers.{int(found[1]) + 1}.downsample", name)
        return re.sub(r"^head\.(weight|bias)$", r"head.fc.\1", name)

    computed = ("relative_position_index", "attn_mask")
    return {rename(name): value for name, value in state_dict.items() if not name.endswith(computed)}


def _resized_table(name: str, table: Tensor, window: Grid) -> Tensor:
    """Bicubic in the plane of offsets, as the authors of Swin resize theirs."""
    plane = (2 * window[0] - 1, 2 * window[1] - 1)
    source = source_grid(len(table), plane)
    if source is None:
        raise UserError(f"{name} must come from a square window to be resized: got {len(table)} rows")
    if source == plane:
        return table
    return resize(table.t().reshape(-1, *source), plane).flatten(1).t().contiguous()


def _split_projection(packed: Tensor, target: ConvProjection) -> StateDict:
    """Rows of query, key and value (weights or biases) for a linear layer of two and a convolution of one."""
    parts = dict(zip(PARTS, packed.chunk(3), strict=True))
    row = parts.pop(target.convolved)
    result = {"linear": torch.cat(list(parts.values()))}
    if not target.depthwise:
        if row.ndim == 2:
            around = target.convolution.kernel_size[0] // 2
            row = F.pad(row[:, :, None, None], (around, around, around, around))
        result[target.convolved] = row
    return result
