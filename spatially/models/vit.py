r"""ViTs with relative positions, plain and with Gaussian attention bias (Kim et al., sections 3 and 4).

Every layer l attends with

.. math:: \mathrm{softmax}\left(\frac{QK^\top}{\sqrt{D}} + B_{\mathrm{rel},l} + B_{\mathrm{Gaussian},l}\right) V,

no class token, no absolute positions, mean over the patches before the head. `vit_*_relposmlp` has a small network for
the relative bias and timm's `vit_relpos_*_patch16_224` as its peer (weights load as they are), `vit_*_relposbias` a
table; a name that ends in `_gab` has the Gaussian bias, two parameters a layer, at `blocks.N.attn.gaussian_bias`.

`ColumnarTransformer` is what these and the convolutional ViT share: patches, blocks of one width, a head, for any image
whose sides are multiples of the patch. Tokens are (batch, height·width, channels), and every block is told the grid.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from timm.data import IMAGENET_INCEPTION_MEAN, IMAGENET_INCEPTION_STD
from timm.layers import (
    DropPath,
    LayerScale,
    Mlp,
    PatchEmbed,
    calculate_drop_path_rates,
    resample_patch_embed,
    to_2tuple,
    trunc_normal_,
)
from timm.models._features import feature_take_indices
from timm.models._manipulate import checkpoint
from torch import Tensor, nn

from spatially.errors import UserError, unknown
from spatially.models.registry import check_images, dtype_of, register
from spatially.models.weights import StateDict, source_grid, unwrap
from spatially.nn.check import whole
from spatially.nn.gaussian_bias import GaussianBias
from spatially.nn.relative_position import Grid, RelPosBias, RelPosMlp, pairs, resize_table
from spatially.nn.resize import resize

NORM_EPSILON = 1e-6  # of every layer normalisation, as in timm
Size = int | tuple[int, int]
Shared = tuple[Tensor | None, Tensor | None] | None


class Attention(nn.Module):
    """Self-attention of all patches with all patches; a child may add a bias, or attend in its own way."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        qkv_bias: bool,
        attn_drop: float,
        proj_drop: float,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if num_heads < 1 or dim % num_heads:
            raise UserError(f"embed_dim must be a multiple of num_heads: got {dim} and {num_heads}")
        self.num_heads = num_heads
        self.fused_attn = True  # False: the attention itself passes through `attn_drop`, where a hook can read it
        self.qkv = nn.Linear(dim, 3 * dim, bias=qkv_bias, device=device, dtype=dtype)
        self.attn_drop = nn.Dropout(attn_drop)
        self.proj = nn.Linear(dim, dim, device=device, dtype=dtype)
        self.proj_drop = nn.Dropout(proj_drop)

    def share(self, grid: Grid) -> Shared:
        """What depends on the grid alone, to be worked out once for all layers."""
        return None

    def forward(self, x: Tensor, grid: Grid, shared: Shared = None) -> Tensor:
        """Tokens to tokens, (batch, height·width, channels)."""
        batch, tokens, width = x.shape
        packed = self.qkv(x).reshape(batch, *grid, 3, self.num_heads, width // self.num_heads)
        attended = self.attend(packed, shared)
        if torch.compiler.is_exporting():  # a kernel's layout may be another where the graph will run
            attended = attended.clone(memory_format=torch.contiguous_format)
        return self.proj_drop(self.proj(attended.reshape(batch, tokens, width)))

    def attend(self, packed: Tensor, shared: Shared = None) -> Tensor:
        """From (batch, height, width, 3, heads, channels of a head) to the same without the 3."""
        return self.attend_densely(*packed.unbind(3), bias=None)

    def attend_densely(self, q: Tensor, k: Tensor, v: Tensor, *, bias: Tensor | None) -> Tensor:
        """Every query with every key, through torch's fused kernels unless somebody wants to see the attention."""
        grid = q.shape[1:3]
        q, k, v = (maps.flatten(1, 2).transpose(1, 2) for maps in (q, k, v))  # (batch, heads, height·width, channels)
        mask = None if bias is None else bias[None].to(q.dtype)
        if self.fused_attn:
            dropout = self.attn_drop.p if self.training else 0.0
            x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout)
        else:
            logits = (q * q.shape[-1] ** -0.5) @ k.mT
            x = self.attn_drop((logits if mask is None else logits + mask).softmax(-1)) @ v
        return x.transpose(1, 2).unflatten(1, grid)


