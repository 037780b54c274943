"""The most memory that tensors take at any time while code runs, beyond those that were there before.

On CUDA the allocator counts. On the CPU nobody does, so the storages that operations return are followed: each counts from
the call that made it until the last tensor that shares it is gone; views and in-place results share one. What a kernel takes
for itself and gives back before it returns is not seen on the CPU, and is on CUDA.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter


def peak_memory(code: Callable[[], Any], device: torch.device) -> int:
    """Bytes at the highest point of ``code``, its result included, beyond what was in use before it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        code()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    with LiveStorages() as storages:
        code()
    return storages.peak


class LiveStorages(TorchDispatchMode):
    """Follows the storages that are made inside it.

    >>> with LiveStorages() as storages:
    ...     first = torch.zeros(10)
    ...     total = (first + 1).view(2, 5)[0].sum()
    >>> storages.peak, storages.now
    (84, 44)
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, int] = {}  # bytes by storage; 0 for those that were there before

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        for tensor in filter(_stored, tree_iter((args, kwargs))):
            self._follow(tensor.untyped_storage(), counted=False)
        result = func(*args, **(kwargs or {}))
        for tensor in filter(_stored, tree_iter(result)):
            self._follow(tensor.untyped_storage(), counted=True)
        return result

    def _follow(self, storage: torch.UntypedStorage, *, counted: bool) -> None:
        name = storage._cdata
        if name in self._known:
            return
        self._known[name] = storage.nbytes() if counted else 0
        self.now += self._known[name]
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._forget, name).atexit = False

    def _forget(self, name: int) -> None:
        self.now -= self._known.pop(name)


def _stored(value: Any) -> bool:
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta
