"""A training small enough to be killed many times: random images in memory and a network with every kind of randomness.

As a script it trains into a folder, for the tests that kill it or run it in several processes.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from timm.layers import DropPath
from torch import Tensor, nn

from spatially.study.processes import leave
from spatially.subject.preprocessing import Preprocessing
from spatially.train.batch import Batch
from spatially.train.card import Identity
from spatially.train.recipe import Recipe
from spatially.train.resume import starting_point

SIZE = 8
CLASSES = ("a", "b", "c")
QUIET = Console(quiet=True)
IDENTITY = Identity(name="tiny", preprocessing=Preprocessing((SIZE, SIZE), resize=(SIZE, SIZE)))


class TinyData:
    """`steps` batches an epoch, each a function of its number alone; a process sees its share of each."""

    classes = CLASSES
    size = (SIZE, SIZE)
    fingerprint = ""

    def __init__(self, batch: int = 8, steps: int = 5, *, rank: int = 0, world: int = 1) -> None:
        self.batch, self.steps_per_epoch, self.rank, self.world = batch, steps, rank, world
        self.images_per_epoch = batch * steps

    def batches(self, epoch: int, *, first_step: int = 0) -> Iterator[Batch]:
        for step in range(first_step, self.steps_per_epoch):
            generator = torch.Generator().manual_seed(1000 * epoch + step)
            labels = torch.randint(0, 3, (self.batch,), generator=generator)
            images = torch.randn(self.batch, 3, SIZE, SIZE, generator=generator) + labels[:, None, None, None]
            targets = nn.functional.one_hot(labels, 3) * 0.9 + 0.1 / 3
            own = slice(self.rank * self.batch // self.world, (self.rank + 1) * self.batch // self.world)
            yield Batch(images[own], targets[own], labels[own])


class TinyValidation:
    classes = CLASSES
    preprocessing = IDENTITY.preprocessing

    def __init__(self, *, rank: int = 0, world: int = 1) -> None:
        generator = torch.Generator().manual_seed(7)
        labels = torch.randint(0, 3, (20,), generator=generator)
        images = torch.randn(20, 3, SIZE, SIZE, generator=generator) + labels[:, None, None, None]
        self.images, self.labels = images[rank::world], labels[rank::world]

    def __len__(self) -> int:
        return 20

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.labels), 6):
            yield self.images[start : start + 6], self.labels[start : start + 6]


class TinyNetwork(nn.Module):
    """Convolution, dropout, a residual branch with stochastic depth, a head; batch norm on request."""

    num_classes = 3

    def __init__(self, *, drop: float = 0.2, norm: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6) if norm else nn.Identity()
        self.branch = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), nn.GELU(), nn.Dropout(drop))
        self.drop_path = DropPath(drop)
        self.head = nn.Linear(6, 3)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.norm(self.stem(images))
        tokens = tokens + self.drop_path(self.branch(tokens))
        return self.head(tokens.mean(dim=(2, 3)))


def network(**options: Any) -> TinyNetwork:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return TinyNetwork(**options)


def recipe(**changes: Any) -> Recipe:
    base = Recipe(
        name="tiny",
        epochs=3,
        batch=8,
        optimiser={"name": "adamw", "lr": 0.01, "weight_decay": 0.05},
        schedule={"name": "cosine", "warmup_epochs": 1},
        regularisation={"ema": 0.9, "clip": 1.0},
        run={"precision": "fp32"},
    )
    return base.override(changes)


def train(out: Path, options: argparse.Namespace) -> None:
    from spatially.train.loop import fit

    accelerator = Accelerator(cpu=True, mixed_precision="no")
    share = {"rank": accelerator.process_index, "world": accelerator.num_processes}
    chosen = recipe(**options.set)
    data = TinyData(chosen.batch, **share)
    original = data.batches

    def slowly(epoch: int, *, first_step: int = 0) -> Iterator[Batch]:
        for batch in original(epoch, first_step=first_step):
            time.sleep(options.slow)
            yield batch

    data.batches = slowly  # type: ignore[method-assign]
    fit(
        network(**options.network),
        data,
        TinyValidation(**share),
        chosen,
        out,
        identity=IDENTITY,
        accelerator=accelerator,
        save_steps=options.save_steps,
        curves=False,
        console=QUIET,
    )


def train_with_interruptions(out: Path, options: argparse.Namespace) -> dict[str, list[tuple[int, int]]]:
    """Once without, then in children that get a signal at a random moment each, until one comes to the end."""
    begin = time.perf_counter()
    ends = {"whole": [_child(out / "whole", options, None)]}
    duration = time.perf_counter() - begin
    moments = random.Random(options.seed)
    for name in options.signals:
        number = getattr(signal, name)
        # the moments spread over the whole run, however often it is started anew
        interruptions = [(number, moments.uniform(0, duration / 2)) for _ in range(options.times)]
        ends[name] = [_child(out / name, options, interruption) for interruption in [*interruptions, None]]
    return ends


def _child(out: Path, options: argparse.Namespace, interruption: tuple[int, float] | None) -> tuple[int, int]:
    """Train in a child process; its exit status, negative for a signal, and the step it began from."""
    start = starting_point(out, "auto")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    child = os.fork()
    if child == 0:
        code = 1
        # Before and after the training, while nothing is to be saved, a child just goes.
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        try:
            train(out, options)
            code = 0
        except SystemExit as error:
            code = int(error.code or 0)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    if interruption is not None:
        time.sleep(interruption[1])
        os.kill(child, interruption[0])
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0 if start is None else start.facts["updates"]


def main() -> None:
    import spatially.train.loop  # noqa: F401  # once, for all children

    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--set", type=json.loads, default={})
    parser.add_argument("--network", type=json.loads, default={})
    parser.add_argument("--slow", type=float, default=0.0)
    parser.add_argument("--save-steps", type=int, default=2)
    parser.add_argument("--signals", nargs="*", default=[])
    parser.add_argument("--times", type=int, default=6)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.signals:
        print(json.dumps(train_with_interruptions(options.out, options)))
        return
    train(options.out, options)
    leave()


if __name__ == "__main__":
    main()
