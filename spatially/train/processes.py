"""What the processes of a training must agree on, so that each does the same at the same step."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from torch import Tensor, nn

from spatially.errors import UserError, first_line, unknown


def joined(trackers: Sequence[str | GeneralTracker], out: Path) -> Accelerator:
    """accelerate as the launcher started it, on the device that was chosen before; the recipe decides on the precision."""
    known = {str(tracker) for tracker in LOGGER_TYPE_TO_CLASS}
    for name in (one for one in trackers if isinstance(one, str)):
        if name not in known:
            raise unknown("tracker", name, sorted(known))
        if name not in map(str, get_available_trackers()):
            raise UserError(f"tracker {name} needs a package that is not here: pip install {name.replace('_', '-')}")
    with joining():
        cpu = PartialState(cpu=on_cpu()).device.type == "cpu"
        accelerator = Accelerator(cpu=cpu, mixed_precision="no", log_with=list(trackers) or None, project_dir=out)
    check_launched(accelerator.num_processes)
    return accelerator


def launched() -> int:
    """How many processes a launcher started, which says so in the environment."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def on_cpu(*, asked: bool = False) -> bool:
    """Whether accelerate is to be told to compute on the CPU.

    Untold and without a GPU it makes each of several processes one of its own. A single one may take what else there is.
    """
    return asked or (launched() > 1 and not torch.cuda.is_available())


@contextmanager
def joining() -> Iterator[None]:
    """What accelerate says where WORLD_SIZE promises processes that nobody started, as the user's mistake."""
    try:
        yield
    except ValueError as error:
        if launched() == 1:
            raise
        raise UserError(
            f"WORLD_SIZE in the environment is {launched()}, but the processes could not be joined ({first_line(error)}); "
            "start them by torchrun or accelerate launch, or unset WORLD_SIZE"
        ) from error


def check_launched(processes: int) -> None:
    """That the processes which were started know of each other: each alone would write to the same folder."""
    if processes != launched():
        raise UserError(
            f"WORLD_SIZE in the environment is {launched()}, but accelerate found processes: {processes}; start them by "
            "torchrun or accelerate launch, or unset WORLD_SIZE"
        )


def wait(accelerator: Accelerator) -> None:
    """Until every process has come this far."""
    if accelerator.num_processes > 1 and accelerator.device.type == "cpu":
        # accelerate's own names a GPU by the process's number, also for processes that use none
        torch.distributed.barrier()
    else:
        accelerator.wait_for_everyone()


def agree(accelerator: Accelerator, *numbers: int) -> list[int]:
    """The largest of each number over all processes."""
    if accelerator.num_processes == 1:
        return list(numbers)
    values = torch.tensor(numbers, device=accelerator.device)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MAX)
    return values.tolist()


def mean_over_processes(accelerator: Accelerator, values: Tensor) -> Tensor:
    """The mean of a tensor over all processes."""
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(values)
        values = values / accelerator.num_processes
    return values


def share_weights(accelerator: Accelerator, model: nn.Module, *, buffers_only: bool = False) -> None:
    """The main process's weights and buffers everywhere: batch norms count in each process for themselves."""
    if accelerator.num_processes > 1:
        shared = model.buffers() if buffers_only else model.state_dict().values()
        for value in shared:
            torch.distributed.broadcast(value.data, 0)
