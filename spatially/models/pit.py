r"""PiT, the pooling-based vision transformer (Heo et al., sections 3.2 and 3.4, table 1).

Patches of P×P pixels, taken every S pixels, become tokens with a learned position each; a class token (and a distillation
token) goes before them without one. Three stages of plain transformer blocks follow; before the second and the third a
:class:`~spatially.nn.token_pool.TokenPool` halves the grid and doubles width and heads. The norm at the end and the linear
head read the class token.

An H×W image gives a grid of ⌊(H − P)/S⌋ + 1 rows, each pool makes n rows ⌈n/2⌉: any image of at least one patch will do, and
the positions are resized to its grid. Maps lie at strides S, 2S, 4S. With `output_stride=2S` or `S` the last pools keep the
resolution for dense tasks and share the weights (section 4.2); `token_pool` has the formula.

`PoolingTransformer(pool=False)` is the same transformer without pools: the plain ViT, of which `pooled_vit` makes pairs.
"""

import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from timm.layers import calculate_drop_path_rates, get_device_dtype, to_2tuple, trunc_normal_
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint_seq
from timm.models.vision_transformer import Block
from torch import Tensor, nn

from spatially.errors import UserError, unknown
from spatially.models.registry import check_images, dtype_of, register
from spatially.models.weights import StateDict, unwrap
from spatially.nn.resize import resize
from spatially.nn.token_pool import Grid, TokenPool, pool_steps, token_map

Indices = int | Sequence[int] | None


class Stage(nn.Module):
    """A pool, if there is one, and the blocks behind it; `drop_path` has a rate for each block."""

    def __init__(
        self, pool: TokenPool | None, dim: int, heads: int, *, drop_path: Sequence[float], **options: Any
    ) -> None:
        super().__init__()
        self.pool = pool
        block = partial(Block, dim, heads, qkv_bias=True, norm_layer=partial(nn.LayerNorm, eps=1e-6), **options)
        self.blocks = nn.Sequential(*[block(drop_path=rate) for rate in drop_path])
        self.grad_checkpointing = False

    def forward(self, tokens: Tensor, grid: Grid) -> tuple[Tensor, Grid]:
        """Tokens and their grid, to those of the next stage."""
        if self.pool is not None:
            tokens, grid = self.pool(tokens, grid)
        if self.grad_checkpointing and len(self.blocks):
            return checkpoint_seq(self.blocks, tokens), grid
        return self.blocks(tokens), grid


