"""Weights from elsewhere: what all families' checkpoint filters do first."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

StateDict = dict[str, Tensor]


def unwrap(checkpoint: Mapping[str, Any]) -> StateDict:
    """The weights by name in a training checkpoint, without the prefix that training on several devices leaves.

    >>> unwrap({"epoch": 3, "model": {"module.head.bias": 0}})
    {'head.bias': 0}
    """
    for wrapper in ("model", "state_dict"):
        if isinstance(inner := checkpoint.get(wrapper), Mapping):
            checkpoint = inner
    return {name.removeprefix("module."): value for name, value in checkpoint.items()}
