"""Trainings that run through, are killed, asked to stop, diverge, or run in two processes."""

import csv
import io
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate.tracking import GeneralTracker
from rich.console import Console
from safetensors.torch import load_file
from torch import Tensor

from spatially.errors import UserError
from spatially.train.card import Identity
from spatially.train.guard import Diverged, Stopped
from spatially.train.loop import fit
from spatially.train.progress import History
from spatially.train.step import TrainingStep

SCRIPT = Path(__file__).parent / "tiny.py"
tiny = SimpleNamespace(**run_path(str(SCRIPT)))
TWO = ("-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone")
TIMES = {"seconds", "images_per_second", "memory_bytes"}


def trained(out: Path, *, model: torch.nn.Module | None = None, changes: Any = None, **options: Any) -> History:
    return fit(
        model or tiny.network(),
        options.pop("data", None) or tiny.TinyData(),
        options.pop("validation", None) or tiny.TinyValidation(),
        tiny.recipe(**(changes or {})),
        out,
        **{"identity": tiny.IDENTITY, "console": tiny.QUIET, "curves": False, **options},
    )


def tensors(folder: Path) -> dict[str, Tensor]:
    return {
        f"{path.stem}/{name}": value
        for path in sorted(folder.glob("*.safetensors"))
        for name, value in load_file(path).items()
    }


