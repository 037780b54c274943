r"""Convolutional ViT: every patch attends to the k×k patches around it (Park & Kim, figure 3).

The plain ViT with absolute positions, except that a query at (y, x) sees only the keys of its own square,

.. math:: N(y, x) = \{(y', x') : |y' - y| \le \lfloor k/2 \rfloor,\ |x' - x| \le \lfloor k/2 \rfloor\},

no class token, normalisation and then the mean over the patches before the head. `vit_*_conv3`, `_conv5`, `_conv7` and
`vit_*_global`, which sees all patches, have the same weights: any of them loads another's, and those of timm's
`vit_*_patch16_*`, whose class token falls away.

`border` says what a square that reaches over the edge does: "mask" leaves those positions out; "zero" lets them enter
with key 0 and value 0, like a padded convolution; "shift" slides the square inward. The authors' model is
`border="zero", qkv_bias=False, fc_norm=True`.
"""

import re
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import resample_abs_pos_embed, trunc_normal_
from torch import Tensor, nn

from spatially.errors import UserError, unknown
from spatially.models.registry import register
from spatially.models.vit import Attention, ColumnarTransformer, Shared, fit_patches
from spatially.models.weights import StateDict, token_grid, unwrap
from spatially.nn.check import odd
from spatially.nn.regular_attention import BORDERS, packed_regular_attention
from spatially.nn.relative_position import Grid


class LocalAttention(Attention):
    """Attention of every patch with the `window`×`window` patches around it; the weights are those of `Attention`."""

    def __init__(self, dim: int, num_heads: int, *, window: int, border: str = "mask", **options: Any) -> None:
        super().__init__(dim, num_heads, **options)
        if border not in BORDERS:
            raise unknown("border", border, BORDERS)
        self.window, self.border = odd("window", window), border

    def attend(self, packed: Tensor, shared: Shared = None) -> Tensor:
        """From (batch, height, width, 3, heads, channels of a head) to the same without the 3."""
        if self.fused_attn and not (self.training and self.attn_drop.p):
            return packed_regular_attention(packed, window=self.window, border=self.border)
        # Dropout of the attention, and a look at it, need the attention itself: every key, those outside at −∞.
        q, k, v = packed.unbind(3)
        grid, margin = (q.shape[1], q.shape[2]), 0
        if self.border == "zero":
            margin = self.window // 2
            k, v = (F.pad(maps, (0, 0, 0, 0, *[margin] * 4)) for maps in (k, v))
        outside = ~neighbourhood(grid, self.window, shift=self.border == "shift", margin=margin, device=q.device)
        bias = torch.zeros(outside.shape, dtype=q.dtype, device=q.device).masked_fill(outside, -torch.inf)
        return self.attend_densely(q, k, v, bias=bias[None])

    def extra_repr(self) -> str:
        """The square and its border."""
        return f"window={self.window}, border={self.border!r}"


def neighbourhood(
    grid: Grid, window: int, *, shift: bool = False, margin: int = 0, device: torch.device | None = None
) -> Tensor:
    """Which keys each query sees, row by row: (queries, keys); keys reach `margin` patches over the edge.

    >>> neighbourhood((1, 4), 3).int()
    tensor([[1, 1, 0, 0],
            [1, 1, 1, 0],
            [0, 1, 1, 1],
            [0, 0, 1, 1]], dtype=torch.int32)
    """

    def along(side: int) -> Tensor:
        first = torch.arange(side, device=device)[:, None] - window // 2
        if shift:
            first = first.clamp(max=side - window).clamp(min=0)
        keys = torch.arange(-margin, side + margin, device=device)
        return (first <= keys) & (keys < first + window)

    rows, columns = along(grid[0]), along(grid[1])
    seen = rows[:, None, :, None] & columns[None, :, None, :]  # (height, width, keys down, keys across)
    return seen.flatten(2).flatten(0, 1)


class ConvolutionalTransformer(ColumnarTransformer):
    """ViT with absolute positions whose attention is local, or global where `window` is None."""

    def __init__(
        self, *, window: int | None = None, border: Literal["mask", "zero", "shift"] = "mask", **options: Any
    ) -> None:
        attention = Attention if window is None else partial(LocalAttention, window=window, border=border)
        super().__init__(attention=attention, absolute_positions=True, **options)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)


