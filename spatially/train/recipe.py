"""A recipe: everything that decides a training but the model and the data, as one YAML file.

`batch` is what one step of the optimiser sees: over all processes and accumulated micro-batches together. A rate that goes
with the batch is written for a batch of `lr_per` images, so that the rate in force is lr · batch / lr_per.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, ClassVar, Literal

from spatially.errors import UserError
from spatially.train.augment.rand_augment import RandAugment
from spatially.train.settings import Settings, setting

SMALLEST = 8  # side of an image
_ALONG = "or give the epochs by --epochs, which brings the schedule along"


@dataclass(frozen=True, kw_only=True)
class Optimiser(Settings):
    """Of timm's. `momentum` is SGD's, `betas` and `eps` are Adam's; `nesterov` only where the paper says so."""

    section: ClassVar[str] = "optimiser"
    name: Literal["sgd", "adamw", "adamp"]
    lr: float = setting(above=0)
    lr_per: int | None = setting(None, least=1)
    momentum: float = setting(0.9, least=0, most=1)
    nesterov: bool = False
    weight_decay: float = setting(0.0, least=0)
    betas: tuple[float, float] = setting((0.9, 0.999), least=0, below=1)
    eps: float = setting(1e-8, above=0)

    def check(self) -> None:
        if self.name == "sgd" and self.nesterov and not self.momentum:
            raise UserError("optimiser.nesterov needs an optimiser.momentum above 0, but that came as 0")


@dataclass(frozen=True, kw_only=True)
class Schedule(Settings):
    """How the rate goes: `constant`, `cosine` down to `min_lr`, or `step` (times `factor` after each milestone).

    A cosine stays where it is if a small batch brings its rate below `min_lr`.
    A warm-up rises from `warmup_lr` in `warmup_epochs`: out of the recipe's epochs, or before them with `warmup_before`.
    The rate changes with every step of the optimiser or every epoch.
    """

    section: ClassVar[str] = "schedule"
    name: Literal["cosine", "step", "constant"] = "cosine"
    warmup_epochs: int = setting(0, least=0)
    warmup_lr: float = setting(1e-6, least=0)
    warmup_before: bool = False
    min_lr: float = setting(0.0, least=0)
    milestones: tuple[int, ...] = setting((), least=1)
    factor: float = setting(0.1, above=0, most=1)
    every: Literal["step", "epoch"] = "step"

    def check(self) -> None:
        if self.name == "step" and not self.milestones:
            raise UserError("schedule.milestones must name at least one epoch for a step schedule, but came as []")
        if self.name != "step" and self.milestones:
            raise UserError(f"schedule.milestones belong to a step schedule, but schedule.name is {self.name}")
        if list(self.milestones) != sorted(set(self.milestones)):
            raise UserError(f"schedule.milestones must rise, but came as {list(self.milestones)}")


@dataclass(frozen=True, kw_only=True)
class Augmentation(Settings):
    """What is done to images. As in timm, `jitter` of colours acts only without `rand_augment`.

    `crop`: `resized` draws a share of the area within `scale` and `ratio`; `padded` adds `padding` and cuts the size out;
    `none` takes the middle as in validation. `erase` is a probability; `mixup` and `cutmix` are their α, 0 for off;
    `mix_probability` says how often either is applied, `mix_switch` how often it is CutMix where both are on.
    """

    section: ClassVar[str] = "augmentation"
    crop: Literal["resized", "padded", "none"] = "resized"
    scale: tuple[float, float] = setting((0.08, 1.0), above=0, most=1)
    ratio: tuple[float, float] = setting((3 / 4, 4 / 3), above=0)
    padding: int = setting(4, least=0)
    flip: float = setting(0.5, least=0, most=1)
    rand_augment: str | None = None
    jitter: float = setting(0.0, least=0)
    erase: float = setting(0.0, least=0, most=1)
    mixup: float = setting(0.0, least=0)
    cutmix: float = setting(0.0, least=0)
    mix_probability: float = setting(1.0, least=0, most=1)
    mix_switch: float = setting(0.5, least=0, most=1)
    repeats: int = setting(1, least=1)
    interpolation: Literal["bilinear", "bicubic", "random"] = "bicubic"

    def check(self) -> None:
        for name in ("scale", "ratio"):
            low, high = getattr(self, name)
            if low > high:
                raise UserError(f"augmentation.{name} must rise, but came as [{low:g}, {high:g}]")
        if self.rand_augment is not None:
            RandAugment.read(self.rand_augment)


@dataclass(frozen=True, kw_only=True)
class Regularisation(Settings):
    """Label smoothing, stochastic depth, dropout, the gradient's largest norm, the decay of an average of the weights."""

    section: ClassVar[str] = "regularisation"
    smoothing: float = setting(0.0, least=0, most=0.999)
    drop_path: float = setting(0.0, least=0, most=0.999)
    dropout: float = setting(0.0, least=0, most=0.999)
    clip: float | None = setting(None, above=0)
    ema: float | None = setting(None, above=0, most=0.9999999)


