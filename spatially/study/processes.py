"""One process or many, by accelerate: under ``torchrun`` or ``accelerate launch`` the same code runs in each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from accelerate import PartialState

# Decoding a large set may keep the others waiting; a process that died is noticed by the launcher.
PATIENCE = timedelta(days=2)


class Processes:
    """Which process this is, of how many, on which device."""

    def __init__(self, *, cpu: bool = False) -> None:
        many = int(os.environ.get("WORLD_SIZE", "1")) > 1
        self._state = PartialState(cpu=cpu, **({"timeout": PATIENCE} if many else {}))
        self.rank: int = self._state.process_index
        self.count: int = self._state.num_processes
        self.device: torch.device = self._state.device

    @property
    def is_main(self) -> bool:
        """Whether this process joins, writes and speaks for all."""
        return self.rank == 0

    def wait(self) -> None:
        """Until every process has come this far."""
        if self.count > 1 and self.device.type == "cpu":
            # accelerate's own names a GPU by the process's number, also for processes that use none.
            torch.distributed.barrier()
        else:
            self._state.wait_for_everyone()

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The main process goes through a block before the others."""
        if not self.is_main:
            self.wait()
        yield
        if self.is_main:
            self.wait()


def leave() -> None:
    """Leave the group of processes, as each must before it ends: one that does not keeps the others waiting."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@contextmanager
def fixed_threads() -> Iterator[None]:
    """The same number of CPU threads in every process, since sums on the CPU may depend on it.

    A launcher sets one thread a process, a single process takes all cores; results must not differ for that.
    """
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    torch.set_num_threads(cores)
    try:
        yield
    finally:
        torch.set_num_threads(before)