def assert_same(one: Path, two: Path) -> None:
    """Everything a training ends with, bit for bit."""
    last, other = (sorted((out / "checkpoints").iterdir())[-1] for out in (one, two))
    assert last.name == other.name
    found, expected = tensors(last), tensors(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()
    assert (one / "best/model.safetensors").read_bytes() == (two / "best/model.safetensors").read_bytes()
    rows, others = (list(csv.DictReader((out / "log.csv").open())) for out in (one, two))
    assert [{key: row[key] for key in row if key not in TIMES} for row in rows] == [
        {key: row[key] for key in row if key not in TIMES} for row in others
    ]
    lines, more = ((out / "log.jsonl").read_text().splitlines() for out in (one, two))
    assert [(json.loads(line)["step"], json.loads(line)["train_loss"]) for line in lines] == [
        (json.loads(line)["step"], json.loads(line)["train_loss"]) for line in more
    ]


def run(*arguments: str, launcher: tuple[str, ...] = ()) -> str:
    done = subprocess.run(
        [sys.executable, *launcher, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_killed_or_asked_to_stop_at_random_moments_it_ends_with_the_same_bits(tmp_path: Path) -> None:
    options = ["--network", json.dumps({"norm": True}), "--slow", "0.004", "--times", "5"]
    said = run(
        str(tmp_path),
        "--signals",
        "SIGKILL",
        "SIGTERM",
        *options,
        "--seed",
        str(np.random.default_rng().integers(1 << 30)),
    )
    ends = json.loads(said.splitlines()[-1])
    assert ends["whole"] == [[0, 0]]
    assert ends["SIGKILL"][0][0] == -9
    assert all(code == 0 for code, _ in ends["SIGTERM"]), ends
    assert any(0 < step < 15 for name in ("SIGKILL", "SIGTERM") for _, step in ends[name]), ends  # really interrupted
    for name in ("SIGKILL", "SIGTERM"):
        assert ends[name][-1][0] == 0
        assert_same(tmp_path / name, tmp_path / "whole")


@pytest.mark.parametrize("stop", [1, 4, 5, 7, 15])
def test_interrupted_in_the_same_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int) -> None:
    changes = {"optimiser.name": "adamp", "run.accumulation": 2}
    trained(tmp_path / "whole", changes=changes, save_steps=3, log_steps=2)
    step, calls = TrainingStep.__call__, []

    def interrupted(self: TrainingStep, *arguments: Any) -> Tensor:
        calls.append(1)
        if len(calls) == stop:
            raise RuntimeError("power cut")
        return step(self, *arguments)

    monkeypatch.setattr(TrainingStep, "__call__", interrupted)
    with pytest.raises(RuntimeError, match="power cut"):
        trained(tmp_path / "parts", changes=changes, save_steps=3, log_steps=2)
    trained(tmp_path / "parts", changes=changes, save_steps=3, log_steps=2)
    assert_same(tmp_path / "parts", tmp_path / "whole")
    assert len(calls) == stop + 15 - 3 * ((stop - 1) // 3)  # it went on from the last checkpoint


def test_finished_training_is_not_trained_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = trained(tmp_path, test=tiny.TinyValidation())
    monkeypatch.setattr(TrainingStep, "__call__", lambda *_: pytest.fail("trained again"))
    before = {path: path.stat().st_mtime_ns for path in [*tmp_path.glob("*.*"), *tmp_path.glob("best/*")]}
    console = Console(record=True, width=200, file=io.StringIO())
    assert trained(tmp_path, test=tiny.TinyValidation(), console=console) == first
    assert "is trained already: nothing is left to do" in console.export_text()
    written = {path.name for path, time in before.items() if path.stat().st_mtime_ns != time}
    assert written == {"log.csv", "log.jsonl"}  # cut back to the checkpoint
    (tmp_path / "README.md").unlink()  # as if it had been interrupted while it was delivered
    trained(tmp_path, test=tiny.TinyValidation())
    assert (tmp_path / "README.md").is_file()


def stopped_in(step: int, monkeypatch: pytest.MonkeyPatch, out: Path, **options: Any) -> None:
    """Train until the power goes out in some step."""
    call = TrainingStep.__call__

    def interrupted(self: TrainingStep, *arguments: Any) -> Tensor:
        if self.updates == step:
            raise RuntimeError("power cut")
        return call(self, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingStep, "__call__", interrupted)
        with pytest.raises(RuntimeError, match="power cut"):
            trained(out, **options)


def checkpoints(out: Path) -> list[str]:
    return sorted(path.name for path in (out / "checkpoints").glob("step-*"))


def test_a_short_training_is_saved_after_its_first_epoch_and_then_twice_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_in(12, monkeypatch, tmp_path / "short")
    assert checkpoints(tmp_path / "short") == ["step-00000005"]
    monkeypatch.setattr("spatially.train.loop.EPOCH_SECONDS", 0.0)
    monkeypatch.setattr("spatially.train.loop.SAVING_SHARE", 1e9)
    stopped_in(12, monkeypatch, tmp_path / "long")
    assert checkpoints(tmp_path / "long") == ["step-00000005", "step-00000010"]
    monkeypatch.setattr("spatially.train.loop.SAVING_SHARE", 1e-9)
    stopped_in(12, monkeypatch, tmp_path / "large")
    assert checkpoints(tmp_path / "large") == ["step-00000005"]  # whose checkpoints take long to write


def test_a_folder_that_another_process_trains_in_is_left_alone(tmp_path: Path) -> None:
    holding = (
        "import sys, pathlib; from spatially.train.lock import alone\n"
        "with alone(pathlib.Path(sys.argv[1]), main=True): print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", holding, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    with pytest.raises(UserError, match="another training is writing to"):
        trained(tmp_path)
    assert not (tmp_path / "checkpoints").exists()
    other.kill()
    other.communicate()
    trained(tmp_path)  # what a killed process held is free
    assert not list(tmp_path.glob(".*"))


def test_every_step_has_the_rate_of_its_schedule_also_after_an_interruption(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    call, rates = TrainingStep.__call__, []

    def noted(self: TrainingStep, *arguments: Any) -> Tensor:
        rates.append([group["lr"] for group in self.optimiser.param_groups])
        return call(self, *arguments)

    monkeypatch.setattr(TrainingStep, "__call__", noted)
    stopped_in(7, monkeypatch, tmp_path, save_steps=7, log_steps=1)
    trained(tmp_path, save_steps=7, log_steps=1)
    # 5 steps up to 0.01, from the least rate of a warm-up, and the rest of a cosine of 15
    expected = [1e-6 + (0.01 - 1e-6) * step / 5 for step in range(5)]
    expected += [0.01 * (1 + math.cos(math.pi * step / 15)) / 2 for step in range(5, 15)]
    for found, rate in zip(rates, expected, strict=True):
        assert found == pytest.approx([rate] * len(found))
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    logged = {record["step"]: record["rate"] for record in records if record["kind"] == "step"}
    assert logged == pytest.approx(dict(enumerate(expected, start=1)))


def test_generators_are_left_as_they_were(tmp_path: Path) -> None:
    torch.manual_seed(11)
    np.random.seed(11)  # noqa: NPY002
    expected = torch.rand(3), np.random.rand(3)  # noqa: NPY002
    torch.manual_seed(11)
    np.random.seed(11)  # noqa: NPY002
    trained(tmp_path)
    assert torch.equal(torch.rand(3), expected[0])
    assert np.array_equal(np.random.rand(3), expected[1])  # noqa: NPY002


def test_two_processes_are_one_with_the_doubled_batch(tmp_path: Path) -> None:
    """Though they take their shares in parts, and tell each other gradients with the last part alone."""
    changes = {"run.precision": "fp64", "optimiser.name": "sgd", "batch": 16, "optimiser.lr": 0.1}
    settings = json.dumps(changes)
    arguments = ["--set", json.dumps(changes | {"run.accumulation": 2}), "--network", json.dumps({"drop": 0.0})]
    run(str(tmp_path / "two"), *arguments, launcher=TWO)
    model = tiny.network(drop=0.0)
    history = trained(tmp_path / "one", model=model, data=tiny.TinyData(16), changes=json.loads(settings), save_steps=2)
    found, expected = load_file(tmp_path / "two/model.safetensors"), load_file(tmp_path / "one/model.safetensors")
    start = tiny.network(drop=0.0).state_dict()
    for name, value in expected.items():
        assert value.dtype == torch.float64
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)
        assert not torch.allclose(value, start[name].double(), atol=1e-3)  # it has moved far more than that
    rows = list(csv.DictReader((tmp_path / "two/log.csv").open()))
    for row, other in zip(rows, history.rows, strict=True):
        for name in ("train_loss", "train_accuracy", "validation_loss", "validation_accuracy"):
            assert float(row[name]) == pytest.approx(other[name], abs=1e-9)


@pytest.mark.slow
def test_two_processes_killed_end_with_the_same_bits(tmp_path: Path) -> None:
    options = ["--network", json.dumps({"norm": True}), "--slow", "0.05"]
    run(str(tmp_path / "whole"), *options, launcher=TWO)
    words = [sys.executable, *TWO, str(SCRIPT), str(tmp_path / "parts"), *options]
    group = subprocess.Popen(words, start_new_session=True, stderr=subprocess.DEVNULL)
    while not list((tmp_path / "parts").glob("checkpoints/step-*")):
        assert group.poll() is None
        time.sleep(0.01)
    os.killpg(group.pid, signal.SIGKILL)
    group.wait()
    assert not (tmp_path / "parts/model.safetensors").exists()
    run(str(tmp_path / "parts"), *options, launcher=TWO)
    assert_same(tmp_path / "parts", tmp_path / "whole")
    states = load_file(sorted((tmp_path / "whole/checkpoints").iterdir())[-1] / "random.safetensors")
    assert not torch.equal(states["0.cpu"], states["1.cpu"])  # each process draws for itself


class Poisoned(tiny.TinyData):  # type: ignore[name-defined,misc]
    """Images that are no numbers from some step on."""

    bad = 8

    def batches(self, epoch: int, *, first_step: int = 0) -> Any:
        for number, batch in enumerate(super().batches(epoch, first_step=first_step), start=epoch * 5 + first_step):
            if number >= self.bad:
                batch.images.fill_(float("nan"))
            yield batch


def test_a_loss_that_is_no_number_stops_with_the_last_good_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(Diverged, match=r"the loss is nan at step 8; the last good checkpoint is .*step-00000008"):
        trained(tmp_path, data=Poisoned(), save_steps=4)
    with pytest.raises(Diverged, match=r"and the best weights, of epoch 1, are .*best\. A smaller"):
        trained(tmp_path, data=Poisoned(), save_steps=4)
    kept = tensors(tmp_path / "checkpoints/step-00000008")
    assert all(torch.isfinite(value).all() for value in kept.values() if value.is_floating_point())
    trained(tmp_path, save_steps=4)  # with healthy images it goes on from there
    trained(tmp_path / "healthy", save_steps=4)
    assert_same(tmp_path, tmp_path / "healthy")


def test_an_exploding_loss_stops(tmp_path: Path) -> None:
    changes = {"optimiser.name": "sgd", "optimiser.lr": 100.0, "optimiser.momentum": 0.0, "schedule.warmup_epochs": 0}
    with pytest.raises(Diverged, match=r"the loss was above 11 for 20 steps, up to step \d+; there is no checkpoint"):
        trained(tmp_path, changes=changes, data=tiny.TinyData(steps=20))


def test_a_rate_that_destroys_the_weights_within_an_epoch_is_told(tmp_path: Path) -> None:
    changes = {"optimiser.name": "sgd", "optimiser.lr": 1e38, "schedule.warmup_epochs": 0, "regularisation.ema": None}
    with pytest.raises(Diverged, match="weights are no numbers any more after 1 steps; there is no checkpoint"):
        trained(tmp_path, changes=changes, data=tiny.TinyData(steps=1))
    assert not (tmp_path / "best").exists()


def test_an_epoch_whose_validation_loss_is_not_finite_is_not_the_best(tmp_path: Path) -> None:
    images = tiny.TinyValidation()
    images.images[0] = float("inf")
    history = trained(tmp_path, validation=images)
    assert [row["validation_loss"] for row in history.rows] == [None] * 3
    assert history.best_epoch is None
    assert not (tmp_path / "best").exists()


def test_weights_that_are_no_numbers_are_not_the_best(tmp_path: Path) -> None:
    model = tiny.network()
    model.unused = torch.nn.Parameter(torch.tensor([float("inf")]))
    with pytest.raises(Diverged, match="weights are no numbers"):
        trained(tmp_path, model=model)
    assert not (tmp_path / "best").exists()


@pytest.mark.parametrize("last", [0, 3])
def test_loader_whose_workers_the_signal_ended_too_is_saved_all_the_same(tmp_path: Path, last: int) -> None:
    class Ended(tiny.TinyData):  # type: ignore[name-defined,misc]
        def batches(self, epoch: int, *, first_step: int = 0) -> Any:
            for number, batch in enumerate(super().batches(epoch, first_step=first_step)):
                if number == last:
                    os.kill(os.getpid(), signal.SIGTERM)
                    raise RuntimeError("worker exited unexpectedly")
                yield batch

    with pytest.raises(Stopped) as stopped:
        trained(tmp_path / "parts", data=Ended())
    assert stopped.value.code == 0
    assert [path.name for path in (tmp_path / "parts/checkpoints").iterdir()] == [f"step-{last:08d}"]
    trained(tmp_path / "parts")
    trained(tmp_path / "whole")
    assert_same(tmp_path / "parts", tmp_path / "whole")


def test_data_that_ends_early_is_an_error(tmp_path: Path) -> None:
    class Short(tiny.TinyData):  # type: ignore[name-defined,misc]
        def batches(self, epoch: int, *, first_step: int = 0) -> Any:
            yield from list(super().batches(epoch, first_step=first_step))[:3]

    with pytest.raises(RuntimeError, match="gave 3 of 5 batches of epoch 0"):
        trained(tmp_path, data=Short())


def test_weights_that_are_no_numbers_are_not_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = TrainingStep.__call__

    def breaking(self: TrainingStep, *arguments: Any) -> Tensor:
        result = step(self, *arguments)
        if self.updates == 4:
            with torch.no_grad():
                self.parameters[0].fill_(float("inf"))
        return result

    monkeypatch.setattr(TrainingStep, "__call__", breaking)
    with pytest.raises(Diverged, match=r"weights are no numbers any more after 4 steps; the last good .*step-00000002"):
        trained(tmp_path, save_steps=2)


def test_another_recipe_model_or_data_is_refused(tmp_path: Path) -> None:
    trained(tmp_path)
    with pytest.raises(UserError, match=r"another recipe \(optimiser\.lr 0\.01, now 0\.02\)"):
        trained(tmp_path, changes={"optimiser.lr": 0.02})
    with pytest.raises(UserError, match="another model"):
        trained(tmp_path, identity=Identity(name="other", preprocessing=tiny.IDENTITY.preprocessing))
    with pytest.raises(UserError, match="another model"):
        trained(tmp_path, model=tiny.network(norm=True))
    with pytest.raises(UserError, match=r"another data set \(steps_per_epoch 5, now 6\)"):
        trained(tmp_path, data=tiny.TinyData(steps=6))
    with pytest.raises(UserError, match="holds a training already"):
        trained(tmp_path, resume=None)
    with pytest.raises(UserError, match="holds no checkpoint"):
        trained(tmp_path / "new", resume=tmp_path / "none")


def test_a_folder_of_another_size_other_arguments_or_other_images_is_refused(tmp_path: Path) -> None:
    def data(**facts: Any) -> Any:
        made = tiny.TinyData()
        made.__dict__.update(facts)
        return made

    arguments = Identity(name="tiny", preprocessing=tiny.IDENTITY.preprocessing, options={"widths": (2, 3)})
    trained(tmp_path, data=data(fingerprint="40 images a"), identity=arguments)
    trained(tmp_path, data=data(fingerprint="40 images a"), identity=arguments)
    trained(tmp_path, identity=arguments)  # of these images nothing is known
    for options, what in (
        ({"data": data(fingerprint="40 images b")}, r"another data set \(data 40 images a, now 40 images b\)"),
        ({"data": data(classes=("a", "b", "d"))}, r"3 classes, now 3; the first that differs was 'c', now 'd'\)"),
        ({"data": data(classes=("a", "b"))}, r"3 classes, now 2; the first that differs was 'c', now none\)"),
        ({"data": data(size=(9, 9))}, r"another input size \(input_size \[8, 8\], now \[9, 9\]\)"),
        ({"identity": tiny.IDENTITY}, r"another model \(arguments .*2, 3.*, now {}\)"),
    ):
        with pytest.raises(UserError, match=what + "; give another --out"):
            trained(tmp_path, **{"identity": arguments, **options})
    for state in (tmp_path / "checkpoints").glob("*/state.json"):
        facts = json.loads(state.read_text())
        for key in ("arguments", "input_size", "data"):
            del facts[key]
        state.write_text(json.dumps(facts))
    trained(tmp_path)  # as checkpoints were before they told


def test_images_are_not_brought_in_another_way_within_a_training(tmp_path: Path) -> None:
    def data(**facts: Any) -> Any:
        made = tiny.TinyData()
        made.__dict__.update(facts)
        return made

    trained(tmp_path, data=data(resident=True))
    trained(tmp_path, data=data())  # of these nothing is known
    output = io.StringIO()
    console = Console(file=output, force_terminal=True)
    expected = r"kept in memory \(--resident\), and now they would be read again each epoch \(--loader\), which draws"
    with pytest.raises(UserError, match=expected):
        trained(tmp_path, data=data(resident=False), console=console)
    assert output.getvalue() == ""  # no bar of a training that does not begin
    for state in (tmp_path / "checkpoints").glob("*/state.json"):
        facts = json.loads(state.read_text())
        del facts["resident"]
        state.write_text(json.dumps(facts))
    trained(tmp_path, data=data(resident=False))  # as checkpoints were before they told


def test_goes_on_from_another_folder(tmp_path: Path) -> None:
    trained(tmp_path / "one", save_steps=4)
    trained(tmp_path / "two", save_steps=4, resume=sorted((tmp_path / "one/checkpoints").iterdir())[0])
    assert (tmp_path / "one/model.safetensors").read_bytes() == (tmp_path / "two/model.safetensors").read_bytes()


def test_a_continuation_is_gone_on_with_and_has_the_best_weights_of_both(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_in(7, monkeypatch, tmp_path / "one", save_steps=3)
    other = {"resume": tmp_path / "one", "save_steps": 3}
    stopped_in(8, monkeypatch, tmp_path / "two", **other)
    assert (tmp_path / "two/best/model.safetensors").is_file()
    assert checkpoints(tmp_path / "two") == ["step-00000006"]
    shutil.rmtree(tmp_path / "one")
    stopped_in(13, monkeypatch, tmp_path / "two", **other)  # the same command
    assert checkpoints(tmp_path / "two")[-1] == "step-00000012"
    trained(tmp_path / "two", **other)
    trained(tmp_path / "whole", save_steps=3)
    assert_same_weights(tmp_path / "two", tmp_path / "whole")


def assert_same_weights(one: Path, two: Path) -> None:
    for name in ("model.safetensors", "best/model.safetensors"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


def test_another_finished_run_is_not_gone_over(tmp_path: Path) -> None:
    trained(tmp_path / "one")
    trained(tmp_path / "two", changes={"run.seed": 1})
    before = tensors(tmp_path / "two")
    with pytest.raises(UserError, match=r"another recipe \(run\.seed 1, now 0\); give another --out"):
        trained(tmp_path / "two", resume=tmp_path / "one")
    assert all(torch.equal(value, before[name]) for name, value in tensors(tmp_path / "two").items())


def test_a_checkpoint_without_the_best_weights_beside_it_will_do(tmp_path: Path) -> None:
    trained(tmp_path / "one")
    shutil.rmtree(tmp_path / "one/best")
    history = trained(tmp_path / "two", resume=tmp_path / "one", test=tiny.TinyValidation())
    assert history.best_epoch is None
    assert "test_loss" in history.results


def test_trained_folder_loads_with_the_same_logits(tmp_path: Path) -> None:
    import timm

    import spatially.models

    options = {"img_size": 32, "dims": (8, 16), "heads": (1, 2), "depths": (1, 1), "patch_size": 8, "stride": 8}
    model = timm.create_model("pit_tiny", num_classes=3, **options)
    preprocessing = spatially.subject.Preprocessing(
        (32, 32), resize=(36, 36), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4)
    )
    identity = Identity(name="pit_tiny", options=options, preprocessing=preprocessing, data="noise")

    class Larger(tiny.TinyData):  # type: ignore[name-defined,misc]
        size = (32, 32)

        def batches(self, epoch: int, *, first_step: int = 0) -> Any:
            for batch in super().batches(epoch, first_step=first_step):
                images = torch.nn.functional.interpolate(batch.images, (32, 32))
                yield type(batch)(images, batch.targets, batch.labels)

    class LargerValidation(tiny.TinyValidation):  # type: ignore[name-defined,misc]
        def batches(self) -> Any:
            for images, labels in super().batches():
                yield torch.nn.functional.interpolate(images, (32, 32)), labels

    changes = {"regularisation.ema": None, "epochs": 2}
    history = trained(
        tmp_path, model=model, data=Larger(), validation=LargerValidation(), test=LargerValidation(), identity=identity,
        changes=changes, curves=True,
    )  # fmt: skip
    subject = spatially.load(str(tmp_path), device="cpu")
    images = torch.rand(4, 3, 32, 32)
    model.eval()
    with torch.no_grad():
        expected = model(
            (images - torch.tensor([0.4, 0.5, 0.6]).view(3, 1, 1)) / torch.tensor([0.2, 0.3, 0.4]).view(3, 1, 1)
        )
        assert torch.equal(subject(images), expected)
    assert subject.preprocessing == preprocessing
    assert subject.class_names == ("a", "b", "c")
    assert spatially.load(str(tmp_path / "best"), device="cpu").answers == 3
    assert history.results["test_accuracy"] == history.rows[-1]["validation_accuracy"]
    assert history.best_epoch is not None
    assert history.results["best_test_loss"] == pytest.approx(history.rows[history.best_epoch]["validation_loss"])
    card = (tmp_path / "README.md").read_text()
    assert "PiT, tiny" in card
    assert f"| validation accuracy | {history.rows[-1]['validation_accuracy']:.2%} |" in card
    assert "| images | noise, 32×32 |" in card
    assert (tmp_path / "curves.svg").read_text().startswith("<?xml")
    assert (tmp_path / "curves.png").stat().st_size > 1000


class Recorder(GeneralTracker):
    """A tracker of one's own, as accelerate takes them."""

    name = "recorder"
    requires_logging_directory = False
    main_process_only = True

    def __init__(self) -> None:
        super().__init__()
        self.values: list[tuple[int | None, dict[str, Any]]] = []
        self.config: dict[str, Any] = {}
        self.ended = False

    @property
    def tracker(self) -> None:
        return None

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        self.values.append((step, values))

    def finish(self) -> None:
        self.ended = True


def test_the_average_of_the_weights_is_what_is_measured_and_delivered(tmp_path: Path) -> None:
    trained(tmp_path)
    last = sorted((tmp_path / "checkpoints").iterdir())[-1]
    average, weights = (load_file(last / f"{name}.safetensors") for name in ("average", "weights"))
    delivered = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(value, average[name]) for name, value in delivered.items())
    assert not any(torch.equal(value, weights[name]) for name, value in delivered.items())


def test_the_progress_tells_where_it_is_how_fast_how_long_still_and_how_much_memory(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=140, record=True)
    trained(tmp_path, console=console)
    said = console.export_text()
    assert re.search(r"tiny ━+ +100 % epoch 3/3, [\d,]+ images/s, \d+\.\d GiB \d:\d\d:\d\d", said)
    assert re.search(
        r"epoch 3: loss \d\.\d{4}, accuracy [\d.]+%, validation \d\.\d{4} and [\d.]+%, [\d,]+ images/s", said
    )


def test_tensorboard_has_every_epoch(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    history = trained(tmp_path, trackers=["tensorboard"])
    events = EventAccumulator(str(tmp_path / "spatially")).Reload()
    found = events.Scalars("validation_loss")
    assert [one.step for one in found] == [5, 10, 15]
    assert [one.value for one in found] == pytest.approx([row["validation_loss"] for row in history.rows])


def test_logs_and_trackers_tell_of_every_epoch_and_of_steps(tmp_path: Path) -> None:
    recorder = Recorder()
    history = trained(tmp_path, trackers=[recorder], log_steps=2)
    records = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if record["kind"] == "epoch"] == [5, 10, 15]
    assert [record["step"] for record in records if record["kind"] == "step"] == [2, 4, 6, 8, 10, 12, 14]
    rows = list(csv.DictReader((tmp_path / "log.csv").open()))
    assert [float(row["train_loss"]) for row in rows] == [row["train_loss"] for row in history.rows]
    assert sorted(step for step, _ in recorder.values) == sorted(record["step"] for record in records)
    assert recorder.config["optimiser.lr"] == 0.01
    assert recorder.ended
    # a step's line is the mean of the losses it stands for
    by_step = {record["step"]: record["train_loss"] for record in records if record["kind"] == "step"}
    first = 5 * history.rows[0]["train_loss"]
    trained(tmp_path / "each", log_steps=1)
    each = [json.loads(line) for line in (tmp_path / "each/log.jsonl").read_text().splitlines()]
    losses = [record["train_loss"] for record in each if record["kind"] == "step"]
    assert sum(losses[:5]) == pytest.approx(first)
    assert by_step[6] == pytest.approx((losses[4] + losses[5]) / 2)


def test_a_tracker_that_is_not_there_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="unknown tracker 'tensorbord': did you mean 'tensorboard'"):
        trained(tmp_path, trackers=["tensorbord"])
    monkeypatch.setattr("spatially.train.processes.get_available_trackers", list)
    with pytest.raises(UserError, match="tracker wandb needs a package that is not here: pip install wandb"):
        trained(tmp_path, trackers=["wandb"])


def test_measured_loss_and_accuracy_are_those_of_the_delivered_weights(tmp_path: Path) -> None:
    model = tiny.network(drop=0.0)
    history = trained(tmp_path, model=model, changes={"regularisation.ema": None})
    data = tiny.TinyValidation()
    model.eval()
    with torch.no_grad():
        logits = model(data.images).double()
    loss = -logits.log_softmax(1)[range(20), data.labels].mean()
    assert history.rows[-1]["validation_loss"] == pytest.approx(float(loss), rel=1e-6)
    assert history.rows[-1]["validation_accuracy"] == float((logits.argmax(1) == data.labels).double().mean())