class RelativeAttention(Attention):
    """Attention with a bias of its own for every offset, and with the Gaussian bias beside it where there is one."""

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        rel_pos: Callable[..., RelPosMlp | RelPosBias],
        gaussian_bias: bool,
        per_head: bool,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dim, num_heads, device=device, dtype=dtype, **options)
        self.rel_pos = rel_pos(num_heads, device=device, dtype=dtype)
        self.gaussian_bias = (
            GaussianBias(num_heads, per_head=per_head, device=device, dtype=dtype) if gaussian_bias else None
        )

    def share(self, grid: Grid) -> Shared:
        """The offsets of the grid as both biases want them."""
        return self.rel_pos.share(grid), None if self.gaussian_bias is None else self.gaussian_bias.share(grid)

    def attend(self, packed: Tensor, shared: Shared = None) -> Tensor:
        """From (batch, height, width, 3, heads, channels of a head) to the same without the 3."""
        grid = (packed.shape[1], packed.shape[2])
        return self.attend_densely(*packed.unbind(3), bias=self.bias(grid, shared))

    def bias(self, grid: Grid, shared: Shared = None) -> Tensor:
        """The sum of both biases: (heads, height·width, height·width)."""
        relative, gaussian = shared or (None, None)
        table = self.rel_pos.table(grid, shared=relative)
        if self.gaussian_bias is not None:  # a sum of tables, not of all their pairs, costs next to nothing
            table = table + self.gaussian_bias.table(grid, shared=gaussian)
        return pairs(table)


class Block(nn.Module):
    """Attention and a two-layer network, each after a normalisation and beside a shortcut."""

    def __init__(
        self,
        dim: int,
        *,
        attention: Callable[..., Attention],
        mlp_ratio: float,
        init_values: float | None,
        proj_drop: float,
        drop_path: float,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def scale() -> nn.Module:
            return LayerScale(dim, init_values, device=device, dtype=dtype) if init_values else nn.Identity()

        def norm() -> nn.Module:
            return nn.LayerNorm(dim, eps=NORM_EPSILON, device=device, dtype=dtype)

        self.norm1 = norm()
        self.attn = attention(dim, proj_drop=proj_drop, device=device, dtype=dtype)
        self.ls1 = scale()
        self.drop_path1 = DropPath(drop_path) if drop_path > 0 else nn.Identity()
        self.norm2 = norm()
        self.mlp = Mlp(dim, int(dim * mlp_ratio), drop=proj_drop, device=device, dtype=dtype)
        self.ls2 = scale()
        self.drop_path2 = DropPath(drop_path) if drop_path > 0 else nn.Identity()

    def forward(self, x: Tensor, grid: Grid, shared: Shared = None) -> Tensor:
        """Tokens to tokens, (batch, height·width, channels)."""
        x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), grid, shared)))
        return x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))


