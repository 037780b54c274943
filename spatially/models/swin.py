r"""Swin Transformers that see structure, beside the plain one (Xu et al., sections 5 and 6; Kim et al., section 4).

Each layer computes, over the points m that the query n sees,

.. math:: \sum_m \mathrm{softmax}_m\left(\frac{q_n \cdot k_m}{\sqrt d} + b_{nm}\right) v_m .

| name               | n sees                     | q, k, v                        | b                       |
|--------------------|----------------------------|--------------------------------|-------------------------|
| `swin_tiny`        | its (shifted) 7×7 window   | linear                         | table of offsets        |
| `swin_tiny_key`    | its (shifted) 7×7 window   | one of them a 3×3 convolution  | none                    |
| `swin_tiny_r`      | the 7×7 square around it   | linear                         | none                    |
| `swin_tiny_m`      | the 7×7 square around it   | the key a 3×3 convolution      | none                    |
| `swin_tiny_gab`    | its (shifted) 7×7 window   | linear                         | table + Gaussian        |

`_query` and `_value` are like `_key`; `_dw` is depth-wise. Weights are named as in timm's `swin_*`, and load from there.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.layers import (
    ClassifierHead,
    DropPath,
    Mlp,
    PatchEmbed,
    calculate_drop_path_rates,
    to_2tuple,
    trunc_normal_,
)
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.models.registry import check_images, dtype_of, register
from spatially.models.swin_weights import checkpoint_filter
from spatially.nn.check import odd, whole
from spatially.nn.conv_projection import PARTS
from spatially.nn.gaussian_bias import GaussianBias, Grid
from spatially.nn.regular_attention import BORDERS
from spatially.nn.regular_self_attention import Border, RegularSelfAttention
from spatially.nn.window_attention import WindowAttention, neighbour_mask, offset_index

Attention = Literal["window", "regular"]
POOLS = ("avg", "")


class Block(nn.Module):
    """Attention and a two-layer perceptron, each with its norm, around the residual stream."""

    def __init__(
        self,
        dim: int,
        attention: WindowAttention | RegularSelfAttention,
        *,
        mlp_ratio: float,
        proj_drop: float,
        drop_path: float,
        device: torch.device | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.attn = attention
        self.drop_path1 = DropPath(drop_path) if drop_path else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, device=device, dtype=dtype)
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop, device=device, dtype=dtype)
        self.drop_path2 = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, **shared: Tensor | None) -> Tensor:
        """(B, H, W, C) → the same; `shared` is what the layers of a stage have in common."""
        x = x + self.drop_path1(self.attn(self.norm1(x), **shared))
        return x + self.drop_path2(self.mlp(self.norm2(x)))


class PatchMerging(nn.Module):
    """Four neighbours become one point of twice the channels; an odd grid is filled up with 0."""

    def __init__(self, dim: int, *, device: torch.device | None, dtype: torch.dtype | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * dim, device=device, dtype=dtype)
        self.reduction = nn.Linear(4 * dim, 2 * dim, bias=False, device=device, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) → (B, ⌈H/2⌉, ⌈W/2⌉, 2C)."""
        down, right = x.shape[1] % 2, x.shape[2] % 2
        if down or right:
            x = F.pad(x, (0, 0, 0, right, 0, down))
        batch, height, width, dim = x.shape
        # Column by column inside the four: the order that released weights were trained with.
        x = x.view(batch, height // 2, 2, width // 2, 2, dim).permute(0, 1, 3, 4, 2, 5).flatten(3)
        return self.reduction(self.norm(x))


class Stage(nn.Module):
    """Blocks on one grid, after halving it (but for the first)."""

    def __init__(self, blocks: Sequence[Block], downsample: PatchMerging | None) -> None:
        super().__init__()
        self.grad_checkpointing = False
        self.downsample = downsample or nn.Identity()
        self.blocks = nn.Sequential(*blocks)

    def forward(self, x: Tensor) -> Tensor:
        """(B, H, W, C) → the stage's map."""
        x = self.downsample(x)
        index, masks = self._shared(x)
        for block in self.blocks:
            shared = {}
            if isinstance(block.attn, WindowAttention):
                shared = {"index": index, "mask": masks.get(block.attn.shift_size)}
            x = checkpoint(block, x, **shared) if self.grad_checkpointing else block(x, **shared)
        return x

    def _shared(self, x: Tensor) -> tuple[Tensor | None, dict[Grid, Tensor]]:
        """What all window layers of this grid need, made once: the rows of their tables, and the masks by shift."""
        layers = [block.attn for block in self.blocks if isinstance(block.attn, WindowAttention)]
        index = None
        if any(layer.relative_position_bias_table is not None for layer in layers):
            index = offset_index(layers[0].window_size, device=x.device)
        masks = {
            shift: neighbour_mask((x.shape[1], x.shape[2]), window, shift, device=x.device, dtype=x.dtype)
            for window, shift in dict.fromkeys((layer.window_size, layer.shift_size) for layer in layers)
            if any(shift)
        }
        return index, masks


class SwinTransformer(nn.Module):
    """A hierarchy of stages on grids of 1/4, 1/8, 1/16 and 1/32 of the image; any image with sides that are multiples of 4.

    `img_size` decides, as in timm, where a stage's grid is not larger than the window: there the window is the grid and
    nothing is shifted. Other sizes than `img_size` work at any time with these windows.
    """

    def __init__(
        self,
        img_size: int | Grid = 224,
        patch_size: int = 4,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        *,
        embed_dim: int = 96,
        depths: Sequence[int] = (2, 2, 6, 2),
        num_heads: Sequence[int] = (3, 6, 12, 24),
        attention: Attention = "window",
        convolved: Literal["query", "key", "value"] | None = None,
        depthwise: bool = False,
        qk_norm: bool = False,
        position_table: bool | None = None,
        gaussian_bias: bool = False,
        per_head: bool = False,
        border: Border = "mask",
        window_size: int | Grid = 7,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.1,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        """`position_table` is there by default in windows without a convolution; `per_head` is the Gaussian bias' own.

        `qk_norm` normalises queries and keys beside a convolution, see `ConvProjection`; without it they are the paper's.
        """
        super().__init__()
        if position_table is None:
            position_table = attention == "window" and convolved is None
        _check_options(attention, convolved, depthwise, position_table, border, window_size, attn_drop_rate)
        _check_shape(embed_dim, depths, num_heads)
        _check_head(num_classes, global_pool)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_classes = num_classes
        self.in_chans = in_chans
        self.patch_size = patch_size
        self.global_pool = global_pool
        self.num_features = self.head_hidden_size = embed_dim * 2 ** (len(depths) - 1)
        self.grad_checkpointing = False
        self.patch_embed = PatchEmbed(
            img_size=img_size,
            patch_size=patch_size,
            in_chans=in_chans,
            embed_dim=embed_dim,
            norm_layer=nn.LayerNorm,
            strict_img_size=False,
            output_fmt="NHWC",
            **place,
        )

        def layer(stage: int, number: int) -> WindowAttention | RegularSelfAttention:
            heads, dim = num_heads[stage], embed_dim * 2**stage
            options: dict[str, Any] = {
                "convolved": convolved,
                "depthwise": depthwise,
                "qk_norm": qk_norm,
                "gaussian_bias": GaussianBias(heads, per_head=per_head, **place) if gaussian_bias else None,
                "qkv_bias": qkv_bias,
                "proj_drop": proj_drop_rate,
                **place,
            }
            if attention == "regular":
                return RegularSelfAttention(dim, heads, window_size=to_2tuple(window_size)[0], border=border, **options)
            grid = tuple(max(1, side // 2**stage) for side in self.patch_embed.grid_size)
            window, shift = _window_and_shift(grid, to_2tuple(window_size), shifted=number % 2 == 1)
            return WindowAttention(
                dim,
                heads,
                window_size=window,
                shift_size=shift,
                position_table=position_table,
                attn_drop=attn_drop_rate,
                **options,
            )

        rates = calculate_drop_path_rates(drop_path_rate, depths, stagewise=True)
        stages = []
        self.feature_info = []
        for stage, depth in enumerate(depths):
            dim = embed_dim * 2**stage
            blocks = [
                Block(
                    dim,
                    layer(stage, number),
                    mlp_ratio=mlp_ratio,
                    proj_drop=proj_drop_rate,
                    drop_path=rates[stage][number],
                    **place,
                )
                for number in range(depth)
            ]
            stages.append(Stage(blocks, PatchMerging(dim // 2, **place) if stage else None))
            self.feature_info.append({"num_chs": dim, "reduction": patch_size * 2**stage, "module": f"layers.{stage}"})
        self.layers = nn.Sequential(*stages)
        self.norm: nn.Module = nn.LayerNorm(self.num_features, **place)
        self.head = ClassifierHead(
            self.num_features, num_classes, pool_type=global_pool, drop_rate=drop_rate, input_fmt="NHWC", **place
        )
        self.init_weights()

    def init_weights(self) -> None:
        """Linear layers as Swin draws them; convolutions, which it leaves alone, keep PyTorch's."""
        for module in self.modules():
            if isinstance(module, nn.Linear):
                trunc_normal_(module.weight, std=0.02)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images → the last map after its norm, (B, H/32, W/32, C)."""
        return self.norm(self.layers(self._embed(x)))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The last map → logits, or pooled features."""
        return self.head(x, pre_logits=pre_logits)

    def forward(self, x: Tensor) -> Tensor:
        """Images (B, 3, H, W) → logits (B, classes)."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """The maps of the chosen stages, NCHW, and the last one after its norm (NHWC) unless `intermediates_only`."""
        if output_fmt != "NCHW":
            raise UserError(f"output_fmt must be NCHW: got {output_fmt!r}")
        chosen, last = feature_take_indices(len(self.layers), indices)
        maps = []
        x = self._embed(x)
        for number, stage in enumerate(self.layers[: last + 1] if stop_early else self.layers):
            x = stage(x)
            if number in chosen:
                normed = self.norm(x) if norm and number == len(self.layers) - 1 else x
                maps.append(normed.permute(0, 3, 1, 2))
        if intermediates_only:
            return maps
        # An early stop leaves no last map to normalise: the norm is as wide as the last stage.
        return self.norm(x) if number + 1 == len(self.layers) else x, maps

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the chosen stages' maps do not need; the stages that are left to choose from."""
        chosen, last = feature_take_indices(len(self.layers), indices)
        fewer = last + 1 < len(self.layers)  # norm and head are as wide as the last stage
        self.layers = self.layers[: last + 1]
        if prune_norm or fewer:
            self.norm = nn.Identity()
        if prune_head or fewer:
            self.reset_classifier(0, "")
        return chosen

    def get_classifier(self) -> nn.Module:
        """The last linear layer."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new last layer for `num_classes`, or none for 0."""
        _check_head(num_classes, self.global_pool if global_pool is None else global_pool)
        weight = self.patch_embed.proj.weight
        self.num_classes = num_classes
        self.global_pool = self.global_pool if global_pool is None else global_pool
        self.head.reset(num_classes, pool_type=global_pool, device=weight.device, dtype=weight.dtype)
        self.head.train(self.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute each block again in the backward pass instead of keeping its activations."""
        self.grad_checkpointing = enable
        for stage in self.layers:
            stage.grad_checkpointing = enable  # type: ignore[assignment]

    def no_weight_decay(self) -> set[str]:
        """Position tables and Gaussian biases."""
        endings = ("relative_position_bias_table", "gaussian_bias.amplitude", "gaussian_bias.sigma")
        return {name for name, _ in self.named_parameters() if name.endswith(endings)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameters by depth, for rates that decay from layer to layer."""
        fine = [(r"^layers\.(\d+)\.downsample", (0,)), (r"^layers\.(\d+)\.blocks\.(\d+)", None), (r"^norm", (99999,))]
        return {"stem": r"^patch_embed", "blocks": r"^layers\.(\d+)" if coarse else fine}

    def _embed(self, images: Tensor) -> Tensor:
        size, dtype = self.patch_size, dtype_of(self.patch_embed)
        check_images(images, channels=self.in_chans, smallest=size, multiple=size, dtype=dtype)
        return self.patch_embed(images)


def _window_and_shift(grid: Sequence[int], window: Grid, *, shifted: bool) -> tuple[Grid, Grid]:
    """No window larger than the grid, and no shift along a side that one window covers."""
    sides = [min(side, most) for side, most in zip(grid, window, strict=True)]
    shifts = [most // 2 if shifted and side > most else 0 for side, most in zip(grid, window, strict=True)]
    return (sides[0], sides[1]), (shifts[0], shifts[1])


def _check_options(
    attention: str,
    convolved: str | None,
    depthwise: bool,
    position_table: bool,
    border: str,
    window_size: int | Grid,
    attn_drop_rate: float,
) -> None:
    if attention not in ("window", "regular"):
        raise UserError(f"attention must be 'window' or 'regular': got {attention!r}")
    if convolved is not None and convolved not in PARTS:
        raise UserError(f"convolved must be None or one of {', '.join(PARTS)}: got {convolved!r}")
    if depthwise and convolved is None:
        raise UserError("depthwise needs a convolution: choose convolved='query', 'key' or 'value'")
    if border not in BORDERS:
        raise UserError(f"border must be one of {', '.join(BORDERS)}: got {border!r}")
    sides = to_2tuple(window_size)
    if len(sides) != 2:
        raise UserError(f"window_size must be one number or two: got {window_size}")
    for side in sides:
        (whole if attention == "window" else odd)("window_size", side)
    if attention == "window":
        return
    if sides[0] != sides[1]:
        raise UserError(f"window_size must be one odd number with attention='regular': got {window_size}")
    if position_table:
        raise UserError("position_table is for attention='window': a regular field has none")
    if attn_drop_rate:
        raise UserError(f"attn_drop_rate must be 0 with attention='regular': got {attn_drop_rate}")


def _check_shape(embed_dim: int, depths: Sequence[int], num_heads: Sequence[int]) -> None:
    if len(depths) != len(num_heads) or not depths:
        raise UserError(f"num_heads must have one number a stage, as depths: got {num_heads} and {depths}")
    for stage, heads in enumerate(num_heads):
        if heads < 1 or embed_dim * 2**stage % heads:
            raise UserError(f"num_heads must divide the width {embed_dim * 2**stage} of stage {stage}: got {heads}")


def _check_head(num_classes: int, global_pool: str) -> None:
    if global_pool not in POOLS:
        raise UserError(f"global_pool must be 'avg' or '' (none): got {global_pool!r}")
    if num_classes > 0 and not global_pool:
        raise UserError(f"global_pool must be 'avg' with classes, '' needs num_classes=0: got {num_classes} classes")


SIZES: dict[str, dict[str, Any]] = {
    "tiny": {"embed_dim": 96, "depths": (2, 2, 6, 2), "num_heads": (3, 6, 12, 24)},
    "small": {"embed_dim": 96, "depths": (2, 2, 18, 2), "num_heads": (3, 6, 12, 24)},
    "base": {"embed_dim": 128, "depths": (2, 2, 18, 2), "num_heads": (4, 8, 16, 32)},
}


def _register_family() -> None:
    for size in SIZES:

        def enter(ending: str, what: str, paper: str = "xu", *, base: str = size, **options: Any) -> None:
            register(
                f"swin_{base}{ending}",
                SwinTransformer,
                module=__name__,
                paper=paper,
                what=what,
                options={**SIZES[base], **options},
                checkpoint_filter=checkpoint_filter,
                first_conv="patch_embed.proj",
                classifier="head.fc",
                pool_size=(7, 7),
            )

        enter("", "Swin in shifted 7×7 windows with a position table")
        for part in PARTS:
            enter(f"_{part}", f"Swin with a 3×3 convolution for the {part}, no position table", convolved=part)
            enter(
                f"_{part}_dw",
                f"Swin with a depth-wise 3×3 convolution for the {part}, no position table",
                convolved=part,
                depthwise=True,
            )
        regular: dict[str, Any] = {"attention": "regular"}
        enter("_r", "Swin with every query in the middle of its 7×7 field, no position table", **regular)
        enter("_m", "Swin with centred 7×7 fields and a 3×3 convolution for the key", convolved="key", **regular)
        enter(
            "_m_dw",
            "Swin with centred 7×7 fields and a depth-wise 3×3 convolution for the key",
            convolved="key",
            depthwise=True,
            **regular,
        )
        enter("_gab", "Swin with a Gaussian attention bias beside its position table", "kim", gaussian_bias=True)


_register_family()
