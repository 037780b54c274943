"""Checkpoints are there as a whole or not at all, and what is damaged is not used."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from torch import Tensor

from spatially.errors import UserError
from spatially.files import WriteError
from spatially.train import checkpoint as files


def tensors(value: float) -> dict[str, dict[str, Tensor]]:
    shared = torch.full((3, 2), value)
    return {"weights": {"a": shared, "b": shared.T, "count": torch.tensor(7)}, "optimiser": {}}


def test_everything_comes_back(tmp_path: Path) -> None:
    files.write_checkpoint(tmp_path, 12, tensors(0.1), {"rate": 0.1, "rows": [{"epoch": 0}]})
    found = files.newest(tmp_path)
    assert found is not None
    assert found.folder.name == "step-00000012"
    assert found.facts["rate"] == 0.1
    assert found.facts["rows"] == [{"epoch": 0}]
    assert torch.equal(found.tensors["weights"]["b"], torch.full((2, 3), 0.1))
    assert found.tensors["weights"]["count"].dtype == torch.int64


def test_the_last_two_are_kept(tmp_path: Path) -> None:
    for step in (1, 5, 30):
        files.write_checkpoint(tmp_path, step, tensors(step), {})
    assert [path.name for path in files.found(tmp_path)] == ["step-00000005", "step-00000030"]


@pytest.mark.parametrize("moment", ["weights", "optimiser", "rename"])
def test_crash_while_writing_leaves_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    files.write_checkpoint(tmp_path, 1, tensors(1), {})
    save = files.save_file

    def crash(*_: object) -> None:
        raise KeyboardInterrupt

    def torn(group: dict[str, Tensor], path: Path) -> None:
        save(group, path)
        if path.stem == moment:
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size // 2)
            crash()

    monkeypatch.setattr(files, "save_file", torn)
    if moment == "rename":
        monkeypatch.setattr(os, "replace", crash)
    with pytest.raises(KeyboardInterrupt):
        files.write_checkpoint(tmp_path, 2, tensors(2), {})
    found = files.newest(tmp_path)
    assert found is not None
    assert float(found.tensors["weights"]["a"][0, 0]) == 1
    monkeypatch.undo()
    files.write_checkpoint(tmp_path, 2, tensors(2), {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]  # no draft is left


@pytest.mark.parametrize("damage", ["cut", "bit", "missing", "state"])
def test_damaged_one_is_passed_over(tmp_path: Path, damage: str) -> None:
    for step in (1, 2):
        files.write_checkpoint(tmp_path, step, tensors(step), {})
    path = tmp_path / "step-00000002" / ("state.json" if damage == "state" else "weights.safetensors")
    content = bytearray(path.read_bytes())
    if damage == "missing":
        path.unlink()
    else:
        content[-1] ^= 1
        path.write_bytes(content if damage == "bit" else content[:-3])
    with pytest.raises(UserError, match=r"damaged|missing"):
        files.read_checkpoint(path.parent)
    found = files.newest(tmp_path)
    assert found is not None
    assert found.folder.name == "step-00000001"
    shutil.rmtree(tmp_path / "step-00000001")
    with pytest.raises(UserError, match=r"damaged|missing"):
        files.newest(tmp_path)


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device (os error 28)")],
)
def test_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def full(_: object, path: Path) -> None:
        path.write_bytes(b"half of it")
        raise error

    monkeypatch.setattr(files, "save_file", full)
    with pytest.raises(WriteError, match="free some space"):
        files.write_checkpoint(tmp_path, 1, tensors(1), {})
    assert files.newest(tmp_path) is None
    assert not list(tmp_path.iterdir())  # what was written until then does not fill the disk on
