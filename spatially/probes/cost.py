r"""What a model costs (Heo, tables 1-3): size, work, memory and speed.

* ``parameters``; ``macs``, multiplications with their addition of one image (the papers' FLOPs); ``activations``, numbers that
  convolutions, linear layers and attention's products put out for one image (:mod:`spatially.models.costs`).
* ``throughput``: images a second, :math:`b / \operatorname{median}_r(t_r)` with b the batch and :math:`t_r` the seconds of one
  pass in round r; its ends are the quartiles over the rounds.
* ``peak_memory``: bytes in use at the highest point of one pass, beyond the weights and the batch of images
  (:mod:`spatially.observe.live_memory`).

Speed and memory are of the model alone, on random images of its size that are normalised and on the device already. A training
step is the forward pass in training mode, cross-entropy and the backward pass, with the gradients' memory and without an
optimiser, on a copy of the model.

Speed is the one result here that is not the same twice. It is measured in one piece, so by one process while the others
wait, and a finished measurement stands until it is asked for with other options; ``machine`` says where it was made.
"""

from __future__ import annotations

import copy
import gc
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
import xarray as xr
from numpy.typing import NDArray
from torch import Tensor, nn

from spatially import randomness
from spatially.errors import UserError, first_line, unknown
from spatially.models.costs import count_model
from spatially.observe.live_memory import peak_memory
from spatially.probes.base import Drawing, Probe, Rows, device_name, several
from spatially.subject.subject import logits_of

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject

INFERENCE, TRAINING = "inference", "training"
EAGER, COMPILED = "eager", "compiled"
STEPS, MODES = (INFERENCE, TRAINING), (EAGER, COMPILED)
BATCHES = {"cuda": 128, "cpu": 8}  # the paper's on a GPU
SHORTEST_ROUND = 0.1  # seconds, far above what a clock or a launch takes


@dataclass(frozen=True, kw_only=True)
class Cost(Probe):
    """Parameters, multiplications, activations, memory and speed.

    ``steps`` are inference and training, ``modes`` eager and compiled. ``batch`` is 128 images on a GPU, less if they do
    not fit, and 8 on a CPU. Each of ``rounds`` lasts a tenth of a second at least, after ``warm_up`` passes.
    """

    name: ClassVar[str] = "cost"
    title: ClassVar[str] = "What a model costs"
    paper: ClassVar[str] = "Heo, Rethinking Spatial Dimensions of Vision Transformers, tables 1-3"
    definition: ClassVar[str] = (
        "Parameters; multiply-accumulate operations and outputs of convolutions, linear layers and attention products for "
        "one image; images a second (median over rounds) and the highest memory in use beyond weights and images."
    )
    answers: ClassVar[bool] = False

    steps: Sequence[str] = (INFERENCE,)
    modes: Sequence[str] = (EAGER,)
    batch: int | None = None
    rounds: int = 10
    warm_up: int = 3
    seed: int = 0

    def __post_init__(self) -> None:
        self.settle()
        for name, allowed in (("steps", STEPS), ("modes", MODES)):
            chosen = several(getattr(self, name))
            for one in chosen:
                if one not in allowed:
                    raise unknown(name.removesuffix("s"), str(one), allowed)
            if not chosen:
                raise UserError(f"{name} must name at least one of {', '.join(allowed)}")
            object.__setattr__(self, name, tuple(one for one in allowed if one in chosen))
        least = {"rounds": 1, "warm_up": 1, "batch": 2 if TRAINING in self.steps else 1}
        for name, lowest in least.items():
            value = getattr(self, name)
            if value is None and name == "batch":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
                raise UserError(f"{name} must be a whole number of at least {lowest}, but came as {value!r}")

    @property
    def passes(self) -> int:
        return 0

    @property
    def interval(self) -> str:
        return "quartiles over rounds; not reproducible"

    def check(self, subject: Subject, images: Images) -> None:
        """Any model will do."""

    def chunks(self, images: Images, *, batch: int) -> list[Rows]:
        """One piece, so that no two processes measure at a time and disturb each other."""
        return super().chunks(images, batch=batch)[:1]

    def measure(
        self, subject: Subject, images: Images, rows: Rows, *, stopped: NDArray[np.bool_] | None = None
    ) -> xr.Dataset:
        shape = len(self.steps), len(self.modes)
        seconds, memory = np.full((*shape, self.rounds), np.nan), np.full(shape, np.nan)
        batch = np.zeros(shape, np.int64)
        for i, step in enumerate(self.steps):
            for j, mode in enumerate(self.modes):
                batch[i, j], memory[i, j], seconds[i, j] = self._fitting(subject, step, mode)
        macs, activations = count_model(subject.model, subject.preprocessing.input_size)
        pair = ("step", "mode")
        return xr.Dataset(
            {
                "parameters": ((), sum(one.numel() for one in subject.model.parameters())),
                "macs": ((), macs, {"long_name": "multiply-accumulate operations of one image"}),
                "activations": ((), activations, {"long_name": "outputs of products, of one image"}),
                "peak_memory": (pair, memory, {"units": "bytes"}),
                "seconds": ((*pair, "round"), seconds, {"units": "s", "machine": machine(subject.device)}),
            },
            coords={
                "step": list(self.steps),
                "mode": list(self.modes),
                "batch_size": (pair, batch),
                "input_size": ("side", list(subject.preprocessing.input_size)),
            },
        )

    def _fitting(self, subject: Subject, step: str, mode: str) -> tuple[int, float, NDArray[np.float64]]:
        """Batch, memory and seconds; half the batch and again where the GPU is too small for the one we would take."""
        batch = self.batch or BATCHES.get(subject.device.type, 8)
        while True:
            try:
                return batch, *self._time(subject, step, mode, batch)
            except torch.cuda.OutOfMemoryError:
                if self.batch is not None or batch <= 2:
                    advice = f"{subject.name}: a batch of {batch} does not fit into the GPU's memory for {step}"
                    raise UserError(f"{advice}; choose a smaller one (cost.batch)") from None
            gc.collect()
            torch.cuda.empty_cache()
            batch //= 2

    def _time(self, subject: Subject, step: str, mode: str, batch: int) -> tuple[float, NDArray[np.float64]]:
        model = subject.model if step == INFERENCE else _learning(subject.model)
        images = self._images(subject, batch)
        run: Callable[[Tensor], Any] = torch.compile(model) if mode == COMPILED else model
        once = _inference(subject, run, images) if step == INFERENCE else _training(subject, model, run, images)
        if mode == COMPILED:
            _compile(once, subject)
        once()
        # The CPU's count follows single operations, which compiled code does not consist of.
        blind = mode == COMPILED and subject.device.type != "cuda"
        memory = float("nan") if blind else float(peak_memory(once, subject.device))
        return memory, timed(once, subject.device, rounds=self.rounds, warm_up=self.warm_up)

    def _images(self, subject: Subject, batch: int) -> Tensor:
        key = randomness.stream(self.seed, "cost")
        noise = randomness.normal(key, torch.arange(batch), (3, *subject.preprocessing.input_size))
        return subject.normalise(noise * 0.25 + 0.5)

    def join(self, parts: Sequence[xr.Dataset]) -> xr.Dataset:
        return parts[0].drop_attrs(deep=False)

    def summarise(self, outcomes: xr.Dataset, *, chance: float) -> xr.Dataset:
        result = outcomes.copy()
        images = outcomes["batch_size"].astype(float)
        for name, share in (("throughput", 0.5), ("throughput_low", 0.75), ("throughput_high", 0.25)):
            rate = images / outcomes["seconds"].quantile(share, "round").drop_vars("quantile")
            result[name] = rate.assign_attrs(units="images/s")
        return result

    @classmethod
    def drawing(cls) -> Drawing:
        from spatially.probes import cost_figures

        return cost_figures


