r"""One step of training: loss, gradients, clipping, the optimiser, the average of the weights.

The loss is the cross-entropy of soft targets, :math:`-\frac1B \sum_b \sum_c y_{bc} \log \operatorname{softmax}(z_b)_c`,
or with a teacher the mixture in :mod:`spatially.train.distillation`. A batch may be cut into `accumulation` parts whose
gradients add up to those of the whole. Nothing in a step waits for the device: what it returns stays there.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from timm.utils import ModelEmaV3
from torch import Tensor, nn

from spatially.nn.regular_self_attention import RegularSelfAttention
from spatially.train.batch import Batch
from spatially.train.distillation import teacher_loss, use_token
from spatially.train.ema import build_average
from spatially.train.optimiser import build_optimiser
from spatially.train.recipe import Distillation, Recipe

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Objective(nn.Module):
    """A model with its loss: images and targets in, loss and share of right answers out, as two numbers in a tensor."""

    def __init__(self, model: nn.Module, distillation: Distillation | None = None) -> None:
        super().__init__()
        self.model = model
        self.distillation = distillation

    def forward(self, images: Tensor, targets: Tensor, labels: Tensor, teacher: Tensor | None = None) -> Tensor:
        answers = self.model(images)
        for_labels, for_teacher = answers if isinstance(answers, tuple | list) else (answers, answers)
        for_labels = _full(for_labels)
        loss = F.cross_entropy(for_labels, targets.to(for_labels.dtype))
        if self.distillation is not None and teacher is not None:
            alpha = self.distillation.alpha
            taught = teacher_loss(_full(for_teacher), teacher.to(for_labels.dtype), self.distillation)
            loss = (1 - alpha) * loss + alpha * taught
        right = (for_labels.detach().argmax(dim=-1) == labels).to(loss.dtype).mean()
        return torch.stack((loss, right))


def _full(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _keeps_tables(model: nn.Module) -> bool:
    """Whether a layer's kernels keep, from their first call on, tables that a recorded graph would take for its own."""
    return any(isinstance(one, RegularSelfAttention) and one.gaussian_bias is not None for one in model.modules())


class TrainingStep:
    """Callable on batches; made by :func:`training_step`. Its parts are what a checkpoint keeps.

    Attributes:
        model: the plain module, whose names its weights keep.
        optimiser, average, scaler: of the weights; the last two where the recipe asks for them.
        updates: how many steps were done.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe,
        *,
        device: torch.device,
        teacher: Callable[[Tensor], Tensor] | None = None,
        prepare: Callable[[nn.Module], nn.Module] | None = None,
    ) -> None:
        run = recipe.run
        self.memory_format = torch.channels_last if run.channels_last else torch.contiguous_format
        self.dtype = torch.float64 if run.precision == "fp64" else torch.float32
        self.model = model.to(device=device, dtype=self.dtype)
        if run.channels_last:
            self.model = self.model.to(memory_format=torch.channels_last)
        use_token(self.model, recipe)
        self.device = device
        self.half = HALF.get(run.precision)
        self.parts = run.accumulation
        self.clip = recipe.regularisation.clip
        self.teacher = teacher
        self.average: ModelEmaV3 | None = build_average(self.model, recipe)
        self.optimiser = build_optimiser(self.model, recipe)
        self.parameters = [one for group in self.optimiser.param_groups for one in group["params"]]
        self.scaler = torch.amp.GradScaler(device.type) if self.half == torch.float16 else None
        self.updates = 0
        objective: nn.Module = Objective(self.model, recipe.distillation)
        self._prepared = objective if prepare is None else prepare(objective)
        # A launch costs the host more than many a kernel of a small model: whole passes are launched as CUDA graphs, where
        # gradients are used up before the next pass.
        self._graphs = (
            run.compile
            and device.type == "cuda"
            and self.parts == 1
            and not hasattr(self._prepared, "no_sync")
            and not _keeps_tables(self.model)
        )
        self._forward: Callable[..., Tensor] = self._prepared
        if run.compile:
            self._forward = torch.compile(self._prepared, mode="reduce-overhead" if self._graphs else None)

    def __call__(self, batch: Batch) -> Tensor:
        """Train on one batch; loss and share of right answers, two numbers still on the device."""
        if not self.model.training:
            self.model.train()
        images = batch.images.to(device=self.device, dtype=self.dtype, memory_format=self.memory_format)
        parts = Batch(images, batch.targets.to(self.device), batch.labels.to(self.device)).chunks(self.parts)
        results = []
        for part in parts:
            logits = self.teacher(part.images) if self.teacher is not None else None
            if self._graphs:  # and so in one part
                torch.compiler.cudagraph_mark_step_begin()
            with self._joining(last=part is parts[-1]):
                with self.precision():
                    found = self._forward(part.images, part.targets, part.labels, logits)
                share = found * (len(part) / len(batch))
                (share[0] if self.scaler is None else self.scaler.scale(share[0])).backward()
            results.append(share.detach())
        self._update()
        return torch.stack(results).sum(dim=0)

    def precision(self) -> AbstractContextManager[Any]:
        """The context in which the model computes."""
        return nullcontext() if self.half is None else torch.autocast(self.device.type, dtype=self.half)

    def _joining(self, *, last: bool) -> AbstractContextManager[Any]:
        """Processes exchange their gradients with the last part alone."""
        no_sync = getattr(self._prepared, "no_sync", None)
        return nullcontext() if last or no_sync is None else no_sync()

    def _update(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.optimiser)
        if self.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.parameters, self.clip)
        if self.scaler is None:
            self.optimiser.step()
        else:
            self.scaler.step(self.optimiser)
            self.scaler.update()
        self.optimiser.zero_grad(set_to_none=True)
        self.updates += 1
        if self.average is not None:
            self.average.update(self.model, step=self.updates)


def training_step(
    model: nn.Module,
    recipe: Recipe,
    *,
    device: torch.device | str = "cpu",
    teacher: Callable[[Tensor], Tensor] | None = None,
    prepare: Callable[[nn.Module], nn.Module] | None = None,
) -> TrainingStep:
    """A function that trains `model` on one batch as the recipe says, and what belongs to it.

    The rate is the optimiser's, which :class:`spatially.train.schedule.Schedule` sets before each step. `teacher` gives
    logits for the batch's images; `prepare` wraps the model with its loss for several processes.
    """
    return TrainingStep(model, recipe, device=torch.device(device), teacher=teacher, prepare=prepare)