@dataclass(frozen=True, kw_only=True)
class Distillation(Settings):
    """A teacher (any model name) whose answers count α of the loss: its class (`hard`) or its softened logits (`soft`)."""

    section: ClassVar[str] = "distillation"
    teacher: str
    kind: Literal["hard", "soft"] = "hard"
    alpha: float = setting(0.5, least=0, most=1)
    temperature: float = setting(3.0, above=0)
    pretrained: bool = True
    checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class Initialisation(Settings):
    """What training starts from: random weights, pretrained ones, or a checkpoint.

    From weights, the `head` is drawn anew or kept (which needs the same classes); `positions` are kept, drawn anew, or zero.
    """

    section: ClassVar[str] = "initialisation"
    pretrained: bool = False
    checkpoint: str | None = None
    head: Literal["reset", "keep"] = "reset"
    positions: Literal["keep", "reset", "zero"] = "keep"


@dataclass(frozen=True, kw_only=True)
class Model(Settings):
    """What a recipe asks of the model, as far as its constructor takes it: the images' side, a patch's side, and more.

    `qk_norm` normalises queries and keys of models that have a convolution for one of their projections, and of no others; null
    does so unless training starts from weights that were trained without.
    """

    section: ClassVar[str] = "model"
    input_size: int | None = setting(None, least=SMALLEST)
    patch_size: int | None = setting(None, least=1)
    qk_norm: bool | None = None
    arguments: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Data(Settings):
    """The shares of training, validation and test images of a set that has no split of its own."""

    section: ClassVar[str] = "data"
    split: tuple[float, float, float] = setting((0.7, 0.15, 0.15), least=0, most=1)

    def check(self) -> None:
        if abs(sum(self.split) - 1) > 1e-6 or self.split[0] == 0 or self.split[1] == 0:
            raise UserError(
                f"data.split must be the shares of train, validation and test, which sum to 1 and of which only the last "
                f"may be 0, but came as {list(self.split)}"
            )


@dataclass(frozen=True, kw_only=True)
class Run(Settings):
    """How it is computed. Precision `auto` is bf16 on CUDA and fp32 on CPU."""

    section: ClassVar[str] = "run"
    precision: Literal["auto", "bf16", "fp16", "fp32", "fp64"] = "auto"
    compile: bool = False
    channels_last: bool = False
    checkpointing: bool = False
    accumulation: int = setting(1, least=1)
    seed: int = setting(0, least=0, most=2**63 - 1)
    deterministic: bool = False


@dataclass(frozen=True, kw_only=True)
class Recipe(Settings):
    """See the module's text; `paper` is a key of `spatially.models.PAPERS`, or empty."""

    name: str
    paper: str = ""
    epochs: int = setting(least=1)
    batch: int = setting(least=1)
    optimiser: Optimiser
    schedule: Schedule = Schedule()
    augmentation: Augmentation = Augmentation()
    regularisation: Regularisation = Regularisation()
    distillation: Distillation | None = None
    initialisation: Initialisation = Initialisation()
    model: Model = field(default_factory=Model)
    data: Data = Data()
    run: Run = Run()

    def check(self) -> None:
        last = max(self.schedule.milestones, default=0)
        if last >= self.total_epochs:
            raise UserError(
                f"schedule.milestones must lie before the last of {self.total_epochs} epochs, got {last}: change them too, "
                f"{_ALONG}"
            )
        if self.schedule.warmup_epochs > self.epochs and not self.schedule.warmup_before:
            raise UserError(
                f"schedule.warmup_epochs must be at most the {self.epochs} epochs, but came as "
                f"{self.schedule.warmup_epochs}: change it too, {_ALONG}"
            )
        if self.batch % self.run.accumulation:
            raise UserError(
                f"run.accumulation must divide the batch of {self.batch}, but came as {self.run.accumulation}"
            )

    @property
    def total_epochs(self) -> int:
        """With the warm-up where it comes before the epochs."""
        return self.epochs + (self.schedule.warmup_epochs if self.schedule.warmup_before else 0)

    @property
    def learning_rate(self) -> float:
        """The rate in force at the recipe's batch."""
        optimiser = self.optimiser
        return optimiser.lr * (1.0 if optimiser.lr_per is None else self.batch / optimiser.lr_per)

    def within(self, epochs: int) -> Recipe:
        """The same recipe in another number of epochs: warm-up (at most half of them) and milestones keep their share."""
        if epochs == self.epochs:
            return self
        share = epochs / self.epochs
        milestones = dict.fromkeys(min(max(1, round(one * share)), epochs) for one in self.schedule.milestones)
        warmup = min(ceil(self.schedule.warmup_epochs * share), epochs // 2)
        changes: dict[str, Any] = {"epochs": epochs, "schedule.warmup_epochs": warmup}
        if any(one < epochs for one in milestones):
            changes["schedule.milestones"] = [one for one in milestones if one < epochs]
        elif milestones:  # one epoch leaves no room for a step
            changes |= {"schedule.name": "constant", "schedule.milestones": []}
        return self.override(changes)

    def resolve(self, *, batch: int | None = None) -> Recipe:
        """For this batch: its rate as one number, which no longer goes with the batch."""
        here = self if batch is None else replace(self, batch=batch)
        return replace(here, optimiser=replace(here.optimiser, lr=here.learning_rate, lr_per=None))
