"""One step against computations by hand, in float64."""

import math
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from spatially.train.batch import Batch
from spatially.train.recipe import Distillation
from spatially.train.step import Objective, training_step

tiny = SimpleNamespace(**run_path(str(Path(__file__).parent / "tiny.py")))


class Fixed(nn.Module):
    """Answers with what it is given, with a second row of answers in training for the teacher."""

    def __init__(self, *answers: Tensor) -> None:
        super().__init__()
        self.answers = [nn.Parameter(answer) for answer in answers]

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, ...]:
        return self.answers[0] if len(self.answers) == 1 else tuple(self.answers)


def softmax(logits: np.ndarray) -> np.ndarray:
    powers = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


@pytest.fixture
def numbers() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(5)
    draw = {name: torch.randn(4, 3, generator=generator, dtype=torch.float64) * 2 for name in ("one", "two", "teacher")}
    return draw | {"targets": torch.rand(4, 3, generator=generator, dtype=torch.float64).softmax(1)}


@pytest.mark.parametrize("token", [True, False])
@pytest.mark.parametrize("kind", ["hard", "soft", None])
def test_loss_by_hand(numbers: dict[str, Tensor], kind: str | None, token: bool) -> None:
    answers = [numbers["one"], numbers["two"]] if token else [numbers["one"]]
    wanted = None if kind is None else Distillation(teacher="x", kind=kind, alpha=0.3, temperature=2.5)
    labels = torch.tensor([0, 1, 2, 0])
    objective = Objective(Fixed(*answers), wanted)
    found = objective(torch.zeros(4), numbers["targets"], labels, numbers["teacher"]).detach()

    first, last, teacher = (value.numpy() for value in (answers[0], answers[-1], numbers["teacher"]))
    expected = -(numbers["targets"].numpy() * np.log(softmax(first))).sum(1).mean()
    if kind == "hard":
        taught = -np.log(softmax(last)[range(4), teacher.argmax(1)]).mean()
        expected = 0.7 * expected + 0.3 * taught
    elif kind == "soft":
        ours, theirs = softmax(last / 2.5), softmax(teacher / 2.5)
        expected = 0.7 * expected + 0.3 * 2.5**2 * (theirs * np.log(theirs / ours)).sum(1).mean()
    assert float(found[0]) == pytest.approx(expected, rel=1e-12)
    assert float(found[1]) == (first.argmax(1) == labels.numpy()).mean()


def states(**changes: Any) -> tuple[list[Tensor], list[list[float]]]:
    recipe = tiny.recipe(**{"run.precision": "fp64", "optimiser.name": "sgd", "regularisation.clip": None, **changes})
    step = training_step(tiny.network(drop=0.0), recipe)
    results = [step(batch).tolist() for batch in tiny.TinyData().batches(0)]
    return [parameter.detach() for parameter in step.model.parameters()], results


@pytest.mark.parametrize("parts", [2, 3, 8])
def test_accumulated_gradients_are_those_of_the_batch(parts: int) -> None:
    whole, expected = states()
    # the recipe asks for parts of the same size; a process's share may be cut unevenly all the same
    step_parts = {"run.accumulation": parts} if 8 % parts == 0 else {"run.accumulation": parts, "batch": 24}
    found, results = states(**step_parts)
    for one, two in zip(found, whole, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(results, expected, rtol=1e-12)


def test_clipped_gradient_has_the_norm_that_was_asked() -> None:
    batch = next(iter(tiny.TinyData().batches(0)))
    changes = {"optimiser.name": "sgd", "optimiser.momentum": 0.0, "optimiser.lr": 1.0, "optimiser.weight_decay": 0.0}
    moved = {}
    for clip in (None, 0.01, 1e6):
        recipe = tiny.recipe(**{"run.precision": "fp64", "regularisation.clip": clip, **changes})
        step = training_step(tiny.network(drop=0.0), recipe)
        before = [parameter.detach().clone() for parameter in step.model.parameters()]
        step(batch)
        after = [parameter.detach() for parameter in step.model.parameters()]
        moved[clip] = torch.cat([(two - one).flatten() for one, two in zip(before, after, strict=True)])
    assert float(moved[0.01].norm()) == pytest.approx(0.01, rel=1e-3)  # torch adds 1e-6 to the norm it divides by
    assert torch.equal(moved[None], moved[1e6])
    direction = moved[None] / moved[None].norm()
    assert float(direction @ moved[0.01] / moved[0.01].norm()) == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("precision", "computed"), [("bf16", torch.bfloat16), ("fp16", torch.float16), ("fp32", torch.float32)]
)
def test_half_precision_trains_weights_in_full(precision: str, computed: torch.dtype) -> None:
    seen = set()
    step = training_step(tiny.network(drop=0.0), tiny.recipe(**{"run.precision": precision, "optimiser.lr": 0.02}))
    step.model.stem.register_forward_hook(lambda module, given, output: seen.add(output.dtype))
    batch = next(iter(tiny.TinyData().batches(0)))
    losses = [float(step(batch)[0]) for _ in range(30)]
    assert losses[-1] < losses[0] - 0.1
    assert seen == {computed}
    assert all(parameter.dtype == torch.float32 for parameter in step.model.parameters())


