"""Loss and accuracy of a model on validation images, each image once over all processes."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn

from spatially.subject.subject import logits_of
from spatially.train.batch import ValidationData


@torch.no_grad()
def evaluate(
    model: nn.Module, data: ValidationData, accelerator: Accelerator, precision: AbstractContextManager[Any]
) -> dict[str, float]:
    """`loss` (cross-entropy), `accuracy` and `top5`, as means over all images; the model's mode is put back."""
    training = model.training
    model.eval()
    weight = next(model.parameters())
    sums = torch.zeros(3, dtype=torch.float64, device=accelerator.device)
    seen = 0
    with precision:
        for images, labels in data.batches():
            labels = labels.to(weight.device)
            logits = logits_of(model(images.to(device=weight.device, dtype=weight.dtype)))
            logits = logits.double()
            best = logits.topk(min(5, logits.shape[1])).indices == labels[:, None]
            loss = F.cross_entropy(logits, labels, reduction="sum")
            sums += torch.stack((loss, best[:, 0].sum(), best.sum()))
            seen += len(labels)
    model.train(training)
    sums = torch.cat((sums, sums.new_tensor([seen])))
    if accelerator.num_processes > 1:
        torch.distributed.all_reduce(sums)
    loss, right, among_five, count = sums.tolist()
    return {"loss": loss / count, "accuracy": right / count, "top5": among_five / count}
