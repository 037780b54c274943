"""ResNet-50 without pooling: one grid and one width from the stem to the head (Heo et al., section 3.1, figure 2).

The paper changes "the stem layer to reduce the feature to 14 × 14" and removes the later strides "to maintain feature
dimensions like ViT". ResNet-50's bottlenecks (3, 4, 6, 3) stay as they are; with base width c each maps 4c channels to c, c
and back to 4c, all at stride 16. Its pair with pooling is timm's `resnet50`.

The stem [open: the paper says no more] goes on as ResNet's begins: 7×7 convolution and 3×3 max-pooling, then two 3×3
convolutions, all of stride 2, with c/4, c/2, c channels at strides 2, 8, 16. At c = 256 these are the widths that ResNet-50's
own bottlenecks have at these strides.

Figure 2 changes the base width at will; so do `resnet50_flat(base_width=c)` and timm's
`resnet50(channels=(c, 2c, 4c, 8c))`. Multiply-adds at 224, the flat one's 55,272·c² + 464,992·c:

| flat: base width | 64   | 128  | 192  | 256  | 272  | 384  | 512   |
|------------------|------|------|------|------|------|------|-------|
| GMACs            | 0.26 | 0.97 | 2.13 | 3.74 | 4.22 | 8.33 | 14.73 |

| timm's: base width | 16   | 32   | 64   | 128   |
|--------------------|------|------|------|-------|
| GMACs              | 0.37 | 1.13 | 4.09 | 15.87 |

The default, 272, is the multiple of 16 next to timm's from above: if pooling wins, then not by its cost.
"""

from collections.abc import Sequence
from typing import Any

import torch
from timm.layers import DropPath, calculate_drop_path_rates, create_classifier, get_device_dtype
from timm.models._features import feature_take_indices
from timm.models.resnet import Bottleneck, downsample_conv
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.models.checkpointing import checkpoint_blocks
from spatially.models.registry import check_images, dtype_of, register
from spatially.models.weights import StateDict, unwrap

Indices = int | Sequence[int] | None
REDUCTION = 16


