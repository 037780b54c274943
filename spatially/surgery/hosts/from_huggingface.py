"""Hugging Face's ViT, DeiT, BEiT and Swin, as transformers 5 has them."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn
from transformers.models.beit.modeling_beit import BeitAttention, BeitModel, BeitRelativePositionBias
from transformers.models.deit.modeling_deit import DeiTAttention, DeiTModel
from transformers.models.swin.modeling_swin import SwinAttention, SwinLayer, SwinModel, SwinRelativePositionBias
from transformers.models.vit.modeling_vit import ViTAttention, ViTModel

from spatially.errors import UserError
from spatially.surgery.grid import Grid, joined
from spatially.surgery.hosts.base import BiasPlace, Host, Position, WindowLayer, changed_kind, joined_name
from spatially.surgery.windows import Parts, Windows, attend_to_squares, pair_bias, square_bias


class _Masked(nn.Module):
    """The bias joins whatever mask the layer is given: masks, and BEiT's own positions."""

    gaussian_bias: Any
    grid: Grid

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, **others: Any) -> Any:
        bias = self.grid.bias(self.gaussian_bias, hidden_states.shape[1])[None].to(hidden_states.dtype)
        return super().forward(hidden_states, attention_mask=joined(attention_mask, bias), **others)


class BiasedViTAttention(_Masked, ViTAttention):
    """`ViTAttention` with a Gaussian bias."""


class BiasedDeiTAttention(_Masked, DeiTAttention):
    """`DeiTAttention` with a Gaussian bias."""


class BiasedBeitAttention(_Masked, BeitAttention):
    """`BeitAttention` with a Gaussian bias."""


class ChangedSwinRelativePositionBias(SwinRelativePositionBias):
    """A window's bias with or without its table, with or without a Gaussian bias."""

    def forward(self) -> Tensor:
        table = None if self.relative_position_bias_table is None else super().forward()
        return pair_bias(table, self, self.window_size)


