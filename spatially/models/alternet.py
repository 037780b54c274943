r"""AlterNet: a pre-activation ResNet whose stages end in attention (Park & Kim, figure 8).

A stage of :math:`n_1` blocks, :math:`n_2` of them attention, is

.. math:: [\text{conv}]^{\,n_1 - 2 n_2}\;[\text{conv},\ \text{attention}]^{\,n_2}.

A convolution block is `norm → ReLU → convolution`, two 3×3 (18, 34) or 1×1, 3×3, 1×1 with four times the channels outside
(50, 101, 152). An attention block is `norm → GELU → 1×1 → norm → 7×7 windows`: heads of 64, one position table for all of
them, no MLP. Each adds to the residual stream; norms are batch norms. The stem is one bare convolution (ImageNet: 7×7,
stride 2, and a max-pool; CIFAR: 3×3), and the last stage is followed by `norm → ReLU → mean → linear`.

The authors' windows must divide the map; here they need not (see `LocalWindowAttention`).
"""

import re
from collections.abc import Mapping, Sequence
from operator import index
from typing import Any

import torch
from timm.layers import (
    ClassifierHead,
    DropPath,
    calculate_drop_path_rates,
    get_act_layer,
)
from timm.models._features import feature_take_indices
from torch import Tensor, nn

from spatially.errors import UserError, unknown
from spatially.models.checkpointing import checkpoint_blocks
from spatially.models.registry import check_images, dtype_of, register
from spatially.models.weights import StateDict, unwrap
from spatially.nn.local_window_attention import LocalWindowAttention
from spatially.nn.resize import resize

STEMS = ("imagenet", "cifar")
POOLS = ("avg", "max", "avgmax", "catavgmax", "")
EXPANSION = 4  # of a bottleneck: the residual stream has four times its channels


class ConvolutionBlock(nn.Module):
    """`norm → activation → convolution`, two or three times, beside the shortcut; the first 3×3 has the stride."""

    def __init__(
        self,
        features: int,
        width: int,
        *,
        bottleneck: bool,
        stride: int = 1,
        drop_path: float = 0.0,
        act_layer: str | type[nn.Module] = "relu",
        **factory: Any,
    ) -> None:
        super().__init__()
        kernels = (1, 3, 1) if bottleneck else (3, 3)
        out_features = width * EXPANSION if bottleneck else width
        sizes = [features, *[width] * (len(kernels) - 1), out_features]
        strided = kernels.index(3)
        self.norms = nn.ModuleList(nn.BatchNorm2d(size, **factory) for size in sizes[:-1])
        self.convs = nn.ModuleList(
            nn.Conv2d(
                sizes[number],
                sizes[number + 1],
                kernel,
                stride=stride if number == strided else 1,
                padding=kernel // 2,
                bias=False,
                **factory,
            )
            for number, kernel in enumerate(kernels)
        )
        self.act = _activation(act_layer)
        changes = stride != 1 or features != out_features
        self.shortcut = nn.Conv2d(features, out_features, 1, stride=stride, bias=False, **factory) if changes else None
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The stream after this block. A projected shortcut starts after the first activation."""
        branch = self.act(self.norms[0](x))
        skip = x if self.shortcut is None else self.shortcut(branch)
        branch = self.convs[0](branch)
        for norm, conv in zip(self.norms[1:], self.convs[1:], strict=True):
            branch = conv(self.act(norm(branch)))
        return skip + self.drop_path(branch)


class AttentionBlock(nn.Module):
    """`norm → activation → 1×1 → norm → attention in windows` beside the shortcut; it never changes the stream's shape."""

    def __init__(
        self,
        features: int,
        *,
        bottleneck: bool,
        drop_path: float = 0.0,
        act_layer: str | type[nn.Module] = "gelu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **attention: Any,
    ) -> None:
        super().__init__()
        width = features // EXPANSION if bottleneck else features
        self.norm1 = nn.BatchNorm2d(features, device=device, dtype=dtype)
        self.act = _activation(act_layer)
        self.conv = nn.Conv2d(features, width, 1, bias=False, device=device, dtype=dtype)
        self.norm2 = nn.BatchNorm2d(width, device=device, dtype=dtype)
        self.attn = LocalWindowAttention(width, features, device=device, dtype=dtype, **attention)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        """The stream after this block."""
        return x + self.drop_path(self.attn(self.norm2(self.conv(self.act(self.norm1(x))))))


