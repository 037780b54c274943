"""timm's ViT, DeiT, BEiT, ViT with relative positions, PiT, and Swin."""

from collections.abc import Iterator
from typing import Any, TypeVar

import torch
from timm.layers import Attention, DiffAttention, RelPosBias, RelPosMlp, trunc_normal_
from timm.models.beit import Attention as BeitAttention
from timm.models.beit import Beit
from timm.models.beit import RelativePositionBias as BeitTable
from timm.models.pit import PoolingVisionTransformer
from timm.models.swin_transformer import SwinTransformer, SwinTransformerBlock, SwinTransformerStage, WindowAttention
from timm.models.vision_transformer import (
    DiffParallelScalingBlock,
    ParallelScalingBlock,
    VisionTransformer,
    get_init_weights_vit,
)
from timm.models.vision_transformer_relpos import RelPosAttention, VisionTransformerRelPos
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.nn.conv_projection import ConvProjection
from spatially.surgery.grid import Grid, joined
from spatially.surgery.hosts.base import (
    BiasPlace,
    Host,
    Position,
    WindowLayer,
    changed_kind,
    joined_name,
    network_position,
)
from spatially.surgery.windows import (
    Pair,
    Windows,
    attend_to_squares,
    attend_to_windows,
    pair_bias,
    project,
    square_bias,
)

Kind = TypeVar("Kind", bound=nn.Module)


class _Masked(nn.Module):
    """The bias joins whatever mask the layer is given."""

    gaussian_bias: Any
    grid: Grid

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, **others: Any) -> Tensor:
        bias = self.grid.bias(self.gaussian_bias, x.shape[1])[None].to(x.dtype)
        return super().forward(x, attn_mask=joined(attn_mask, bias), **others)


class BiasedAttention(_Masked, Attention):
    """`Attention` with a Gaussian bias."""


class BiasedDiffAttention(_Masked, DiffAttention):
    """`DiffAttention` with a Gaussian bias."""


class BiasedParallelScalingBlock(_Masked, ParallelScalingBlock):
    """`ParallelScalingBlock`, which attends itself, with a Gaussian bias."""


class BiasedDiffParallelScalingBlock(_Masked, DiffParallelScalingBlock):
    """`DiffParallelScalingBlock`, which attends itself, with a Gaussian bias."""


class BiasedBeitAttention(BeitAttention):
    """The bias joins what all layers share; the layer adds its own table."""

    grid: Grid

    def forward(self, x: Tensor, shared_rel_pos_bias: Tensor | None = None) -> Tensor:
        bias = self.grid.bias(self.gaussian_bias, x.shape[1])[None]
        return super().forward(x, shared_rel_pos_bias=joined(shared_rel_pos_bias, bias).to(x.dtype))


class BiasedRelPosAttention(RelPosAttention):
    """For layers without positions of their own: the bias joins what all layers share."""

    grid: Grid

    def forward(self, x: Tensor, shared_rel_pos: Tensor | None = None) -> Tensor:
        bias = self.grid.bias(self.gaussian_bias, x.shape[1])[None]
        return super().forward(x, shared_rel_pos=joined(shared_rel_pos, bias).to(x.dtype))


class _BiasedRelPos(nn.Module):
    """For layers with positions of their own, which are made for one grid."""

    gaussian_bias: Any
    window_size: Pair
    prefix_tokens: int

    def get_bias(self) -> Tensor:
        more = nn.functional.pad(self.gaussian_bias(self.window_size), (self.prefix_tokens, 0, self.prefix_tokens, 0))
        return super().get_bias() + more[None]  # type: ignore[misc]


class BiasedRelPosMlp(_BiasedRelPos, RelPosMlp):
    """`RelPosMlp` with a Gaussian bias."""


class BiasedRelPosBias(_BiasedRelPos, RelPosBias):
    """`RelPosBias` with a Gaussian bias."""


