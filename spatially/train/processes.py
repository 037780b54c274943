"""What the processes of a training must agree on, so that each does the same at the same step."""

from collections.abc import Sequence
from pathlib import Path

import torch
from accelerate import Accelerator, PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker, get_available_trackers
from torch import Tensor, nn

from spatially.errors import UserError, unknown


def joined(trackers: Sequence[str | GeneralTracker], out: Path) -> Accelerator:
    """accelerate as the launcher started it, on the device that was chosen before; the recipe decides on the precision."""
    known = {str(tracker) for tracker in LOGGER_TYPE_TO_CLASS}
    for name in (one for one in trackers if isinstance(one, str)):
        if name not in known:
            raise unknown("tracker", name, sorted(known))
        if name not in map(str, get_available_trackers()):
            raise UserError(f"tracker {name} needs a package that is not here: pip install {name.replace('_', '-')}")
    cpu = PartialState().device.type == "cpu"
    return Accelerator(cpu=cpu, mixed_precision="no", log_with=list(trackers) or None, project_dir=out)


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