def test_a_gradient_in_half_precision_is_clipped_as_it_is_and_not_as_it_was_scaled() -> None:
    changes = {"optimiser.name": "sgd", "optimiser.momentum": 0.0, "optimiser.lr": 1.0, "optimiser.weight_decay": 0.0}
    recipe = tiny.recipe(
        **{"run.precision": "fp16", "regularisation.clip": 0.01, "regularisation.ema": None, **changes}
    )
    step = training_step(tiny.network(drop=0.0), recipe)
    before = [parameter.detach().clone() for parameter in step.model.parameters()]
    step(next(iter(tiny.TinyData().batches(0))))
    moved = [(one.detach() - two).flatten() for one, two in zip(step.model.parameters(), before, strict=True)]
    assert float(torch.cat(moved).norm()) == pytest.approx(0.01, rel=1e-2)


def test_a_compiled_step_is_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the compiler gives is called for every part; weights keep their names and come out the same."""
    calls: list[int] = []

    def compiled(module: nn.Module, **_: Any) -> Any:
        def call(*given: Any) -> Tensor:
            calls.append(len(given[0]))
            return module(*given)

        return call

    plain, expected = states()
    monkeypatch.setattr(torch, "compile", compiled)
    found, results = states(**{"run.compile": True, "run.accumulation": 2})
    assert calls == [4, 4] * 5
    for one, two in zip(found, plain, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(results, expected, rtol=1e-12)


def test_channels_last_changes_nothing_but_the_layout() -> None:
    step = training_step(tiny.network(drop=0.0), tiny.recipe(**{"run.channels_last": True}))
    seen = []
    step.model.stem.register_forward_hook(lambda module, given, output: seen.append(given[0]))
    step(next(iter(tiny.TinyData().batches(0))))
    for one in (step.model.stem.weight, *seen):
        assert one.is_contiguous(memory_format=torch.channels_last)
        assert not one.is_contiguous()
    plain, expected = states()
    found, results = states(**{"run.channels_last": True})
    for one, two in zip(found, plain, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(results, expected, rtol=1e-10)


def test_a_teacher_is_asked_part_by_part() -> None:
    """Which would not fit into memory otherwise; its answers go to the images they are of."""
    sizes: list[int] = []

    def teacher(images: Tensor) -> Tensor:
        sizes.append(len(images))
        return images.mean(dim=(2, 3)) * 5

    found = []
    for parts in (1, 4):
        changes = {"run.precision": "fp64", "run.accumulation": parts, "distillation": {"teacher": "x", "kind": "soft"}}
        step = training_step(tiny.network(drop=0.0), tiny.recipe(**changes), teacher=teacher)
        found.append([step(batch).tolist() for batch in tiny.TinyData().batches(0)])
    assert sizes == [8] * 5 + [2] * 20
    np.testing.assert_allclose(found[1], found[0], rtol=1e-9)


def test_distillation_token_is_switched_on_with_a_teacher_and_off_without() -> None:
    import timm

    import spatially.models  # noqa: F401

    model = timm.create_model("pit_tiny_distilled", img_size=32, num_classes=3)
    wanted = {"distillation": {"teacher": "x"}, "run.precision": "fp32"}
    step = training_step(model, tiny.recipe(**wanted), teacher=lambda images: torch.eye(3)[torch.zeros(2, dtype=int)])
    images, labels = torch.randn(2, 3, 32, 32), torch.tensor([0, 1])
    loss = step(Batch(images, torch.eye(3)[labels], labels))[0]
    assert math.isfinite(float(loss))
    assert model.distilled_training
    training_step(model, tiny.recipe())
    assert not model.distilled_training
