r"""Which images make which batch: a pure function of (seed, epoch), cut alike for any number of processes.

The images of an epoch come in the order of their hashes under (seed, epoch). With repeated augmentation (Hoffer et al.
2020; DeiT) each image stands ``repeats`` times in a row, each time with other draws, and the epoch ends after as many
images as the set holds, so it shows a 1/``repeats`` part of them: what timm's ``RepeatAugSampler`` gives its processes
together. Batch s is places sB … (s + 1)B − 1; images that do not fill a last batch wait for another epoch.

Mixup and CutMix pair place i of a batch with place B − 1 − i. A process therefore takes a run of pairs, its first halves in
front and its second ones, in rising order, behind: reversing its share finds every partner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spatially import randomness
from spatially.errors import UserError
from spatially.train.augment.draws import states


@dataclass(frozen=True)
class Order:
    """The order of ``count`` images in batches of ``batch``, for one of ``world`` processes."""

    count: int
    batch: int
    seed: int
    repeats: int = 1
    pairs: bool = False
    rank: int = 0
    world: int = 1

    def __post_init__(self) -> None:
        if self.batch > self.count:
            raise UserError(
                f"batch must be at most the {self.count:,} training images, but came as {self.batch:,}: "
                f"give --batch {self.count} or less"
            )
        part = self.world * (2 if self.pairs and self.world > 1 else 1)
        if self.batch % part:
            reason = f"{self.world} processes" + (" that mix images in pairs" if part > self.world else "")
            raise UserError(f"batch must be a multiple of {part} for {reason}, but came as {self.batch:,}")

    @property
    def steps(self) -> int:
        """Batches an epoch."""
        return self.count // self.batch

    @property
    def share(self) -> int:
        """Images of a batch that this process makes."""
        return self.batch // self.world

    def places(self) -> Tensor:
        """The places of a batch that this process makes."""
        if not self.pairs or self.world == 1:
            return torch.arange(self.rank * self.share, (self.rank + 1) * self.share)
        half = self.share // 2
        front = torch.arange(self.rank * half, (self.rank + 1) * half)
        return torch.cat([front, self.batch - 1 - front.flip(0)])

    def epoch(self, epoch: int, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
        """Rows of the set and states of the images, each int64 ``(steps, share)``, for all steps of an epoch."""
        every = torch.arange(self.count, device=device)
        order = randomness.image_bits(randomness.stream(self.seed, "order", epoch), every).argsort(stable=True)
        used = torch.arange(self.steps * self.batch, device=device)
        rows = order[used // self.repeats]
        repeat = used % self.repeats if self.repeats > 1 else None
        state = states(self.seed, epoch, rows, repeat)
        places = self.places().to(device)
        return rows.view(-1, self.batch)[:, places], state.view(-1, self.batch)[:, places]