class ColumnarTransformer(nn.Module):
    """Patches, blocks of one width, normalisation, mean over the patches, linear head; any grid at any time."""

    num_prefix_tokens = 0

    def __init__(
        self,
        *,
        attention: Callable[..., Attention],
        absolute_positions: bool,
        img_size: Size = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: Literal["avg", ""] = "avg",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        init_values: float | None = None,
        fc_norm: bool = False,
        drop_rate: float = 0.0,
        pos_drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        whole("depth", depth)
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.num_classes, self.in_chans, self.global_pool = num_classes, in_chans, _pool(global_pool)
        self.num_features = self.head_hidden_size = self.embed_dim = embed_dim
        self.grad_checkpointing = False
        self.patch_size = patch_size

        self.grid = grid_of(img_size, patch_size)
        self.patch_embed = PatchEmbed(img_size, patch_size, in_chans, embed_dim, strict_img_size=False, **place)
        self.pos_embed = None
        if absolute_positions:
            self.pos_embed = nn.Parameter(torch.empty(1, self.grid[0] * self.grid[1], embed_dim, **place))
            trunc_normal_(self.pos_embed, std=0.02)
        self.pos_drop = nn.Dropout(pos_drop_rate)

        attention = partial(attention, num_heads=num_heads, qkv_bias=qkv_bias, attn_drop=attn_drop_rate)
        self.blocks = nn.ModuleList(
            Block(
                embed_dim,
                attention=attention,
                mlp_ratio=mlp_ratio,
                init_values=init_values,
                proj_drop=proj_drop_rate,
                drop_path=rate,
                **place,
            )
            for rate in calculate_drop_path_rates(drop_path_rate, depth)
        )
        self.feature_info = [
            {"num_chs": embed_dim, "reduction": patch_size, "module": f"blocks.{number}"} for number in range(depth)
        ]

        def norm(here: bool) -> nn.Module:
            return nn.LayerNorm(embed_dim, eps=NORM_EPSILON, **place) if here else nn.Identity()

        self.norm, self.fc_norm = norm(not fc_norm), norm(fc_norm)  # before the mean over the patches, or after it
        self.head_drop = nn.Dropout(drop_rate)
        self.head = self._new_head()

    def _new_head(self) -> nn.Module:
        if self.num_classes <= 0:
            return nn.Identity()
        like = self.patch_embed.proj.weight
        return nn.Linear(self.embed_dim, self.num_classes, device=like.device, dtype=like.dtype)

    def no_weight_decay(self) -> set[str]:
        """Positions: embeddings, tables, and the two parameters of each Gaussian."""
        ends = ("pos_embed", "relative_position_bias_table", "gaussian_bias.amplitude", "gaussian_bias.sigma")
        return {name for name, _ in self.named_parameters() if name.endswith(ends)}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """timm's layer groups: the stem, each block, what follows with the last."""
        return {"stem": r"^pos_embed|^patch_embed", "blocks": [(r"^blocks\.(\d+)", None), (r"^(?:fc_)?norm", (99999,))]}

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Whether the backward pass computes each block again instead of keeping its activations."""
        self.grad_checkpointing = enable

    def get_classifier(self) -> nn.Module:
        """The last layer."""
        return self.head

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new last layer, none for 0 classes."""
        self.num_classes = num_classes
        if global_pool is not None:
            self.global_pool = _pool(global_pool)
        self.head = self._new_head().train(self.training)

    def _embed(self, images: Tensor) -> tuple[Tensor, Grid, Shared]:
        size, dtype = self.patch_size, dtype_of(self.patch_embed)
        check_images(images, channels=self.in_chans, smallest=size, multiple=size, dtype=dtype)
        grid = (images.shape[-2] // self.patch_size, images.shape[-1] // self.patch_size)
        # Contiguous once, or every normalisation of the stream would make its own copy.
        x = self.patch_embed(images).contiguous()
        if self.pos_embed is not None:
            positions: Tensor = self.pos_embed
            if grid != self.grid:
                table = positions.mT.unflatten(-1, self.grid)
                positions = resize(table, grid, antialias=True).flatten(-2).mT
            x = x + positions
        first: Any = self.blocks[0]
        return self.pos_drop(x), grid, first.attn.share(grid)

    def _through(self, block: nn.Module, *inputs: Any) -> Tensor:
        return checkpoint(block, *inputs) if self.grad_checkpointing else block(*inputs)

    def forward_features(self, x: Tensor) -> Tensor:
        """Images to the last tokens, (batch, height·width, channels)."""
        x, grid, shared = self._embed(x)
        for block in self.blocks:
            x = self._through(block, x, grid, shared)
        return self.norm(x)

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """The last tokens to logits, or to what the last layer sees."""
        if self.global_pool:
            x = x.mean(1)
        x = self.head_drop(self.fc_norm(x))
        return x if pre_logits else self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        """Images to logits."""
        return self.forward_head(self.forward_features(x))

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | Sequence[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The maps after the blocks of these `indices` (the last so many for a number), and the last tokens first."""
        if output_fmt not in ("NCHW", "NLC"):
            raise unknown("output_fmt", str(output_fmt), ["NCHW", "NLC"])
        wanted, last = feature_take_indices(len(self.blocks), indices)
        x, grid, shared = self._embed(x)
        found = []
        for number, block in enumerate(self.blocks[: last + 1] if stop_early else self.blocks):
            x = self._through(block, x, grid, shared)
            if number in wanted:
                found.append(self.norm(x) if norm else x)
        if output_fmt == "NCHW":
            found = [tokens.unflatten(1, grid).permute(0, 3, 1, 2).contiguous() for tokens in found]
        return found if intermediates_only else (self.norm(x), found)

    def prune_intermediate_layers(
        self, indices: int | Sequence[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what these intermediates do not need; the indices, counted from the first block."""
        wanted, last = feature_take_indices(len(self.blocks), indices)
        self.blocks = self.blocks[: last + 1]
        if prune_norm:
            self.norm = nn.Identity()
        if prune_head:
            self.fc_norm = nn.Identity()
            self.reset_classifier(0, "")
        return wanted


class RelativeTransformer(ColumnarTransformer):
    """ViT with relative positions: `rel_pos` is "mlp" or "bias"; `gaussian_bias` adds Kim et al.'s in every layer."""

    def __init__(
        self,
        *,
        rel_pos: Literal["mlp", "bias"] = "mlp",
        gaussian_bias: bool = False,
        per_head: bool = False,
        img_size: Size = 224,
        patch_size: int = 16,
        **options: Any,
    ) -> None:
        if rel_pos not in ("mlp", "bias"):
            raise unknown("rel_pos", rel_pos, ["mlp", "bias"])
        kind = RelPosMlp if rel_pos == "mlp" else partial(RelPosBias, grid=grid_of(img_size, patch_size))
        super().__init__(
            attention=partial(RelativeAttention, rel_pos=kind, gaussian_bias=gaussian_bias, per_head=per_head),
            absolute_positions=False,
            img_size=img_size,
            patch_size=patch_size,
            **options,
        )


def grid_of(img_size: Size, patch_size: int) -> Grid:
    """How many patches an image has, down and across."""
    height, width = to_2tuple(img_size)
    if patch_size < 1 or min(height, width) < patch_size or height % patch_size or width % patch_size:
        raise UserError(f"img_size must be a multiple of the patch size {patch_size}: got {height}×{width}")
    return height // patch_size, width // patch_size


def _pool(name: str) -> str:
    if name not in ("avg", ""):
        raise UserError(f"global_pool must be 'avg' or '' (none): got {name!r}")
    return name


def fit_patches(state_dict: StateDict, model: nn.Module) -> None:
    """Resize the patch embedding's weight, in place, to the model's patches."""
    weight = state_dict.get("patch_embed.proj.weight")
    size = model.get_submodule("patch_embed.proj").kernel_size
    if weight is not None and weight.shape[-2:] != size:
        state_dict["patch_embed.proj.weight"] = resample_patch_embed(weight, list(size))  # type: ignore[arg-type]


def checkpoint_filter(state_dict: StateDict, model: nn.Module) -> StateDict:
    """timm's weights, or ours: tables are resized to the model's grid, a Gaussian that they lack stays as it is.

    A table whose number of rows a square grid has is taken for that grid's, also where it fits the model's own, which is
    not square (8×8 and 5×13 both have 225): see `weights.source_grid`.
    """
    weights = unwrap(state_dict)
    fit_patches(weights, model)
    for name in list(weights):
        if name.endswith(("relative_position_index", "rel_coords_log")):
            del weights[name]  # buffers of older versions of timm: they follow from the grid
        elif name.endswith("relative_position_bias_table"):
            weights[name] = _fit_table(weights[name], model.grid)  # type: ignore[arg-type]
    for name, value in model.state_dict().items():
        if ".gaussian_bias." in name:
            weights.setdefault(name, value)
    return weights


def _fit_table(table: Tensor, grid: Grid) -> Tensor:
    plane = (2 * grid[0] - 1, 2 * grid[1] - 1)
    source = source_grid(len(table), plane)
    if source is None:
        raise UserError(
            f"a position table of {len(table)} rows is of no square grid: build the model with its img_size"
        )
    if source == plane:
        return table
    return resize_table(table.mT.reshape(-1, *source), grid).flatten(1).mT.contiguous()


_SIZES = {"small": (384, 6), "medium": (512, 8), "base": (768, 12)}
_KINDS = {"mlp": "a network", "bias": "a table"}

for _size, (_width, _heads) in _SIZES.items():
    for _kind, _text in _KINDS.items():
        for _gaussian in (False, True):
            register(
                f"vit_{_size}_relpos{_kind}" + ("_gab" if _gaussian else ""),
                RelativeTransformer,
                module=__name__,
                paper="kim",
                what=f"ViT-{_size[0].upper()}/16, relative positions from {_text}"
                + (", with Gaussian attention bias" if _gaussian else ""),
                options={
                    "rel_pos": _kind,
                    "gaussian_bias": _gaussian,
                    "embed_dim": _width,
                    "num_heads": _heads,
                    "qkv_bias": False,
                    "init_values": 1e-6,
                    "fc_norm": True,
                },
                checkpoint_filter=checkpoint_filter,
                out_indices=3,  # of the last blocks, as timm has it
                first_conv="patch_embed.proj",
                classifier="head",
                # As timm's weights for these models want their images.
                mean=IMAGENET_INCEPTION_MEAN,
                std=IMAGENET_INCEPTION_STD,
            )
