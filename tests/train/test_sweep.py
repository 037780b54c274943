"""`spatially sweep`: resumable, and its table says what its trainings measured."""

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spatially.errors import UserError
from spatially.models.costs import count
from spatially.train import sweep as sweeps
from spatially.train.training import train

pytestmark = pytest.mark.usefixtures("quick")

Run = Callable[..., tuple[int, str, str]]
CNN = {"depths": (1,), "attention_depths": (0,), "widths": (8,), "heads": (1,)}


def test_a_sweep_goes_on_where_it_was(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    def counted(model: str, *given: Any, **options: Any) -> Path:
        calls.append(f"{model}-{options['arguments']}")
        if len(calls) == 2:
            raise KeyboardInterrupt
        return train(model, *given, **options)

    monkeypatch.setattr(sweeps, "train", counted)
    words = ["sweep", "resnet50_flat", "--vary", "base_width=8,16", "--recipe", "vanilla", "--data", "shapes"]
    words += ["--input-size", 32, "--limit", 24, "--batch", 12, "--epochs", 1, "--device", "cpu", "--out", tmp_path]
    assert run(*words)[0] == 130
    assert len(calls) == 2
    code, _, error = run(*words)
    assert code == 0, error
    assert calls == [f"resnet50_flat-{{'base_width': {width}}}" for width in (8, 16, 16)]
    rows = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert [json.loads(row["arguments"])["base_width"] for row in rows] == [8, 16]
    assert float(rows[1]["macs"]) > 2 * float(rows[0]["macs"])
    for row in rows:
        last = list(csv.DictReader((tmp_path / row["folder"] / "log.csv").open()))[-1]
        assert float(row["validation_accuracy"]) == float(last["validation_accuracy"])
        assert float(row["train_loss"]) == float(last["train_loss"])
    assert {path.name for path in tmp_path.glob("sweep.*")} == {"sweep.csv", "sweep.svg", "sweep.pdf", "sweep.png"}
    assert run(*words)[0] == 0
    assert len(calls) == 3  # all is known
    code, _, error = run(*words, "--set", "optimiser.lr=1")
    assert code == 2
    assert "was trained with another recipe" in error


@pytest.mark.parametrize(
    ("models", "vary", "message"),
    [
        (["alternet_18", "alternet_81"], {}, "unknown model 'alternet_81'"),
        (["resnet50_flat"], {"base_width": [8, "wide"]}, "resnet50_flat cannot be built with base_width='wide'"),
        (["resnet50_flat", "vit_tiny_patch16_224"], {"base_width": [8]}, "does not take these"),
        (["resnet50_flat", "swin_tiny"], {}, "swin_tiny cannot take images of 34×34"),
    ],
)
def test_a_wrong_member_is_told_before_the_first_is_trained(
    models: list[str], vary: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeps, "train", lambda *given, **options: pytest.fail("trained"))
    with pytest.raises(UserError, match=message):
        sweeps.sweep(models, "vanilla", "shapes", tmp_path, vary=vary, size=34)


def test_a_sweeps_cost_is_the_models(tmp_path: Path) -> None:
    options: dict[str, Any] = {"epochs": 1, "settings": {"batch": 12}, "size": 32, "limit": 12, "device": "cpu"}
    folder = train("alternet_18", "vanilla", "shapes", tmp_path, arguments=CNN, quiet=True, **options)
    expected = count("alternet_18", side=32, num_classes=12, **CNN)
    assert sweeps.cost(folder) == (expected.parameters, expected.macs)


def test_sweeps_that_make_no_sense() -> None:
    with pytest.raises(UserError, match="pit_tiny is named twice"):
        sweeps.members(["pit_tiny", "pit_tiny"])
    with pytest.raises(UserError, match="at least one model"):
        sweeps.members([])