class Part(nn.Module):
    """Stands for the projection to queries (0), keys (1) or values (2) where the input holds all three already."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.chunk(3, -1)[self.number]


class ChangedSwinLayer(SwinLayer):
    """Projects the whole map first, and attends within windows or over squares."""

    def forward(
        self, hidden_states: Tensor, input_dimensions: tuple[int, int], always_partition: bool = False, **others: Any
    ) -> tuple[Tensor, Tensor | None]:
        maps = self.layernorm_before(hidden_states).unflatten(1, tuple(input_dimensions))
        if getattr(self, "receptive_field", None):
            attended, weights = self._squares(maps), None
        else:
            if not always_partition:
                self.set_shift_and_window_size(input_dimensions)
            attended, weights = self._windows(maps, **others)
        hidden_states = hidden_states + self.drop_path(self.dropout(attended).flatten(1, 2))
        return hidden_states + self.dropout(self.mlp(self.layernorm_after(hidden_states))), weights

    def _parts(self, maps: Tensor) -> Parts:
        attention = self.attention
        if (projection := getattr(attention, "qkv", None)) is not None:
            return projection(maps)
        return attention.q_proj(maps), attention.k_proj(maps), attention.v_proj(maps)

    def _squares(self, maps: Tensor) -> Tensor:
        attention, owner = self.attention, self.attention.relative_position_bias
        heads, field = attention.num_attention_heads, self.receptive_field
        bias = square_bias(owner, heads=heads, own_window=owner.window_size, window=field[0])
        out = attend_to_squares(self._parts(maps), heads=heads, field=field, bias=bias, scale=attention.scaling)
        return attention.o_proj(out)

    def _windows(self, maps: Tensor, **others: Any) -> tuple[Tensor, Tensor | None]:
        size, window, shift = (maps.shape[1], maps.shape[2]), (self.window_size,) * 2, (self.shift_size,) * 2
        windows = Windows(size, window, shift, pad_first=True)
        cut = windows.cut(self._parts(maps), nothing=self.attention.qkv.of_nothing())
        mask = windows.mask(maps)
        # A mask of its own dtype even where there is nothing to mask: the bias alone may have none.
        mask = maps.new_zeros(1, cut.shape[1], cut.shape[1]) if mask is None else mask[:, 0]
        attended, weights = self.attention(cut, mask, **others)
        return windows.join(attended), weights


TOKEN_KINDS: dict[type[nn.Module], type[nn.Module]] = {
    ViTAttention: BiasedViTAttention,
    DeiTAttention: BiasedDeiTAttention,
    BeitAttention: BiasedBeitAttention,
}
TABLE_KINDS: dict[type[nn.Module], type[nn.Module]] = {SwinRelativePositionBias: ChangedSwinRelativePositionBias}
LAYER_KINDS: dict[type[nn.Module], type[nn.Module]] = {SwinLayer: ChangedSwinLayer}
PREFIX: dict[type[nn.Module], int] = {ViTModel: 1, DeiTModel: 2, BeitModel: 1}
WITH_MASK = ("eager", "sdpa")


class HuggingFaceHost(Host):
    """What these families have in common."""

    trunk: Any

    @property
    def prefix(self) -> int:
        return next((count for kind, count in PREFIX.items() if isinstance(self.trunk, kind)), 0)

    def bias_places(self) -> list[BiasPlace]:
        if (way := self.trunk.config._attn_implementation) not in WITH_MASK:
            raise UserError(
                f"attention {way!r} takes no bias: call model.set_attn_implementation with {' or '.join(WITH_MASK)}"
            )
        stem = self.trunk.embeddings.patch_embeddings.projection
        return [
            BiasPlace(name, module, module.num_attention_heads, changed_kind(name, module, TOKEN_KINDS), stem)
            for name, module in self._all(*TOKEN_KINDS)
        ]

    def _all(self, *kinds: type[nn.Module]) -> Iterator[tuple[str, Any]]:
        for name, module in self.trunk.named_modules(prefix=self.name):
            if isinstance(module, kinds):
                yield name, module

    def positions(self) -> list[Position]:
        found = [
            self._position(name, module, "relative_position_bias_table")
            for name, module in self._all(BeitRelativePositionBias, SwinRelativePositionBias)
            if module.relative_position_bias_table is not None
        ]
        embeddings = self.trunk.embeddings
        if embeddings.position_embeddings is not None:
            found.insert(0, self._position(joined_name(self.name, "embeddings"), embeddings, "position_embeddings"))
        return found

    def _position(self, name: str, owner: nn.Module, own: str) -> Position:
        kind = "absolute" if own == "position_embeddings" else "relative"
        return Position((f"{name}.{own}",), (owner.get_parameter(own),), kind, self._fresh(owner, own))  # type: ignore[arg-type]

    def _fresh(self, owner: nn.Module, own: str) -> Callable[[], list[Tensor]]:
        def fresh() -> list[Tensor]:
            # The model initialises a copy, so the draw follows its own rule and its configuration.
            spare = copy.deepcopy(owner).cpu()
            self.trunk._init_weights(spare)
            return [spare.get_parameter(own).detach()]

        return fresh


class SwinHost(HuggingFaceHost):
    """Swin, the first version."""

    def bias_places(self) -> list[BiasPlace]:
        places = []
        for name, layer in self._all(SwinLayer):
            attention, path = layer.attention, f"{name}.attention.relative_position_bias"
            kind = changed_kind(path, attention.relative_position_bias, TABLE_KINDS)
            heads = attention.num_attention_heads
            places.append(BiasPlace(path, attention.relative_position_bias, heads, kind))
        return places

    def window_layers(self) -> list[WindowLayer]:
        found = []
        for name, layer in self._all(SwinLayer):
            attention: SwinAttention = layer.attention
            owner = attention.relative_position_bias
            kinds = {layer: LAYER_KINDS, owner: TABLE_KINDS}
            found.append(
                WindowLayer(
                    name=f"{name}.attention",
                    block=layer,
                    attention=attention,
                    table_owner=owner,
                    kinds={part: changed_kind(name, part, known) for part, known in kinds.items()},
                    window=owner.window_size,
                    attention_dropout=attention.attention_dropout,
                    linears=("q_proj", "k_proj", "v_proj"),
                    placeholders={"q_proj": Part(0), "k_proj": Part(1), "v_proj": Part(2)},
                )
            )
        return found


def host(name: str, module: nn.Module) -> Host | None:
    """The host of a Hugging Face network; None for any other module."""
    if isinstance(module, SwinModel):
        return SwinHost(name, module)
    return HuggingFaceHost(name, module) if isinstance(module, tuple(PREFIX)) else None
