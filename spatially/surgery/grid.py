"""On which grid the tokens of a network lie that does not tell its attention layers.

A ViT's attention sees a row of tokens. `Grid` is hooked to the patch embedding and reads the grid of every batch that
passes, so rectangular images and changed resolutions need no guess, whichever method of the model they enter through.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from spatially.errors import UserError
from spatially.nn.gaussian_bias import GaussianBias


class Grid:
    """The grid of the images now in the network, with `prefix` tokens (class, distillation, registers) before it."""

    def __init__(self, prefix: int) -> None:
        self.prefix = prefix
        self.size: tuple[int, int] | None = None
        self._seen: dict[int, tuple[int, int]] = {}

    def __call__(self, module: Any, arguments: tuple[Any, ...], output: Any) -> None:
        """Forward hook of a patch embedding, or of what changes the grid later."""
        if hasattr(module, "dynamic_feat_size"):  # timm's patch embedding, whose output may be flat already
            height, width = module.dynamic_feat_size(arguments[0].shape[-2:])
        elif isinstance(output, tuple):  # a pool of tokens, which returns their grid
            height, width = output[1]
        else:
            height, width = output.shape[-2:]
        self.size = (height, width)
        if not torch.compiler.is_compiling():
            self._seen[height * width] = (height, width)

    def of(self, tokens: int) -> tuple[int, int]:
        """The grid of so many tokens."""
        patches = tokens - self.prefix
        if self.size is not None and self.size[0] * self.size[1] == patches:
            return self.size
        # Gradient checkpointing computes a block again after other sizes may have passed.
        if patches in self._seen:
            return self._seen[patches]
        raise UserError(
            f"the Gaussian bias needs {self.prefix} prefix tokens and a full grid of patches: got {tokens} tokens, "
            + ("before any image" if self.size is None else f"for a grid of {self.size[0]}×{self.size[1]}")
        )

    def bias(self, gaussian: GaussianBias, tokens: int) -> Tensor:
        """Bias of all pairs of tokens, 0 wherever a prefix token takes part: (heads or 1, tokens, tokens)."""
        return F.pad(gaussian(self.of(tokens)), (self.prefix, 0, self.prefix, 0))


def joined(mask: Tensor | None, bias: Tensor) -> Tensor:
    """A mask of attention, additive or boolean (True takes part), and a bias in one."""
    if mask is None:
        return bias
    if mask.dtype == torch.bool:
        return torch.where(mask, bias, float("-inf"))
    return mask + bias