class PoolingTransformer(nn.Module):
    """PiT (`pool=True`) and ViT (`pool=False`); names of weights as in timm's `pit_*`.

    `class_position` gives the class token a position of its own, which ViT and DeiT have and PiT has not. `weight_init`:
    "torch" leaves the linear layers as PyTorch starts them, as PiT's authors do; "vit" draws them as ViT and DeiT do.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        stride: int = 8,
        dims: Sequence[int] = (144, 288, 576),
        heads: Sequence[int] = (3, 6, 12),
        depths: Sequence[int] = (2, 6, 4),
        mlp_ratio: float = 4.0,
        pool: bool = True,
        output_stride: int | None = None,
        own_dilation: bool = False,
        distilled: bool = False,
        class_position: bool = False,
        weight_init: str = "torch",
        num_classes: int = 1000,
        in_chans: int = 3,
        global_pool: str = "token",
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check_stages(dims, heads, depths, pool)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        image = to_2tuple(img_size)
        if min(image) < patch_size:
            raise UserError(f"img_size must be at least one patch, {patch_size}: got {img_size}")
        self.in_chans, self.num_classes, self.patch_size = in_chans, num_classes, patch_size
        self.num_features = self.head_hidden_size = self.embed_dim = dims[-1]
        self.num_prefix_tokens = 2 if distilled else 1
        self.distilled, self.distilled_training, self.grad_checkpointing = distilled, False, False
        self.global_pool = _check_pooling(global_pool)

        convolution = nn.Conv2d(in_chans, dims[0], kernel_size=patch_size, stride=stride, **place)
        self.patch_embed = nn.Sequential(OrderedDict(conv=convolution))
        height, width = ((side - patch_size) // stride + 1 for side in image)
        self.pos_embed = nn.Parameter(torch.empty(1, dims[0], height, width, **place))
        self.cls_token = nn.Parameter(torch.empty(1, self.num_prefix_tokens, dims[0], **place))
        self.cls_pos_embed = nn.Parameter(torch.empty_like(self.cls_token)) if class_position else None
        self.pos_drop = nn.Dropout(pos_drop_rate)

        options = {"mlp_ratio": mlp_ratio, "proj_drop": proj_drop_rate, "attn_drop": attn_drop_rate, **place}
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        steps = pool_steps(len(dims) - 1 if pool else 0, first=stride, output_stride=output_stride, own=own_dilation)
        stages, self.feature_info, reduction = [], [], stride
        for number, dim in enumerate(dims):
            before = None
            if pool and number:
                step, dilation = steps[number - 1]
                before = TokenPool(dims[number - 1], dim, stride=step, dilation=dilation, **place)
                reduction *= step
            stages.append(Stage(before, dim, heads[number], drop_path=rates[number], **options))
            self.feature_info.append({"num_chs": dim, "reduction": reduction, "module": f"transformers.{number}"})
        self.transformers = nn.ModuleList(stages)
        self.norm: nn.Module = nn.LayerNorm(dims[-1], eps=1e-6, **place)
        self.head_drop = nn.Dropout(drop_rate)
        self.head, self.head_dist = self._classifiers(place)
        self._initialise(weight_init)

    def _classifiers(self, place: dict[str, Any]) -> tuple[nn.Module, nn.Module | None]:
        """A linear layer for the class token and, where there is one, for the distillation token."""

        def build() -> nn.Module:
            if self.num_classes > 0:
                return nn.Linear(self.num_features, self.num_classes, **place).train(self.training)
            return nn.Identity()

        return build(), build() if self.distilled else None

    def _initialise(self, weight_init: str) -> None:
        if weight_init not in ("torch", "vit"):
            raise unknown("weight_init", weight_init, ("torch", "vit"))
        for parameter in (self.pos_embed, self.cls_token, self.cls_pos_embed):
            if parameter is not None:
                trunc_normal_(parameter, std=0.02)
        if weight_init == "vit":
            for layer in self.modules():
                if isinstance(layer, nn.Linear):
                    trunc_normal_(layer.weight, std=0.02)
                    nn.init.zeros_(layer.bias)

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Logits; in distilled training those of the class token and those of the distillation token."""
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """All tokens of the last stage after the norm, prefix tokens first: (batch, prefix + height·width, channels)."""
        tokens, grid = self._embed(images)
        for stage in self.transformers:
            tokens, grid = stage(tokens, grid)
        return self.norm(tokens)

    def _embed(self, images: Tensor) -> tuple[Tensor, Grid]:
        dtype = dtype_of(self.patch_embed)
        check_images(images, channels=self.in_chans, smallest=self.patch_size, dtype=dtype)
        patches = self.patch_embed(images)
        grid = (patches.shape[-2], patches.shape[-1])
        patches = self.pos_drop(patches + resize(self.pos_embed, grid, antialias=True))
        prefix = self.cls_token if self.cls_pos_embed is None else self.cls_token + self.cls_pos_embed
        return torch.cat((prefix.expand(patches.shape[0], -1, -1), patches.flatten(2).transpose(1, 2)), dim=1), grid

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor | tuple[Tensor, Tensor]:
        """What `forward_features` gives, to logits, or with `pre_logits` to what the linear layer would read."""
        tokens = self.head_drop(tokens[:, : self.num_prefix_tokens] if self.global_pool else tokens)
        first, last = (tokens[:, 0], tokens[:, -1]) if self.global_pool else (tokens, tokens)
        if self.head_dist is None:
            return first if pre_logits else self.head(first)
        if not pre_logits:
            first, last = self.head(first), self.head_dist(last)
        if self.distilled_training and self.training:
            return first, last
        return (first + last) / 2

    def forward_intermediates(
        self,
        images: Tensor,
        indices: Indices = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Maps after the chosen stages, and the tokens; `norm` takes maps as wide as the last through the final norm."""
        if output_fmt != "NCHW":
            raise UserError(f"output_fmt must be 'NCHW': got {output_fmt!r}")
        chosen, last = feature_take_indices(len(self.transformers), indices)
        maps = []
        tokens, grid = self._embed(images)
        for number, stage in enumerate(self.transformers[: last + 1] if stop_early else self.transformers):
            tokens, grid = stage(tokens, grid)
            if number in chosen:
                fits = norm and tokens.shape[-1] == self.num_features
                maps.append(token_map(self.norm(tokens) if fits else tokens, grid).contiguous())
        if intermediates_only:
            return maps
        return self.norm(tokens) if number + 1 == len(self.transformers) else tokens, maps

    def prune_intermediate_layers(
        self, indices: Indices = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Leave out the stages behind the last one that is wanted."""
        chosen, last = feature_take_indices(len(self.transformers), indices)
        self.transformers = self.transformers[: last + 1]
        narrower = self.feature_info[last]["num_chs"] != self.num_features  # than the norm and the head
        if prune_norm or narrower:
            self.norm = nn.Identity()
        if prune_head or narrower:
            self.reset_classifier(0, "")
        return chosen

    def get_classifier(self) -> nn.Module | tuple[nn.Module, nn.Module]:
        """The linear layer, or both of a distilled model."""
        return self.head if self.head_dist is None else (self.head, self.head_dist)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """New linear layers for so many classes (0: none); `global_pool` "token", or "" to keep all tokens."""
        if global_pool is not None:
            self.global_pool = _check_pooling(global_pool)
        self.num_classes = num_classes
        self.head, self.head_dist = self._classifiers(get_device_dtype(self))

    def set_distilled_training(self, enable: bool = True) -> None:
        """Whether training gives the logits of both tokens; otherwise, and outside training, their mean."""
        if enable and not self.distilled:
            raise UserError(
                "set_distilled_training needs a model with a distillation token: build it with distilled=True"
            )
        self.distilled_training = enable

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute blocks again in the backward pass instead of keeping what they computed."""
        self.grad_checkpointing = enable
        for stage in self.transformers:
            stage.grad_checkpointing = enable  # type: ignore[assignment]

    def no_weight_decay(self) -> set[str]:
        """Positions and prefix tokens."""
        return {"pos_embed", "cls_token"} | ({"cls_pos_embed"} if self.cls_pos_embed is not None else set())

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers for timm's layer-wise decay: a pool belongs to the block behind it, the norm to the last block."""
        if coarse:
            blocks = [(r"^transformers\.(\d+)", None), (r"^norm", (99999,))]
        else:
            pool = (r"^transformers\.(\d+)\.pool", (0,))
            blocks = [pool, (r"^transformers\.(\d+)\.blocks\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^cls_token|^cls_pos_embed|^pos_embed|^patch_embed", "blocks": blocks}


def _check_pooling(global_pool: str) -> str:
    if global_pool not in ("token", ""):
        raise UserError(f"global_pool must be 'token' or '': got {global_pool!r}")
    return global_pool


def _check_stages(dims: Sequence[int], heads: Sequence[int], depths: Sequence[int], pool: bool) -> None:
    if not len(dims) == len(heads) == len(depths) > 0:
        raise UserError(f"dims, heads and depths must have one entry a stage: got {dims}, {heads}, {depths}")
    if any(dim % count for dim, count in zip(dims, heads, strict=True)):
        raise UserError(f"dims must be multiples of heads: got {dims} and {heads}")
    if not pool and len(set(dims)) > 1:
        raise UserError(f"dims must all be the same where pool=False: got {dims}")


def checkpoint_filter(state_dict: StateDict, model: nn.Module) -> StateDict:
    """Weights of timm's `pit_*`, of the authors (`pools.0.` is the second stage's pool) or ours, for `model`."""
    result = {}
    for name, value in unwrap(state_dict).items():
        name = re.sub(r"^pools\.(\d+)\.", lambda match: f"transformers.{int(match[1]) + 1}.pool.", name)
        result[name] = value
    if "pos_embed" in result:
        grid = model.get_parameter("pos_embed").shape[-2:]
        result["pos_embed"] = resize(result["pos_embed"], (grid[0], grid[1]), antialias=True)
    return result


def _register(
    size: str, dims: tuple[int, ...], heads: tuple[int, ...], depths: tuple[int, ...], **patches: int
) -> None:
    for distilled in (False, True):
        register(
            f"pit_{size}_distilled" if distilled else f"pit_{size}",
            PoolingTransformer,
            module=__name__,
            paper="heo",
            what=f"PiT, {size}" + (", with a distillation token" if distilled else ""),
            options={"dims": dims, "heads": heads, "depths": depths, "distilled": distilled, **patches},
            checkpoint_filter=checkpoint_filter,
            out_indices=range(len(dims)),
            first_conv="patch_embed.conv",
            classifier=("head", "head_dist") if distilled else "head",
        )


_register("tiny", (64, 128, 256), (2, 4, 8), (2, 6, 4))
_register("xsmall", (96, 192, 384), (2, 4, 8), (2, 6, 4))
_register("small", (144, 288, 576), (3, 6, 12), (2, 6, 4))
_register("base", (256, 512, 1024), (4, 8, 16), (3, 6, 4), patch_size=14, stride=7)
