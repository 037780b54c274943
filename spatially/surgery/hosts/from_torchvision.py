"""torchvision's ViT and Swin."""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.models.swin_transformer import ShiftedWindowAttention, SwinTransformer
from torchvision.models.vision_transformer import VisionTransformer

from spatially.nn.conv_projection import ConvProjection
from spatially.surgery.grid import Grid
from spatially.surgery.hosts.base import BiasPlace, Host, Position, WindowLayer, changed_kind, joined_name
from spatially.surgery.windows import (
    Parts,
    Windows,
    attend_to_squares,
    attend_to_windows,
    pair_bias,
    project,
    square_bias,
)


class BiasedMultiheadAttention(nn.MultiheadAttention):
    """The bias as mask, without torch's shortcut for inference, through which no gradient reaches a mask."""

    gaussian_bias: Any
    grid: Grid

    def forward(self, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        batch, tokens, _ = query.shape
        bias = self.grid.bias(self.gaussian_bias, tokens).to(query.dtype)
        mask = bias.expand(self.num_heads, -1, -1).repeat(batch, 1, 1)  # (batch·heads, tokens, tokens)
        out, weights = F.multi_head_attention_forward(
            query.transpose(0, 1),
            key.transpose(0, 1),
            value.transpose(0, 1),
            self.embed_dim,
            self.num_heads,
            self.in_proj_weight,
            self.in_proj_bias,
            self.bias_k,
            self.bias_v,
            self.add_zero_attn,
            self.dropout,
            self.out_proj.weight,
            self.out_proj.bias,
            training=self.training,
            need_weights=options.get("need_weights", True),
            attn_mask=mask,
            average_attn_weights=options.get("average_attn_weights", True),
        )
        return out.transpose(0, 1), weights


class ChangedShiftedWindowAttention(ShiftedWindowAttention):
    """Window attention with or without its table, with a Gaussian bias, a projection of its own, or squares."""

    def get_relative_position_bias(self) -> Tensor:
        table = None if self.relative_position_bias_table is None else super().get_relative_position_bias()
        return pair_bias(table, self, (self.window_size[0], self.window_size[1]))

    def forward(self, x: Tensor) -> Tensor:
        field = getattr(self, "receptive_field", None)
        if field is None and not isinstance(self.qkv, ConvProjection):
            return super().forward(x)
        parts = project(self.qkv, x)
        out = self._windows(parts) if field is None else self._squares(parts, field)
        return F.dropout(self.proj(out), p=self.dropout, training=self.training)

    def _squares(self, parts: Parts, field: tuple[int, str]) -> Tensor:
        own = (self.window_size[0], self.window_size[1])
        bias = square_bias(self, heads=self.num_heads, own_window=own, window=field[0])
        return attend_to_squares(parts, heads=self.num_heads, field=field, bias=bias, scale=self._scale())

    def _windows(self, parts: Parts) -> Tensor:
        height, width = parts[0].shape[1:3]
        rows, columns = self.window_size
        shift = (0 if rows >= height else self.shift_size[0], 0 if columns >= width else self.shift_size[1])
        windows = Windows((height, width), (rows, columns), shift, pad_first=True)
        out = attend_to_windows(
            windows.cut(parts, nothing=self.qkv.of_nothing()),
            heads=self.num_heads,
            bias=self.get_relative_position_bias(),
            mask=windows.mask(parts[0]),
            dropout=partial(F.dropout, p=self.attention_dropout, training=self.training),
            scale=self._scale(),
        )
        return windows.join(out)

    def _scale(self) -> float:
        return float((self.proj.in_features // self.num_heads) ** -0.5)


TOKEN_KINDS: dict[type[nn.Module], type[nn.Module]] = {nn.MultiheadAttention: BiasedMultiheadAttention}
WINDOW_KINDS: dict[type[nn.Module], type[nn.Module]] = {ShiftedWindowAttention: ChangedShiftedWindowAttention}


class VitHost(Host):
    """`vit_*`: a class token, absolute positions."""

    trunk: Any

    @property
    def prefix(self) -> int:
        return 1

    def bias_places(self) -> list[BiasPlace]:
        return [
            BiasPlace(name, module, module.num_heads, changed_kind(name, module, TOKEN_KINDS), self.trunk.conv_proj)
            for name, module in self.trunk.named_modules(prefix=self.name)
            if isinstance(module, nn.MultiheadAttention)
        ]

    def positions(self) -> list[Position]:
        table: nn.Parameter = self.trunk.encoder.pos_embedding
        name = joined_name(self.name, "encoder.pos_embedding")
        return [Position((name,), (table,), "absolute", lambda: [torch.empty(table.shape).normal_(std=0.02)])]


class SwinHost(Host):
    """`swin_*`, the first version."""

    def _attentions(self) -> list[tuple[str, ShiftedWindowAttention]]:
        modules = self.trunk.named_modules(prefix=self.name)
        found = [(name, module) for name, module in modules if isinstance(module, ShiftedWindowAttention)]
        for name, module in found:
            changed_kind(name, module, WINDOW_KINDS)  # the second version's attention is a subclass, and another thing
        return found

    def bias_places(self) -> list[BiasPlace]:
        return [
            BiasPlace(name, module, module.num_heads, changed_kind(name, module, WINDOW_KINDS))
            for name, module in self._attentions()
        ]

    def positions(self) -> list[Position]:
        return [
            _table(f"{name}.relative_position_bias_table", module.relative_position_bias_table)
            for name, module in self._attentions()
            if module.relative_position_bias_table is not None
        ]

    def window_layers(self) -> list[WindowLayer]:
        return [
            WindowLayer(
                name=name,
                block=module,
                attention=module,
                table_owner=module,
                kinds={module: changed_kind(name, module, WINDOW_KINDS)},
                window=(module.window_size[0], module.window_size[1]),
                attention_dropout=module.attention_dropout,
            )
            for name, module in self._attentions()
        ]


def _table(name: str, table: nn.Parameter) -> Position:
    return Position((name,), (table,), "relative", lambda: [nn.init.trunc_normal_(torch.empty(table.shape), std=0.02)])


def host(name: str, module: nn.Module) -> Host | None:
    """The host of a torchvision network; None for any other module."""
    if isinstance(module, VisionTransformer):
        return VitHost(name, module)
    return SwinHost(name, module) if isinstance(module, SwinTransformer) else None
