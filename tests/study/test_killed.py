"""Curvature, landscapes and robustness killed while they write: whatever lies there then, they end with the same bytes."""

import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from safetensors.torch import save_file

import spatially
from spatially.study import read_study, run_study
from spatially.study.store import read_dataset

STUDY: dict[str, Any] = {
    "models": [{"model": "resnet10t", "pretrained": False, "num_classes": 12, "input_size": 32, "resize": 32}],
    "data": {"source": "shapes", "limit": 12},
    "probes": {
        "hessian": {"batch_size": 4, "share": 1.0, "count": 1, "parameters": ["fc.*"]},
        "landscape": {"points": 2},
        "robustness": {"epsilons": ["1/255"]},
        "frequency_noise": {"frequencies": [0.2, 0.9]},
    },
    "batch": 4,
}
# The n-th file is written to the disk and not yet in its place when the process ends, without a chance to tidy up.
KILLED = """
import os, signal, sys
from rich.console import Console
from spatially.study import read_study, run_study
calls, real = [], os.fsync
def fsync(file):
    real(file)
    calls.append(file)
    if len(calls) == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)
os.sched_getaffinity = lambda _: {0}
os.fsync = fsync
run_study(read_study(sys.argv[1]), sys.argv[2], device="cpu", console=Console(quiet=True))
"""


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    other = spatially.load(**{**STUDY["models"][0], "seed": 1}, device="cpu")
    save_file(other.model.state_dict(), folder / "other.safetensors")
    line = {"towards": str(folder / "other.safetensors"), "points": 2, "extent": [0, 1]}
    asked = {**STUDY, "probes": {**STUDY["probes"], "interpolation": line}}
    (folder / "study.yaml").write_text(yaml.safe_dump(asked, sort_keys=False))
    return folder / "study.yaml"


@pytest.fixture(autouse=True)
def _one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quicker where others compute as well."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)


@pytest.fixture(scope="module")
def whole(asked: Path) -> dict[str, bytes]:
    """The results of a study that nobody disturbed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
        return finished(asked, asked.parent / "whole")


def finished(asked: Path, folder: Path) -> dict[str, bytes]:
    run_study(read_study(asked), folder, device="cpu", console=Console(quiet=True))
    return {path.name: path.read_bytes() for path in sorted((folder / "results").iterdir())}


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="needs a system with SIGKILL")
@pytest.mark.parametrize(
    ("probe", "written"),
    [
        ("hessian", 5),
        ("landscape", 10),
        pytest.param("robustness", 15, marks=pytest.mark.slow),
        pytest.param("frequency_noise", 19, marks=pytest.mark.slow),
        pytest.param("interpolation", 23, marks=pytest.mark.slow),
    ],
)
def test_killed_while_a_file_is_written(
    probe: str, written: int, asked: Path, whole: dict[str, bytes], tmp_path: Path
) -> None:
    cut = tmp_path / "cut"
    command = [sys.executable, "-c", KILLED, str(asked), str(cut), str(written)]
    ended = subprocess.run(command, capture_output=True, timeout=300)
    assert ended.returncode == -signal.SIGKILL, ended.stderr.decode()
    assert list(cut.rglob(".*.draft"))
    assert (cut / "parts" / f"resnet10t.{probe}").is_dir()
    for part in (cut / "parts").rglob("[0-9]*.nc"):
        read_dataset(part)  # whole, or not there
    assert finished(asked, cut) == whole
    assert len(whole) == len(STUDY["probes"]) + 1
    assert not list(cut.rglob(".*.draft"))
    assert not (cut / "parts").exists()