class FlatResNet(nn.Module):
    """Bottlenecks of one width at one stride behind a stem; names of weights as in timm's `resnet50` where it has them."""

    def __init__(
        self,
        *,
        base_width: int = 272,
        depths: Sequence[int] = (3, 4, 6, 3),
        num_classes: int = 1000,
        in_chans: int = 3,
        img_size: int | tuple[int, int] | None = None,
        global_pool: str = "avg",
        drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        zero_init_last: bool = True,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        del img_size  # convolutions take any
        if base_width < 4:
            raise UserError(f"base_width must be at least 4: got {base_width}")
        place: dict[str, Any] = {"device": device, "dtype": dtype}
        self.in_chans, self.num_classes, self.grad_checkpointing = in_chans, num_classes, False
        self.stem = _stem(in_chans, base_width, place)
        channels = base_width * Bottleneck.expansion
        self.feature_info = [{"num_chs": base_width, "reduction": REDUCTION, "module": "stem"}]
        rates = calculate_drop_path_rates(drop_path_rate, list(depths), stagewise=True)
        self.stages = [f"layer{number + 1}" for number in range(len(depths))]
        arriving = base_width
        for name, stage_rates in zip(self.stages, rates, strict=True):
            blocks = []
            for rate in stage_rates:
                shortcut = None if arriving == channels else downsample_conv(arriving, channels, 1, **place)
                drop = DropPath(rate) if rate > 0 else None
                blocks.append(Bottleneck(arriving, base_width, downsample=shortcut, drop_path=drop, **place))
                arriving = channels
            self.add_module(name, nn.Sequential(*blocks))
            self.feature_info.append({"num_chs": channels, "reduction": REDUCTION, "module": name})
        self.num_features = self.head_hidden_size = channels
        self.global_pool, self.fc = create_classifier(channels, num_classes, pool_type=global_pool, **place)
        self.head_drop = nn.Dropout(drop_rate)
        self._initialise(zero_init_last)

    def _initialise(self, zero_init_last: bool) -> None:
        """As ResNets start: He's draws, and blocks that begin as the identity."""
        for layer in self.modules():
            if isinstance(layer, nn.Conv2d):
                nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
            elif zero_init_last and isinstance(layer, Bottleneck):
                layer.zero_init_last()

    def forward(self, images: Tensor) -> Tensor:
        """Logits."""
        return self.forward_head(self.forward_features(images))

    def forward_features(self, images: Tensor) -> Tensor:
        """The last map: (batch, 4·base_width, height/16, width/16), rounded up."""
        check_images(images, channels=self.in_chans, dtype=dtype_of(self.stem))
        features = self.stem(images)
        for name in self.stages:
            features = self._stage(name, features)
        return features

    def _stage(self, name: str, features: Tensor) -> Tensor:
        stage = self.get_submodule(name)
        if not (self.grad_checkpointing and isinstance(stage, nn.Sequential)):
            return stage(features)
        return checkpoint_blocks(stage, features)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        """The mean over places to logits, or with `pre_logits` the mean."""
        pooled = self.head_drop(self.global_pool(features))
        return pooled if pre_logits else self.fc(pooled)

    def forward_intermediates(
        self,
        images: Tensor,
        indices: Indices = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """Maps of the stem (0) and the stages (1, …), and the last map; there is no final norm for `norm` to apply."""
        if output_fmt != "NCHW":
            raise UserError(f"output_fmt must be 'NCHW': got {output_fmt!r}")
        check_images(images, channels=self.in_chans, dtype=dtype_of(self.stem))
        chosen, last = feature_take_indices(len(self.stages) + 1, indices)
        features = self.stem(images)
        maps = [features] if 0 in chosen else []
        for number, name in enumerate(self.stages[:last] if stop_early else self.stages, start=1):
            features = self._stage(name, features)
            if number in chosen:
                maps.append(features)
        return maps if intermediates_only else (features, maps)

    def prune_intermediate_layers(
        self, indices: Indices = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Leave out the stages behind the last one that is wanted."""
        chosen, last = feature_take_indices(len(self.stages) + 1, indices)
        for name in self.stages[last:]:
            delattr(self, name)
        self.stages = self.stages[:last]
        if prune_head:
            self.reset_classifier(0, "")
        return chosen

    def get_classifier(self) -> nn.Module:
        """The linear layer."""
        return self.fc

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new linear layer for so many classes (0: none), and another pooling over places."""
        self.num_classes = num_classes
        pooling = self.global_pool.pool_type if global_pool is None else global_pool
        place = get_device_dtype(self)
        self.global_pool, self.fc = create_classifier(self.num_features, num_classes, pool_type=pooling, **place)
        self.global_pool.train(self.training)
        self.fc.train(self.training)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Compute blocks again in the backward pass instead of keeping what they computed."""
        self.grad_checkpointing = enable

    def no_weight_decay(self) -> set[str]:
        """Nothing by name: timm leaves norms and biases out by their shape."""
        return set()

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers for timm's layer-wise decay."""
        return {"stem": r"^stem", "blocks": r"^layer(\d+)" if coarse else r"^layer(\d+)\.(\d+)"}


def _stem(in_chans: int, base_width: int, place: dict[str, Any]) -> nn.Sequential:
    """Stride 16 in four halvings, to `base_width` channels."""

    def halve(arriving: int, leaving: int, kernel: int) -> list[nn.Module]:
        convolution = nn.Conv2d(arriving, leaving, kernel, stride=2, padding=kernel // 2, bias=False, **place)
        return [convolution, nn.BatchNorm2d(leaving, **place), nn.ReLU(inplace=True)]

    quarter, half = base_width // 4, base_width // 2
    first, pool = halve(in_chans, quarter, 7), nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
    return nn.Sequential(*first, pool, *halve(quarter, half, 3), *halve(half, base_width, 3))


def checkpoint_filter(state_dict: StateDict, model: nn.Module) -> StateDict:
    """The weights in a training checkpoint of ours; nobody else has any."""
    return unwrap(state_dict)


register(
    "resnet50_flat",
    FlatResNet,
    module=__name__,
    paper="heo",
    what="ResNet-50 without pooling: stride 16 and one width throughout (with pooling: timm's resnet50)",
    options={"base_width": 272},
    checkpoint_filter=checkpoint_filter,
    out_indices=range(5),
    first_conv="stem.0",
    classifier="fc",
    crop_pct=0.875,
    interpolation="bilinear",
)
