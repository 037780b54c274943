"""Our own ViTs, convolutional ViTs, PiTs and Swins. Most have a place for what is added: no class changes then."""

from collections.abc import Iterator
from typing import Any

import torch
from timm.layers import Attention as TokenAttention
from timm.layers import trunc_normal_
from torch import Tensor, nn

from spatially.models.conv_vit import LocalAttention
from spatially.models.pit import PoolingTransformer
from spatially.models.swin import SwinTransformer
from spatially.models.vit import Attention, ColumnarTransformer, RelativeAttention
from spatially.nn.regular_attention import packed_regular_attention
from spatially.nn.regular_self_attention import RegularSelfAttention
from spatially.nn.relative_position import RelPosBias, RelPosMlp
from spatially.nn.window_attention import WindowAttention
from spatially.surgery.hosts.base import (
    BiasPlace,
    Host,
    Position,
    WindowLayer,
    changed_kind,
    joined_name,
    network_position,
)
from spatially.surgery.hosts.from_timm import BiasedAttention as BiasedTokenAttention
from spatially.surgery.windows import attend_to_squares, project, square_bias

Kinds = dict[type[nn.Module], type[nn.Module]]


class BiasedAttention(Attention):
    """Attention of all patches with all patches, with a Gaussian bias."""

    gaussian_bias: Any

    def attend_densely(self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None) -> Tensor:
        """Keys may reach over the edge of the queries' grid, by the same margin on all sides."""
        rows, columns = k.shape[1:3]
        margin = (rows - q.shape[1]) // 2
        gaussian = self.gaussian_bias((rows, columns)).unflatten(1, (rows, columns))
        gaussian = gaussian[:, margin : rows - margin, margin : columns - margin].flatten(1, 2)
        return super().attend_densely(q, k, v, bias=gaussian if bias is None else gaussian + bias)


class BiasedLocalAttention(BiasedAttention, LocalAttention):
    """Attention over the square around each patch, with a Gaussian bias."""

    def attend(self, packed: Tensor, shared: Any = None) -> Tensor:
        if not self.fused_attn or (self.training and self.attn_drop.p):
            return LocalAttention.attend(self, packed, shared)
        bias = self.gaussian_bias.square(self.window).expand(self.num_heads, -1, -1).to(packed.dtype)
        return packed_regular_attention(packed, window=self.window, border=self.border, bias=bias)


class ChangedWindowAttention(WindowAttention):
    """Attends over the square around each query in place of its window."""

    receptive_field: tuple[int, str]

    def forward(self, x: Tensor, *, index: Tensor | None = None, mask: Tensor | None = None) -> Tensor:
        heads, field = self.num_heads, getattr(self, "receptive_field", None)
        if field is None:
            return super().forward(x, index=index, mask=mask)
        bias = square_bias(self, heads=heads, own_window=self.window_size, window=field[0])
        out = attend_to_squares(project(self.qkv, x), heads=heads, field=field, bias=bias, scale=self.scale)
        return self.proj_drop(self.proj(out))


COLUMN_KINDS: Kinds = {
    Attention: BiasedAttention,
    LocalAttention: BiasedLocalAttention,
    RelativeAttention: RelativeAttention,
}
TOKEN_KINDS: Kinds = {TokenAttention: BiasedTokenAttention}
WINDOW_KINDS: Kinds = {WindowAttention: ChangedWindowAttention}


class OwnHost(Host):
    """What our families have in common."""

    trunk: Any

    def _all(self, *kinds: type[nn.Module]) -> Iterator[tuple[str, Any]]:
        for name, module in self.trunk.named_modules(prefix=self.name):
            if isinstance(module, kinds):
                yield name, module

    def positions(self) -> list[Position]:
        own = [
            (joined_name(self.name, name), getattr(self.trunk, name, None)) for name in ("pos_embed", "cls_pos_embed")
        ]
        tables = [
            (f"{name}.relative_position_bias_table", module.relative_position_bias_table)
            for name, module in self._all(RelPosBias, WindowAttention)
        ]
        return [
            *[_drawn(name, parameter, "absolute") for name, parameter in own if parameter is not None],
            *[_drawn(name, parameter, "relative") for name, parameter in tables if parameter is not None],
            *[network_position(f"{name}.mlp", module.mlp) for name, module in self._all(RelPosMlp)],
        ]


class ColumnarHost(OwnHost):
    """`vit_*`: every layer is told its grid."""

    def bias_places(self) -> list[BiasPlace]:
        return [
            BiasPlace(name, module, module.num_heads, changed_kind(name, module, COLUMN_KINDS))
            for name, module in self._all(Attention)
        ]


class PitHost(OwnHost):
    """`pit_*`: timm's blocks, on the grid of the patches or of the pool before them."""

    def bias_places(self) -> list[BiasPlace]:
        places, stem = [], self.trunk.patch_embed
        for number, stage in enumerate(self.trunk.transformers):
            stem = stem if stage.pool is None else stage.pool
            for inside, module in stage.named_modules(prefix=joined_name(self.name, f"transformers.{number}")):
                if isinstance(module, TokenAttention):
                    kind = changed_kind(inside, module, TOKEN_KINDS)
                    places.append(BiasPlace(inside, module, module.num_heads, kind, stem))
        return places


class RegularLayer(WindowLayer):
    """A layer that has squares from the start."""

    def __init__(self, name: str, module: RegularSelfAttention) -> None:
        side = module.window_size
        super().__init__(name, module, module, module, {}, (side, side), attention_dropout=0.0)

    @property
    def square(self) -> tuple[int, str]:
        module: RegularSelfAttention = self.block  # type: ignore[assignment]
        return module.window_size, module.border


class SwinHost(OwnHost):
    """`swin_*`: a place for everything but squares."""

    def bias_places(self) -> list[BiasPlace]:
        return [
            BiasPlace(name, module, module.num_heads, type(module))
            for name, module in self._all(WindowAttention, RegularSelfAttention)
        ]

    def window_layers(self) -> list[WindowLayer]:
        return [
            WindowLayer(
                name=name,
                block=module,
                attention=module,
                table_owner=module,
                kinds={module: changed_kind(name, module, WINDOW_KINDS)},
                window=module.window_size,
                attention_dropout=module.attn_drop,
            )
            for name, module in self._all(WindowAttention)
        ] + [RegularLayer(name, module) for name, module in self._all(RegularSelfAttention)]


def _drawn(name: str, parameter: nn.Parameter, kind: Any) -> Position:
    return Position((name,), (parameter,), kind, lambda: [trunc_normal_(torch.empty(parameter.shape), std=0.02)])


def host(name: str, module: nn.Module) -> Host | None:
    """The host of one of our networks; None for any other module."""
    for kind, own in ((ColumnarTransformer, ColumnarHost), (PoolingTransformer, PitHost), (SwinTransformer, SwinHost)):
        if isinstance(module, kind):
            return own(name, module)
    return None