TOKEN_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    Attention: BiasedAttention,
    DiffAttention: BiasedDiffAttention,
    ParallelScalingBlock: BiasedParallelScalingBlock,
    DiffParallelScalingBlock: BiasedDiffParallelScalingBlock,
    BeitAttention: BiasedBeitAttention,
}
TABLE_KINDS: dict[type[nn.Module], type[nn.Module]] = {RelPosMlp: BiasedRelPosMlp, RelPosBias: BiasedRelPosBias}


class ChangedWindowAttention(WindowAttention):
    """Window attention with or without its table, with a Gaussian bias, or for windows that are projected already."""

    def _get_rel_pos_bias(self) -> Tensor:
        table = None if self.relative_position_bias_table is None else super()._get_rel_pos_bias()
        return pair_bias(table, self, self.window_size)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if not isinstance(self.qkv, ConvProjection):
            return super().forward(x, mask)
        out = attend_to_windows(
            x, heads=self.num_heads, bias=self._get_rel_pos_bias(), mask=mask, dropout=self.attn_drop, scale=self.scale
        )
        return self.proj_drop(self.proj(out))

    def set_window_size(self, window_size: Pair) -> None:
        """As timm's, where there may be no table to resize."""
        if self.relative_position_bias_table is not None:
            super().set_window_size(window_size)
            return
        self.window_size = (window_size[0], window_size[1])
        self.window_area = window_size[0] * window_size[1]


class ChangedSwinBlock(SwinTransformerBlock):
    """Projects the whole map first, and attends inside windows or over squares."""

    def _attn(self, x: Tensor) -> Tensor:
        attention: ChangedWindowAttention = self.attn
        parts = project(attention.qkv, x)
        if field := getattr(self, "receptive_field", None):
            heads = attention.num_heads
            bias = square_bias(attention, heads=heads, own_window=attention.window_size, window=field[0])
            out = attend_to_squares(parts, heads=heads, field=field, bias=bias, scale=attention.scale)
            return attention.proj_drop(attention.proj(out))
        windows = Windows((x.shape[1], x.shape[2]), self.window_size, self.shift_size, pad_first=False)
        return windows.join(attention(windows.cut(parts, nothing=attention.qkv.of_nothing()), windows.mask(x)))


SHARED_KINDS: dict[type[nn.Module], type[nn.Module]] = {RelPosAttention: BiasedRelPosAttention}
WINDOW_KINDS: dict[type[nn.Module], type[nn.Module]] = {WindowAttention: ChangedWindowAttention}
BLOCK_KINDS: dict[type[nn.Module], type[nn.Module]] = {SwinTransformerBlock: ChangedSwinBlock}


class TimmHost(Host):
    """What timm's families have in common."""

    trunk: Any

    def _all(self, *kinds: type[Kind]) -> Iterator[tuple[str, Kind]]:
        for name, module in self.trunk.named_modules(prefix=self.name):
            if isinstance(module, kinds):
                yield name, module

    def _absolute(self) -> list[Position]:
        parameter = getattr(self.trunk, "pos_embed", None)
        if not isinstance(parameter, nn.Parameter):
            return []
        name = joined_name(self.name, "pos_embed")
        return [Position((name,), (parameter,), "absolute", lambda: [truncated_normal(parameter)])]

    def _table(self, name: str, owner: nn.Module, *, zero: bool) -> Position:
        table: nn.Parameter = owner.relative_position_bias_table  # type: ignore[assignment]
        fresh = torch.zeros_like if zero else truncated_normal
        return Position(
            (f"{name}.relative_position_bias_table",), (table,), "relative", lambda: [fresh(torch.empty(table.shape))]
        )


def truncated_normal(like: Tensor) -> Tensor:
    """timm's usual draw for positions: normal with standard deviation 0.02, cut off at ±2, in single precision."""
    return trunc_normal_(torch.empty(like.shape), std=0.02)