class AlterNet(nn.Module):
    """Stages of convolution blocks that end in attention; any image size.

    `depths` and `attention_depths` are the paper's n1 and n2, a number for each stage; `widths` are the channels of the
    3×3 convolutions, and a quarter of the stream's where `bottleneck`. `img_size` is taken for timm's sake: no weight
    depends on it.
    """

    def __init__(
        self,
        *,
        depths: Sequence[int],
        attention_depths: Sequence[int],
        bottleneck: bool,
        widths: Sequence[int] = (64, 128, 256, 512),
        heads: Sequence[int] = (3, 6, 12, 24),
        head_dim: int = 64,
        window: int = 7,
        stem: str = "imagenet",
        img_size: int | tuple[int, int] | None = None,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        attn_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        act_layer: str | type[nn.Module] = "relu",
        attn_act_layer: str | type[nn.Module] = "gelu",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        _check(depths=depths, attention_depths=attention_depths, widths=widths, heads=heads, stem=stem)
        _check_head(num_classes, global_pool)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        attention: dict[str, Any] = {
            "head_dim": head_dim,
            "window": window,
            "attn_drop": attn_drop_rate,
            "proj_drop": proj_drop_rate,
            "act_layer": attn_act_layer,
        }
        self.num_classes, self.in_chans, self.window = num_classes, in_chans, window
        self.grad_checkpointing = False
        self.feature_info: list[dict[str, Any]] = []

        self.stem = _stem(stem, in_chans, widths[0], **factory)
        rates = iter(calculate_drop_path_rates(drop_path_rate, sum(depths)))
        features, reduction = widths[0], 4 if stem == "imagenet" else 1
        stages = []
        for stage, (depth, width) in enumerate(zip(depths, widths, strict=True)):
            stride = 2 if stage else 1
            blocks: list[nn.Module] = []
            for attends in [False] * (depth - 2 * attention_depths[stage]) + [False, True] * attention_depths[stage]:
                shared = {"bottleneck": bottleneck, "drop_path": next(rates), **factory}
                if attends:
                    blocks.append(AttentionBlock(features, heads=heads[stage], **shared, **attention))
                else:
                    step = 1 if blocks else stride
                    blocks.append(ConvolutionBlock(features, width, stride=step, act_layer=act_layer, **shared))
                    features = width * EXPANSION if bottleneck else width
            reduction *= stride
            stages.append(nn.Sequential(*blocks))
            self.feature_info.append({"num_chs": features, "reduction": reduction, "module": f"stages.{stage}"})
        self.stages = nn.Sequential(*stages)
        self.norm: nn.Module = nn.BatchNorm2d(features, **factory)
        self.norm_act = _activation(act_layer)
        self.num_features = self.head_hidden_size = features
        self.head = ClassifierHead(features, num_classes, pool_type=global_pool, drop_rate=drop_rate, **factory)

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """The last map, after the final norm and its activation."""
        x = self._start(images)
        for stage in self.stages:
            x = self._run(stage, x)
        return self.norm_act(self.norm(x))

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of the last map, or what they are read from."""
        return self.head(x, pre_logits=pre_logits)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> Any:
        """The maps after the stages `indices`, and the last map; `norm` is applied to the last stage's only."""
        if output_fmt != "NCHW":
            raise UserError(f"output_fmt must be 'NCHW': got {output_fmt!r}")
        taken, last = feature_take_indices(len(self.stages), indices)
        final = len(self.stages) - 1
        x = self._start(x)
        maps = []
        for number, stage in enumerate(self.stages):
            if stop_early and number > last:
                break
            x = self._run(stage, x)
            if number in taken:
                maps.append(self.norm_act(self.norm(x)) if norm and number == final else x)
        if intermediates_only:
            return maps
        # An early stop leaves no last map to normalise: the norm is as wide as the last stage.
        return (self.norm_act(self.norm(x)) if not stop_early or last == final else x), maps

    def prune_intermediate_layers(
        self, indices: int | list[int] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop the stages behind the last of `indices`, and what is behind the stages."""
        taken, last = feature_take_indices(len(self.stages), indices)
        fewer = last + 1 < len(self.stages)
        self.stages = self.stages[: last + 1]
        if prune_norm or fewer:
            self.norm = nn.Identity()
            self.norm_act = nn.Identity()
        if prune_head:
            self.reset_classifier(0, "")
        return taken

    def get_classifier(self) -> nn.Module:
        """The last linear layer."""
        return self.head.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new last layer, where the old one was and in its type."""
        _check_head(num_classes, self.head.global_pool.pool_type if global_pool is None else global_pool)
        self.num_classes = num_classes
        like = next(self.stem.parameters())  # a head without classes has no parameter to ask
        self.head.reset(num_classes, global_pool, device=like.device, dtype=like.dtype)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep only the blocks' inputs for the backward pass, and compute the rest again."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """The position tables."""
        return {name for name, _ in self.named_parameters() if name.endswith(".position_table")}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Groups of parameters from the stem to the head, by stages or by blocks."""
        blocks = r"^stages\.(\d+)" if coarse else [(r"^stages\.(\d+)\.(\d+)", None), (r"^norm\.", (99999,))]
        return {"stem": r"^stem", "blocks": blocks}

    def _start(self, images: Tensor) -> Tensor:
        check_images(images, channels=self.in_chans, dtype=dtype_of(self.stem))
        for side in images.shape[-2:]:
            index(side)  # a compiled graph is for one size: free ones make windows of symbols, and minutes of compiling
        return self.stem(images)

    def _run(self, stage: nn.Module, x: Tensor) -> Tensor:
        return checkpoint_blocks(stage, x) if self.grad_checkpointing and torch.is_grad_enabled() else stage(x)


def _activation(kind: str | type[nn.Module]) -> nn.Module:
    try:
        return get_act_layer(kind)()
    except KeyError:
        raise unknown("activation", str(kind), ["relu", "gelu", "silu", "leaky_relu", "elu", "mish"]) from None


def _stem(name: str, in_chans: int, width: int, **factory: Any) -> nn.Sequential:
    stem = nn.Sequential()
    if name == "cifar":
        stem.add_module("conv", nn.Conv2d(in_chans, width, 3, padding=1, bias=False, **factory))
    else:
        stem.add_module("conv", nn.Conv2d(in_chans, width, 7, stride=2, padding=3, bias=False, **factory))
        stem.add_module("pool", nn.MaxPool2d(3, stride=2, padding=1))
    return stem


def _check(*, stem: str, **stages: Sequence[int]) -> None:
    if stem not in STEMS:
        raise UserError(f"stem must be {' or '.join(map(repr, STEMS))}: got {stem!r}")
    if not stages["depths"] or len({len(values) for values in stages.values()}) > 1:
        came = ", ".join(f"{name}={tuple(values)}" for name, values in stages.items())
        raise UserError(f"depths, attention_depths, widths and heads must have one number a stage: got {came}")
    for depth, attends in zip(stages["depths"], stages["attention_depths"], strict=True):
        if depth < 1 or not 0 <= 2 * attends <= depth:
            raise UserError(
                "depths must be 1 or more, and attention_depths at most half of them, as a convolution block precedes each "
                f"attention block: got {tuple(stages['depths'])} and {tuple(stages['attention_depths'])}"
            )


def _check_head(num_classes: int, global_pool: str) -> None:
    if global_pool not in POOLS:
        raise UserError(f"global_pool must be one of {', '.join(map(repr, POOLS))}: got {global_pool!r}")
    if num_classes > 0 and not global_pool:
        raise UserError(f"global_pool must not be '' with classes, it needs num_classes=0: got {num_classes} classes")


# The authors' names of weights, inside a block unless they begin with ^.
AUTHORS_NAMES = {
    r"^layer0\.layer0\.0\.": "stem.conv.",
    r"^classifier\.0\.bn\.": "norm.",
    r"^classifier\.0\.dense\.": "head.fc.",
    r"\.shortcut\.0\.": ".shortcut.",
    r"\.bn\.": ".norms.0.",
    r"\.conv1\.": ".convs.0.",
    r"\.conv2\.0\.": ".norms.1.",
    r"\.conv2\.2\.": ".convs.1.",
    r"\.conv3\.0\.": ".norms.2.",
    r"\.conv3\.2\.": ".convs.2.",
    r"\.attn\.attn\.qkv\.": ".attn.qkv.",
    r"\.attn\.attn\.to_out\.0\.": ".attn.proj.",
    r"\.attn\.pos_embedding$": ".attn.position_table",
}


def checkpoint_filter(state_dict: Mapping[str, Any], model: nn.Module) -> StateDict:
    """The authors' weights or ours under our names, position tables resized to the model's windows."""
    weights = unwrap(state_dict)
    if any(name.startswith("layer0.") for name in weights):
        weights = _from_authors(weights)
    window = getattr(model, "window", 7)
    side = 2 * window - 1
    for name, value in weights.items():
        if name.endswith(".position_table") and value.shape != (side, side):
            weights[name] = resize(value, (side, side))
    return weights


def _from_authors(weights: StateDict) -> StateDict:
    weights = dict(weights)
    for name in [name for name in weights if name.endswith(".to_q.weight")]:
        attention = name.removesuffix("to_q.weight")
        weights[f"{attention}qkv.weight"] = torch.cat([weights.pop(name), weights.pop(f"{attention}to_kv.weight")])
    renamed: StateDict = {}
    for name, value in weights.items():
        for pattern, ours in AUTHORS_NAMES.items():
            name = re.sub(pattern, ours, name)
        name = re.sub(r"^layer(\d+)\.", lambda found: f"stages.{int(found[1]) - 1}.", name)
        # Theirs are 1×1 convolutions, ours act on the channels of a window's tokens.
        renamed[name] = value.flatten(1) if re.search(r"\.attn\.(qkv|proj)\.weight$", name) else value
    return renamed


BASIC: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    18: ((2, 2, 2, 2), (0, 1, 1, 1)),
    34: ((3, 4, 6, 4), (0, 1, 3, 2)),
}
BOTTLENECK: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {
    50: ((3, 4, 6, 4), (0, 1, 3, 2)),
    101: ((3, 4, 23, 4), (0, 1, 3, 2)),
    152: ((3, 8, 36, 4), (0, 1, 3, 2)),
}

for _layers, (_depths, _attention_depths) in (BASIC | BOTTLENECK).items():
    register(
        f"alternet_{_layers}",
        AlterNet,
        module=__name__,
        paper="park",
        what=f"AlterNet-{_layers}: a pre-activation ResNet whose stages end in attention in windows",
        options={"depths": _depths, "attention_depths": _attention_depths, "bottleneck": _layers in BOTTLENECK},
        checkpoint_filter=checkpoint_filter,
        first_conv="stem.conv",
        classifier="head.fc",
    )
