"""What only a GPU can show: no step waits for it, and a deterministic training resumes to the same bits."""

from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import pytest
import timm.optim
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from spatially.train.batch import Batch
from spatially.train.loop import fit
from spatially.train.optimiser import build_optimiser
from spatially.train.step import TrainingStep, training_step

tiny = SimpleNamespace(**run_path(str(Path(__file__).parent / "tiny.py")))
pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def on_device(batch: Batch) -> Batch:
    return Batch(batch.images.cuda(), batch.targets.cuda(), batch.labels.cuda())


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["adamw", "adamp", "sgd"])
def test_no_step_waits_for_the_device(name: str, compiled: bool, parts: int) -> None:
    changes = {"optimiser.name": name, "run.precision": "bf16", "run.compile": compiled, "run.accumulation": parts}
    step = training_step(tiny.network(norm=True), tiny.recipe(**changes), device="cuda")
    batches = [on_device(batch) for batch in tiny.TinyData().batches(0)]
    results = [step(batch) for batch in batches[:3]]  # compiles, chooses kernels, records graphs
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        results += [step(batch) for batch in batches]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.isfinite(torch.stack(results)).all()


def test_graphs_train_as_plain_passes_do() -> None:
    weights = []
    for compiled in (False, True):
        # Adam would make a step of rounding errors: a bias before a batch norm has no other gradient.
        changes = {"optimiser.name": "sgd", "run.precision": "fp32", "run.compile": compiled}
        step = training_step(tiny.network(drop=0.0, norm=True), tiny.recipe(**changes), device="cuda")
        for batch in [*tiny.TinyData().batches(0), *tiny.TinyData().batches(1)]:
            step(on_device(batch))
        weights.append({name: value.clone() for name, value in step.model.state_dict().items()})
    for name, value in weights[0].items():
        torch.testing.assert_close(weights[1][name], value, rtol=1e-4, atol=1e-5, msg=name)


def test_adamp_on_the_device_is_timms() -> None:
    recipe = tiny.recipe(**{"optimiser.name": "adamp", "run.precision": "fp64"})
    models = [tiny.network(drop=0.0, norm=True).double().cuda() for _ in range(2)]
    ours = build_optimiser(models[0], recipe)
    options = {"lr": 0.01, "weight_decay": 0.05, "betas": (0.9, 0.999), "eps": 1e-8}
    theirs = timm.optim.create_optimizer_v2(models[1], opt="adamp", **options)
    for batch in tiny.TinyData().batches(0):
        images = batch.images.double().cuda()
        models[1].zero_grad()
        models[1](images).square().mean().backward()
        for one, two in zip(*(model.parameters() for model in models), strict=True):
            one.grad = two.grad.clone()
        ours.step()
        theirs.step()
    for one, two in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["adamw", "adamp"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_deterministic_training_resumes_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, precision: str
) -> None:
    changes = {"optimiser.name": name, "run.precision": precision, "run.deterministic": True}

    def trained(out: Path) -> None:
        accelerator = Accelerator(mixed_precision="no")
        options: dict[str, Any] = {"save_steps": 3, "console": tiny.QUIET, "curves": False}
        fit(
            tiny.network(norm=True), tiny.TinyData(), tiny.TinyValidation(), tiny.recipe(**changes), out,
            identity=tiny.IDENTITY, accelerator=accelerator, **options,
        )  # fmt: skip

    trained(tmp_path / "whole")
    step, calls = TrainingStep.__call__, []

    def interrupted(self: TrainingStep, *arguments: Any) -> torch.Tensor:
        calls.append(1)
        if len(calls) == 8:
            raise RuntimeError("power cut")
        return step(self, *arguments)

    monkeypatch.setattr(TrainingStep, "__call__", interrupted)
    with pytest.raises(RuntimeError, match="power cut"):
        trained(tmp_path / "parts")
    trained(tmp_path / "parts")
    for part in ("weights", "average", "optimiser", "random"):
        found, expected = (
            load_file(tmp_path / out / "checkpoints/step-00000015" / f"{part}.safetensors")
            for out in ("parts", "whole")
        )
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], expected[key]) for key in expected), part
