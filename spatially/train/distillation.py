r"""Distillation: part of the loss asks for a teacher's answers (Touvron et al. 2021, section 4; Heo et al., section 4).

With the student's logits z for the labels, z' for the teacher (those of the distillation token, or z itself where there is
none), the teacher's t, and cross-entropy H:

.. math::
    \text{hard:}\quad & (1 - α)\,H(y, z) + α\,H(\operatorname{argmax} t, z') \\
    \text{soft:}\quad & (1 - α)\,H(y, z) + α\,τ^2\,\mathrm{KL}(σ(t/τ)\,\Vert\,σ(z'/τ)), \quad σ \text{ the softmax.}
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatially.errors import UserError
from spatially.subject import Subject, load
from spatially.subject.classes import ADVICE
from spatially.subject.preprocessing import Preprocessing
from spatially.train.recipe import Distillation, Recipe


def teacher_loss(answers: Tensor, teacher: Tensor, distillation: Distillation) -> Tensor:
    """What the student's answers lack of the teacher's: the term that α weighs."""
    if distillation.kind == "hard":
        return F.cross_entropy(answers, teacher.argmax(dim=-1))
    temperature = distillation.temperature
    student_log = F.log_softmax(answers / temperature, dim=-1)
    teacher_log = F.log_softmax(teacher / temperature, dim=-1)
    return F.kl_div(student_log, teacher_log, reduction="batchmean", log_target=True) * temperature**2


class Teacher:
    """Answers to the student's images, computed as they come: any size, any normalisation of either."""

    def __init__(self, subject: Subject, preprocessing: Preprocessing) -> None:
        self.subject = subject
        self._mean = torch.tensor(preprocessing.mean, device=subject.device).view(3, 1, 1)
        self._std = torch.tensor(preprocessing.std, device=subject.device).view(3, 1, 1)

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Logits (batch, classes) for images as the student takes them."""
        pixels = images.float() * self._std + self._mean
        size = self.subject.preprocessing.input_size
        if pixels.shape[-2:] != size:
            pixels = F.interpolate(pixels, size, mode="bicubic", antialias=True)
        return self.subject(pixels, overwrite=True)


def load_teacher(
    recipe: Recipe, classes: tuple[str, ...], preprocessing: Preprocessing, device: torch.device
) -> Teacher | None:
    """The recipe's teacher, answering in the data's classes; None without distillation."""
    wanted = recipe.distillation
    if wanted is None:
        return None
    try:
        subject = load(
            wanted.teacher,
            pretrained=wanted.pretrained,
            checkpoint=wanted.checkpoint,
            device=device,
            dtype={"bf16": "bfloat16", "fp16": "float16", "fp64": "float64"}.get(recipe.run.precision, "float32"),
            compile=recipe.run.compile,
            channels_last=recipe.run.channels_last,
        )
    except UserError as error:
        if not str(error).startswith("no weights for"):
            raise UserError(f"distillation.teacher: {wanted.teacher} cannot be opened: {error}") from error
        # What it advises would, in a training, be the student's.
        raise UserError(
            f"distillation.teacher: there are no weights for {wanted.teacher} here (none exist, or they could not be "
            "downloaded): give a trained folder, --set distillation.teacher=FOLDER, or the teacher's weights, "
            "--set distillation.checkpoint=FILE"
        ) from error
    try:
        aligned = subject.align(classes, torch.arange(len(classes)))
    except UserError as error:
        # What it advises would need a class map, which a training does not take.
        reason = str(error).removesuffix(f": {ADVICE}").removesuffix(": it cannot be measured on them")
        raise UserError(
            f"distillation.teacher: {wanted.teacher} does not know the data's classes: {reason}; train a teacher on these "
            "classes first and give its folder, --set distillation.teacher=FOLDER, or call the classes as the teacher does"
        ) from error
    return Teacher(aligned, preprocessing)


def use_token(model: nn.Module, recipe: Recipe) -> None:
    """Let a model with a distillation token answer with it too while it trains, where there is a teacher to learn from."""
    switch: Any = getattr(model, "set_distilled_training", None)
    if getattr(model, "head_dist", None) is not None and switch is not None:
        switch(recipe.distillation is not None)
