"""Gradient checkpointing of blocks with batch norms: recomputed in the backward pass, counted once."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from timm.models import checkpoint
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def checkpoint_blocks(blocks: nn.Module, features: Tensor) -> Tensor:
    """The blocks one after the other, each computed again in the backward pass instead of keeping what it computed."""
    for block in blocks.children():
        # A compiled graph takes no contexts of ours, and updates running statistics once by itself.
        options = {} if torch.compiler.is_compiling() else {"context_fn": lambda: (nullcontext(), _second_pass(block))}  # noqa: B023
        features = checkpoint(block, features, **options)
    return features


@contextmanager
def _second_pass(block: nn.Module) -> Iterator[None]:
    """Batch norms normalise by the batch once more, and leave their running statistics as they are."""
    norms = [module for module in block.modules() if isinstance(module, _BatchNorm)]
    kept = [(norm.momentum, norm.num_batches_tracked) for norm in norms]
    try:
        for norm in norms:
            norm.momentum = 0.0
            norm.num_batches_tracked = None if norm.num_batches_tracked is None else norm.num_batches_tracked.clone()
        yield
    finally:
        for norm, (momentum, batches) in zip(norms, kept, strict=True):
            norm.momentum, norm.num_batches_tracked = momentum, batches
