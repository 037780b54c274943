"""Studies that are finished, continued, killed, run by several processes: always the same bytes."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

from spatially.errors import UserError
from spatially.files import WriteError
from spatially.probes import Sensitivity
from spatially.study import Study, run_study
from spatially.study.run import Skipped, _said_once
from spatially.study.store import read_dataset

QUIET = Console(quiet=True)
MODEL = {"model": "resnet10t", "pretrained": False, "num_classes": 12, "input_size": 32, "resize": 32}


def study(**changes: object) -> Study:
    options: dict = {
        "models": [MODEL],
        "data": {"source": "shapes", "limit": 60},
        "probes": {"sensitivity": {"blocks": [8, 16], "ratios": [0, 0.5, 1]}, "paste": {"block": 8}},
        "batch": 8,
    }
    return Study(**(options | changes))


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((folder / "results").glob("*.nc"))}


def command(out: Path, *more: str) -> list[str]:
    words = "probe resnet10t --no-pretrained --num-classes 12 --input-size 32 --resize 32 --data shapes --limit 60 --batch 8"
    options = ["--probes", "sensitivity,paste", "--blocks", "8,16", "--ratios", "0,0.5,1", "--set", "paste.block=8"]
    return ["-m", "spatially", *words.split(), *options, "--device", "cpu", "--out", str(out), *more]


def test_study_equals_the_probe_run_alone(tmp_path: Path) -> None:
    store = run_study(study(), tmp_path, device="cpu", console=QUIET)
    results = store.results()
    import spatially

    subject = spatially.load(**MODEL, device="cpu")
    images = spatially.open_images("shapes", subject, limit=60)
    alone = Sensitivity(blocks=[8, 16], ratios=[0, 0.5, 1]).run(subject, images, batch=8)
    stored = results["sensitivity"]["resnet10t"]
    assert stored.drop_attrs().equals(alone.drop_attrs())
    assert alone.attrs.items() <= stored.attrs.items()
    assert not (tmp_path / "parts").exists()
    assert set(results) == {"sensitivity", "paste"}


def test_finished_study_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_study(study(), tmp_path, device="cpu", console=QUIET)
    before = contents(tmp_path)
    monkeypatch.setattr(Sensitivity, "measure", lambda *_, **__: pytest.fail("measured again"))
    run_study(study(), tmp_path, device="cpu", console=QUIET)
    assert contents(tmp_path) == before


def test_interrupted_study_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_study(study(), tmp_path / "whole", device="cpu", console=QUIET)
    original, calls = Sensitivity.measure, []

    def interrupted(self: Sensitivity, *arguments: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return original(self, *arguments, **options)

    monkeypatch.setattr(Sensitivity, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(study(), tmp_path / "cut", device="cpu", console=QUIET)
    run_study(study(), tmp_path / "cut", device="cpu", console=QUIET)
    assert len(calls) == 9  # eight chunks, one of them twice
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_damaged_results_and_parts_are_measured_again(tmp_path: Path) -> None:
    run_study(study(), tmp_path, device="cpu", console=QUIET)
    before = contents(tmp_path)
    path = tmp_path / "results" / "resnet10t.sensitivity.nc"
    path.write_bytes(path.read_bytes()[:5000])
    part = tmp_path / "parts" / "resnet10t.sensitivity" / "000002.nc"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"half a part")
    run_study(study(), tmp_path, device="cpu", console=QUIET)
    assert contents(tmp_path) == before


def test_results_of_another_study_are_not_replaced_unasked(tmp_path: Path) -> None:
    run_study(study(), tmp_path, device="cpu", console=QUIET)
    before = contents(tmp_path)
    other = study(probes={"sensitivity": {"blocks": [4], "ratios": [0, 1]}})
    with pytest.raises(UserError, match=r"measured otherwise \(options differ\); choose another --out, or --overwrite"):
        run_study(other, tmp_path, device="cpu", console=QUIET)
    assert contents(tmp_path) == before
    run_study(other, tmp_path, device="cpu", console=QUIET, overwrite=True)
    assert read_dataset(tmp_path / "results" / "resnet10t.sensitivity.nc").block.values.tolist() == [4]


def test_a_model_whose_code_was_changed_is_another_model(tmp_path: Path) -> None:
    """Weights alone do not tell: pooling by maximum instead of by mean has the same ones."""
    wide = MODEL | {"input_size": 64, "resize": 64}
    options = {"probes": {"paste": {"block": 8}}}
    run_study(study(models=[wide], **options), tmp_path, device="cpu", console=QUIET)
    changed = study(models=[wide | {"model_options": {"global_pool": "max"}}], **options)
    with pytest.raises(UserError, match="measured otherwise"):
        run_study(changed, tmp_path, device="cpu", console=QUIET)


def test_the_plan_does_not_count_parts_of_another_measurement(tmp_path: Path) -> None:
    part = tmp_path / "parts" / "resnet10t.sensitivity" / "000000.nc"
    part.parent.mkdir(parents=True)
    part.write_bytes(b"of another one")
    console = Console(record=True, width=160, file=open(os.devnull, "w"))  # noqa: SIM115
    run_study(study(), tmp_path, device="cpu", console=console, dry_run=True)
    assert "540" in console.export_text()


def test_full_disk_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_study(study(), tmp_path / "whole", device="cpu", console=QUIET)
    real, calls = os.fsync, []

    def fills_up(file: int) -> None:
        calls.append(1)
        if len(calls) > 6:
            raise OSError(28, "No space left on device")
        real(file)

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", fills_up)
        with pytest.raises(WriteError, match="No space left"):
            run_study(study(), tmp_path / "full", device="cpu", console=QUIET)
    kept = list((tmp_path / "full").rglob("0*.nc"))
    assert kept
    assert not list((tmp_path / "full").rglob("*.draft"))
    run_study(study(), tmp_path / "full", device="cpu", console=QUIET)
    assert contents(tmp_path / "full") == contents(tmp_path / "whole")


def test_dry_run_only_plans(tmp_path: Path) -> None:
    console = Console(record=True, width=160, file=open(os.devnull, "w"))  # noqa: SIM115
    run_study(study(), tmp_path / "none", device="cpu", console=console, dry_run=True)
    said = console.export_text()
    assert "540" in said  # 9 passes × 60 images
    assert not (tmp_path / "none").exists()


def test_two_models_of_one_name_are_told_apart(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="two models are called resnet10t"):
        run_study(study(models=[MODEL, MODEL | {"seed": 1}]), tmp_path, device="cpu", console=QUIET)
    twins = study(models=[MODEL, MODEL | {"seed": 1, "name": "twin"}], probes={"paste": {"block": 8}})
    results = run_study(twins, tmp_path, device="cpu", console=QUIET).results()
    assert list(results["paste"]) == ["resnet10t", "twin"]
    assert not results["paste"]["resnet10t"].host_probability.equals(results["paste"]["twin"].host_probability)


def test_threads_are_restored(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_study(study(), tmp_path, device="cpu", console=QUIET)
        assert torch.get_num_threads() == 1
    finally:
        torch.set_num_threads(before)


def test_workers_do_not_change_a_byte(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    root = make_folder(classes=3, each=8)
    for workers in (0, 2):
        data = {"source": str(root), "workers": workers, "cache": str(tmp_path / f"cache{workers}")}
        model = MODEL | {"num_classes": 3}
        run_study(study(models=[model], data=data), tmp_path / str(workers), device="cpu", console=QUIET)
    assert contents(tmp_path / "0") == contents(tmp_path / "2")


@pytest.mark.parametrize("precision", [None, 0.2])
def test_two_processes_give_the_same_bytes(precision: float | None, tmp_path: Path) -> None:
    more = [] if precision is None else ["--precision", str(precision)]
    subprocess.run([sys.executable, *command(tmp_path / "one", *more)], check=True, capture_output=True, timeout=300)
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    subprocess.run([*launcher, *command(tmp_path / "two", *more)], check=True, capture_output=True, timeout=300)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")
    assert len(contents(tmp_path / "one")) == 2


@pytest.mark.slow
def test_killed_at_ten_random_moments_it_ends_with_the_same_bytes(tmp_path: Path) -> None:
    start = time.monotonic()
    subprocess.run([sys.executable, *command(tmp_path / "whole")], check=True, capture_output=True, timeout=300)
    length = time.monotonic() - start
    moments = random.Random(0)
    for _ in range(10):
        process = subprocess.Popen(
            [sys.executable, *command(tmp_path / "killed")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        time.sleep(moments.uniform(0.4, 1.0) * length)
        process.send_signal(signal.SIGKILL)
        process.wait()
        for path in (tmp_path / "killed").rglob("*.nc"):
            if not path.name.startswith("."):
                read_dataset(path)
    subprocess.run([sys.executable, *command(tmp_path / "killed")], check=True, capture_output=True, timeout=300)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")
    assert not list((tmp_path / "killed").rglob("*.draft"))


@pytest.mark.parametrize("batch", [8, 20])
def test_another_batch_size_agrees(batch: int, tmp_path: Path) -> None:
    one = run_study(study(), tmp_path / "a", device="cpu", console=QUIET).results()["sensitivity"]["resnet10t"]
    other = run_study(study(batch=batch), tmp_path / "b", device="cpu", console=QUIET).results()["sensitivity"][
        "resnet10t"
    ]
    assert np.array_equal(one.prediction, other.prediction)
    assert np.abs(one.probability - other.probability).max() < 1e-5


def test_reasons_are_said_once_for_all_models_that_have_them() -> None:
    skipped = [
        Skipped(
            model,
            "fourier",
            f"{model} has no residual stream: nowhere does it add what it computed from a map to that map",
        )
        for model in ("a", "b")
    ]
    skipped += [
        Skipped("a", "position_bias", "a has no position bias"),
        Skipped("a", "other", "why not"),
        Skipped("b", "other", "why not"),
    ]
    assert list(_said_once(skipped, 3)) == [
        "skipped fourier of a, b: has no residual stream: nowhere does it add what it computed from a map to that map",
        "skipped position_bias of a: a has no position bias",
        "skipped other of a, b: why not",
    ]
    assert list(_said_once(skipped[3:], 2)) == ["skipped other: why not"]
    long = Skipped("a", "shape_bias", f"there are no such images: {'x' * 90}")
    assert list(_said_once([long], 1)) == ["skipped shape_bias of a: there are no such images"]


def test_a_study_of_many_tasks_takes_a_line_a_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spatially.study.plan.LONGEST_PLAN", 3)
    with open(os.devnull, "w") as nowhere:
        console = Console(record=True, width=80, file=nowhere)
        models = [MODEL | {"name": name} for name in ("one", "second")]
        probes = {"sensitivity": {"blocks": [8], "ratios": [0, 1]}, "paste": {"block": 8}, "position_bias": {}}
        with pytest.raises(UserError, match="no position embedding"):
            run_study(study(models=models, probes=probes), tmp_path, device="cpu", console=console)
        del probes["position_bias"]
        run_study(study(models=models, probes=probes), tmp_path, device="cpu", console=console)
    said = console.export_text().splitlines()
    assert sum("one" in line for line in said) == 2  # its plan, its progress
    assert [line.split()[:1] for line in said if "2 probes" in line] == [["one"], ["second"]]
