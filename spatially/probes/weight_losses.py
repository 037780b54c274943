r"""The loss of a model whose weights are moved, over the images as training sees them.

``nll``: mean over images of −log of the true class's probability. ``accuracy``: the share of them answered rightly (where
images are mixed, with the class that has the larger share). ``l2``: :math:`\frac{\lambda}{2} \lVert w \rVert^2` over all
parameters, λ the weight decay; in the code of Park & Kim (``style="authors"``) λ times the sum of the parameters' norms,
not squared.

The images are augmented once and kept, as far as memory goes; what does not fit is made again for every point, by the same
draw. One ``functional_call`` a point, so the cost of exchanging the weights does not grow with the images.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from spatially.perturb.augment import training_batch
from spatially.probes.base import cut

if TYPE_CHECKING:
    from spatially.data import Images
    from spatially.subject import Subject

Batch = tuple[Tensor, Tensor]
_SHARE = 0.25  # of the memory that is free: the rest is for activations


class Batches:
    """The augmented images and targets, batch by batch, the same in every round."""

    def __init__(self, subject: Subject, images: Images, *, batch: int, seed: int, augmentation: str) -> None:
        self._subject, self._images = subject, images
        self._seed, self._augmentation = seed, augmentation
        self._rows = cut(images, batch=batch, seed=seed)
        self._kept: list[Batch] = []
        self._room = free_memory(subject.device) * _SHARE

    @property
    def count(self) -> int:
        """How many images there are."""
        return len(self._images)

    def __iter__(self) -> Iterator[Batch]:
        for number, rows in enumerate(self._rows):
            if number < len(self._kept):
                yield self._kept[number]
                continue
            pixels, labels, index = self._images.batch(rows, self._subject.device)
            made = training_batch(
                pixels,
                labels,
                augmentation=self._augmentation,
                index=index,
                classes=self._subject.answers,
                seed=self._seed,
            )
            self._room -= sum(part.nbytes for part in made)
            if self._room >= 0 and number == len(self._kept):
                self._kept.append(made)
            yield made


def free_memory(device: torch.device) -> int:
    """Bytes for this process, as far as the system says; 1 GiB where it does not."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        together = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // together
    except (AttributeError, ValueError, OSError):
        return 1 << 30


class Losses(nn.Module):
    """Sums over all images: NLL, its square, and right answers. A module, so that its weights can be exchanged."""

    def __init__(self, subject: Subject) -> None:
        super().__init__()
        self.model = subject.model
        self._subject = subject

    @torch.inference_mode()
    def forward(self, batches: Iterable[Batch]) -> Tensor:
        total = torch.zeros(3, dtype=torch.float64, device=self._subject.device)
        for images, targets in batches:
            logits = self._subject(images)
            mixed = targets.ndim == 2
            nll = cross_entropy(logits, targets.to(logits.dtype) if mixed else targets, reduction="none").double()
            right = logits.argmax(dim=1) == (targets.argmax(dim=1) if mixed else targets)
            total += torch.stack([nll.sum(), nll.square().sum(), right.sum().double()])
        return total

    def at(self, weights: Mapping[str, Tensor], batches: Iterable[Batch]) -> Tensor:
        """The sums with these of the model's weights exchanged; the model itself stays as it is. Weights that modules share
        are given under each of their names: to look for them at every point would cost more than the exchange."""
        named = {f"model.{name}": one for name, one in weights.items()}
        sums: Tensor = functional_call(self, named, (batches,), tie_weights=False)
        return sums


def penalty(squared_norms: Tensor, weight_decay: float, *, style: str = "filter") -> float:
    """The L2 term from every parameter's squared norm.

    >>> penalty(torch.tensor([9.0, 16.0]), 0.1), penalty(torch.tensor([9.0, 16.0]), 0.1, style="authors")
    (1.25, 0.7000000000000001)
    """
    if style == "authors":
        return weight_decay * float(squared_norms.sqrt().sum())
    return weight_decay / 2 * float(squared_norms.sum())
