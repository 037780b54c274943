"""`spatially sweep`: resumable, and its table says what its trainings measured."""

import csv
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spatially.errors import UserError
from spatially.models.costs import count
from spatially.train import sweep as sweeps
from spatially.train.library import read_recipe
from spatially.train.sweep_figures import draw_sweep
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
    done = list(csv.DictReader((tmp_path / "sweep.csv").open()))
    assert [row["model"] for row in done] == ["resnet50_flat"]  # what is known so far can be looked at
    assert (tmp_path / "sweep.png").is_file()
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
    record = tmp_path / "members" / "resnet50_flat-base_width=8" / "member.json"
    known = record.read_text()
    record.write_text(known[:100])
    assert run(*words)[0] == 0
    assert (len(calls), record.read_text()) == (4, known)  # from the training, which is finished
    code, _, error = run(*words, "--set", "optimiser.lr=1")
    assert code == 2
    assert "was trained with another recipe" in error


def test_a_validation_loss_that_was_not_finite_is_no_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def trained(model: str, recipe: Any, data: Any, folder: Path, **options: Any) -> Path:
        folder.mkdir(parents=True)
        (folder / "log.csv").write_text(
            "train_loss,train_accuracy,validation_loss,validation_accuracy\n1.5,0.25,,0.5\n"
        )
        return folder

    monkeypatch.setattr(sweeps, "train", trained)
    monkeypatch.setattr(sweeps, "cost", lambda folder: (1, 2))
    member, recipe = sweeps.members(["resnet50_flat"])[0], read_recipe("vanilla")
    made = sweeps._outcome(member, recipe, "shapes", tmp_path, {})
    known = sweeps._known(member, recipe, "shapes", tmp_path, {})
    assert known is not None
    assert math.isnan(made.validation_loss)
    assert math.isnan(known.validation_loss)
    assert made.validation_accuracy == known.validation_accuracy == 0.5


@pytest.mark.parametrize("damaged", ["", "[]", '{"asked": {}}', '{"asked": 1, "outcome": {}}', "\xff"])
def test_a_damaged_record_tells_nothing(damaged: str, tmp_path: Path) -> None:
    member = sweeps.members(["resnet50_flat"])[0]
    record = tmp_path / "members" / "resnet50_flat" / "member.json"
    record.parent.mkdir(parents=True)
    record.write_bytes(damaged.encode("latin-1"))
    assert sweeps._known(member, read_recipe("vanilla"), "shapes", tmp_path, {}) is None


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


def test_the_figures_show_loss_and_accuracies_over_the_cost() -> None:
    def outcome(series: str, macs: int, value: float) -> sweeps.Outcome:
        measured = {"train_loss": 9 - value, "train_accuracy": value / 10, "validation_accuracy": value / 20}
        return sweeps.Outcome(
            model="m", arguments={}, series=series, parameters=1, macs=macs, validation_loss=0.0, folder="", **measured
        )

    outcomes = [outcome("pit", 3 * 10**9, 2.0), outcome("vit", 10**9, 5.0), outcome("pit", 2 * 10**9, 1.0)]
    figure = draw_sweep(outcomes, "vanilla")
    drawn = [{str(line.get_label()): line.get_xydata().tolist() for line in panel.lines} for panel in figure.axes]  # type: ignore[union-attr]
    assert drawn == [
        {"pit": [[2.0, 8.0], [3.0, 7.0]], "vit": [[1.0, 4.0]]},  # members of a line in the order of their cost
        {"pit": [[0.1, 0.05], [0.2, 0.1]], "vit": [[0.5, 0.25]]},
        {"pit": [[2.0, 0.05], [3.0, 0.1]], "vit": [[1.0, 0.25]]},
    ]


def test_the_table_names_its_members_in_full(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "vit_small_unpooled"
    one = sweeps.Outcome(
        model=name, arguments={"depth": 3}, series="vit", parameters=21_630_436, macs=10**9, train_loss=1.0,
        train_accuracy=0.5, validation_loss=1.0, validation_accuracy=0.5, folder="",
    )  # fmt: skip
    monkeypatch.setattr(sweeps, "sweep", lambda *given, **options: [one])
    monkeypatch.setenv("COLUMNS", "80")
    code, said, _ = run("sweep", name, "--recipe", "vanilla", "--data", "shapes", "--out", tmp_path)
    assert code == 0
    cells = [re.split(r" {2,}", line.strip()) for line in said.splitlines()]
    assert [name, "21,630,436", "1", "1.000", "50.0%", "50.0%"] in cells
    assert ["depth=3"] in cells
    monkeypatch.setenv("COLUMNS", "60")
    assert "…" not in run("sweep", name, "--recipe", "vanilla", "--data", "shapes", "--out", tmp_path)[1]