class VitHost(TimmHost):
    """ViT, DeiT and BEiT."""

    def bias_places(self) -> list[BiasPlace]:
        places = []
        for number, block in enumerate(self.trunk.blocks):
            name = joined_name(self.name, f"blocks.{number}")
            inside = [part for part in block.named_modules(prefix=name) if isinstance(part[1], tuple(TOKEN_KINDS))]
            if not inside:
                raise UserError(f"{name} has no attention layer that is known: it is a {type(block).__name__}")
            places += [
                BiasPlace(
                    path, module, module.num_heads, changed_kind(path, module, TOKEN_KINDS), self.trunk.patch_embed
                )
                for path, module in inside
            ]
        return places

    def positions(self) -> list[Position]:
        tables = [
            self._table(name, module, zero=True)
            for name, module in self._all(BeitAttention, BeitTable)
            if module.relative_position_bias_table is not None
        ]
        return self._absolute() + tables


class RelPosHost(TimmHost):
    """ViT with relative positions, in every layer or shared by all."""

    def bias_places(self) -> list[BiasPlace]:
        places = []
        for name, module in self._all(RelPosAttention):
            own = module.rel_pos
            if own is None:
                kind = changed_kind(name, module, SHARED_KINDS)
                places.append(BiasPlace(name, module, module.num_heads, kind, self.trunk.patch_embed))
            else:
                kind = changed_kind(f"{name}.rel_pos", own, TABLE_KINDS)
                places.append(BiasPlace(f"{name}.rel_pos", own, module.num_heads, kind))
        return places

    def positions(self) -> list[Position]:
        tables = [self._table(name, module, zero=False) for name, module in self._all(RelPosBias)]
        initialise = get_init_weights_vit(self.trunk.weight_init_mode)
        networks = [network_position(f"{name}.mlp", module.mlp, initialise) for name, module in self._all(RelPosMlp)]
        return tables + networks


class PitHost(TimmHost):
    """PiT: blocks of a ViT on the grid of the patches, or of the pool before them."""

    @property
    def prefix(self) -> int:
        return int(self.trunk.num_tokens)

    def bias_places(self) -> list[BiasPlace]:
        places, stem = [], self.trunk.patch_embed
        for number, stage in enumerate(self.trunk.transformers):
            stem = stem if stage.pool is None else stage.pool.conv
            for name, module in stage.named_modules(prefix=joined_name(self.name, f"transformers.{number}")):
                if isinstance(module, Attention):
                    kind = changed_kind(name, module, TOKEN_KINDS)
                    places.append(BiasPlace(name, module, module.num_heads, kind, stem))
        return places

    def positions(self) -> list[Position]:
        return self._absolute()


class SwinHost(TimmHost):
    """Swin, with windows of any size: a whole network, or stages of one that something else holds."""

    def bias_places(self) -> list[BiasPlace]:
        return [
            BiasPlace(name, module, module.num_heads, changed_kind(name, module, WINDOW_KINDS))
            for name, module in self._all(WindowAttention)
        ]

    def positions(self) -> list[Position]:
        return [
            self._table(name, module, zero=False)
            for name, module in self._all(WindowAttention)
            if module.relative_position_bias_table is not None
        ]

    def window_layers(self) -> list[WindowLayer]:
        return [
            WindowLayer(
                name=f"{name}.attn",
                block=block,
                attention=block.attn,
                table_owner=block.attn,
                kinds={
                    part: changed_kind(name, part, kinds)
                    for part, kinds in ((block, BLOCK_KINDS), (block.attn, WINDOW_KINDS))
                },
                window=block.attn.window_size,
                attention_dropout=block.attn.attn_drop.p,
            )
            for name, block in self._all(SwinTransformerBlock)
        ]


def host(name: str, module: nn.Module) -> Host | None:
    """The host of a timm network; None for any other module."""
    if isinstance(module, (VisionTransformer, Beit)):
        return VitHost(name, module)
    if isinstance(module, VisionTransformerRelPos):
        return RelPosHost(name, module)
    if isinstance(module, PoolingVisionTransformer):
        return PitHost(name, module)
    # `features_only` keeps the stages and leaves the network that held them.
    return SwinHost(name, module) if isinstance(module, (SwinTransformer, SwinTransformerStage)) else None