def checkpoint_filter(state_dict: StateDict, model: nn.Module) -> StateDict:
    """Weights of timm's plain ViTs, of the authors' `ConViT`, or ours; the class token and its position fall away.

    Positions are resized from the grid that `weights.token_grid` takes them to be of: 36 of them are those of a 6×6 grid,
    also for a model of 4×9.
    """
    weights = unwrap(state_dict)
    if "embedding.2.pos_embedding" in weights:
        weights = _rename(weights)
    for name in [name for name in model.state_dict() if name.endswith("qkv.bias")]:
        # No bias is a bias of 0.
        weight = weights.get(name.removesuffix("bias") + "weight")
        if weight is not None and name not in weights:
            weights[name] = weight.new_zeros(len(weight))
    fit_patches(weights, model)
    class_token = weights.pop("cls_token", None)
    if "pos_embed" in weights:
        prefix = 0 if class_token is None else class_token.shape[1]
        weights["pos_embed"] = _fit_positions(weights["pos_embed"], model.grid, prefix=prefix)  # type: ignore[arg-type]
    if "fc_norm.weight" in weights and isinstance(model.fc_norm, nn.Identity):
        raise UserError("these weights normalise after the mean over the patches: build the model with fc_norm=True")
    return weights


def _fit_positions(positions: Tensor, grid: Grid, *, prefix: int) -> Tensor:
    """(1, tokens, channels) for another grid; the first `prefix` tokens may or may not have a position."""
    before, source = token_grid(positions.shape[1], grid, prefix=prefix)
    positions = positions[:, before:]
    if source == grid:
        return positions
    return resample_abs_pos_embed(positions, list(grid), list(source), num_prefix_tokens=0)


_AUTHORS = (
    (r"^embedding\.0\.", "patch_embed.proj."),
    (r"^embedding\.2\.pos_embedding$", "pos_embed"),
    (r"^transformers\.(\d+)\.norm([12])\.(?:\d+\.)?", r"blocks.\1.norm\2."),
    (r"^transformers\.(\d+)\.mhsa\.to_out\.0\.", r"blocks.\1.attn.proj."),
    (r"^transformers\.(\d+)\.ff\.net\.0\.", r"blocks.\1.mlp.fc1."),
    (r"^transformers\.(\d+)\.ff\.net\.3\.", r"blocks.\1.mlp.fc2."),
    (r"^classifier\.2\.", "fc_norm."),
    (r"^classifier\.3\.", "head."),
)


def _rename(weights: StateDict) -> StateDict:
    """The authors' names to timm's; their 1×1 convolutions become linear layers, query and key-value one projection."""
    renamed: StateDict = {}
    for name, value in weights.items():
        if name.startswith("transformers.") and value.ndim == 4:
            value = value.flatten(1)
        if name.endswith("mhsa.to_kv.weight"):
            continue
        if name.endswith("mhsa.to_q.weight"):
            others = weights[name.replace("to_q", "to_kv")].flatten(1)
            renamed[f"blocks.{name.split('.')[1]}.attn.qkv.weight"] = torch.cat([value, others])
            continue
        for pattern, replacement in _AUTHORS:
            name = re.sub(pattern, replacement, name)
        renamed[name] = value
    return renamed


_SIZES = {"tiny": ("Ti", 192, 3), "small": ("S", 384, 6)}
_WINDOWS = {"conv3": 3, "conv5": 5, "conv7": 7, "global": None}

for _size, (_letter, _width, _heads) in _SIZES.items():
    for _suffix, _window in _WINDOWS.items():
        register(
            f"vit_{_size}_{_suffix}",
            ConvolutionalTransformer,
            module=__name__,
            paper="park",
            what=f"ViT-{_letter}/16 without class token, attention in "
            + (f"{_window}×{_window} neighbourhoods" if _window else "the whole image"),
            options={"window": _window, "embed_dim": _width, "num_heads": _heads},
            checkpoint_filter=checkpoint_filter,
            out_indices=3,  # of the last blocks, as timm has it
            first_conv="patch_embed.proj",
            classifier="head",
        )