def _compile(once: Callable[[], Any], subject: Subject) -> None:
    """The first call, which compiles."""
    from torch._dynamo.exc import TorchDynamoException

    torch.compiler.reset()
    try:
        once()
    except TorchDynamoException as error:
        reason = first_line(error)
        raise UserError(f"{subject.name} does not compile ({reason}); leave compiled out of cost.modes") from error


def _inference(subject: Subject, run: Callable[[Tensor], Any], images: Tensor) -> Callable[[], Any]:
    @torch.no_grad()
    def once() -> Any:
        with subject.precision():
            return run(images)

    return once


def _learning(model: nn.Module) -> nn.Module:
    """A copy in training mode, all of whose weights learn: tables of whole numbers do not."""
    learning = copy.deepcopy(model).train()
    for one in learning.parameters():
        one.requires_grad_(one.is_floating_point() or one.is_complex())
    return learning


def _training(subject: Subject, model: nn.Module, run: Callable[[Tensor], Any], images: Tensor) -> Callable[[], Any]:
    labels = torch.arange(len(images), device=images.device) % max(subject.answers, 1)

    def once() -> None:
        with torch.enable_grad(), subject.precision():
            output = logits_of(run(images)).float()
            loss = F.cross_entropy(output, labels) if subject.answers else output.square().mean()
        if not loss.requires_grad:
            raise UserError(f"{subject.name} is not differentiable; leave training out of cost.steps")
        loss.backward()
        model.zero_grad(set_to_none=True)

    return once


def timed(code: Callable[[], Any], device: torch.device, *, rounds: int, warm_up: int) -> NDArray[np.float64]:
    """Seconds of one call in each round; a round has as many calls as fill a tenth of a second."""
    single = [_seconds(code, device, calls=1) for _ in range(warm_up)]
    calls = ceil(SHORTEST_ROUND / max(min(single), 1e-6))
    return np.array([_seconds(code, device, calls=calls) / calls for _ in range(rounds)])


def _seconds(code: Callable[[], Any], device: torch.device, *, calls: int) -> float:
    _wait(device)
    start = time.perf_counter()
    for _ in range(calls):
        code()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: torch.device) -> str:
    """The chip that computes; for a processor with the number of threads."""
    if device.type != "cpu":
        return device_name(device)
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    named = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    threads = torch.get_num_threads()
    chip = named[0] if named else platform.processor() or platform.machine()
    return f"{chip}, {threads} thread{'s' if threads > 1 else ''}"
