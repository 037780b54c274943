"""Chunks whose numbers come later: in order, once begun ahead, and the same numbers as at once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from rich.console import Console
from torch import Tensor

import spatially
from spatially.data import Images
from spatially.errors import UserError
from spatially.probes import (
    Fourier,
    InteractionRatio,
    Interpolation,
    Landscape,
    Probe,
    ReceptiveField,
    Variance,
    interaction_ratio,
    layers,
    receptive_field,
    weight_points,
)
from spatially.probes.ahead import Outcomes, in_turn, read, settled
from spatially.study import Study, run_study
from spatially.study.store import Store

MODEL: dict[str, Any] = {"model": "test_vit", "pretrained": False, "num_classes": 12, "input_size": 32, "seed": 3}


def chunks(count: int) -> list[np.ndarray]:
    return [np.array([number]) for number in range(count)]


def test_a_chunk_is_begun_before_the_last_is_waited_for() -> None:
    events: list[str] = []

    def measure(rows: np.ndarray) -> Outcomes:
        number = int(rows[0])
        events.append(f"begin {number}")

        def wait() -> xr.Dataset:
            events.append(f"finish {number}")
            return xr.Dataset({"number": number})

        return wait

    found = [int(part["number"]) for part in in_turn(measure, chunks(3))]
    assert found == [0, 1, 2]
    assert events == ["begin 0", "begin 1", "finish 0", "begin 2", "finish 1", "finish 2"]


def test_what_is_there_at_once_is_handed_on_before_the_next_is_begun() -> None:
    events: list[str] = []

    def measure(rows: np.ndarray) -> Outcomes:
        events.append(f"begin {int(rows[0])}")
        return xr.Dataset({"number": int(rows[0])})

    for part in in_turn(measure, chunks(2)):
        number = int(part["number"])
        events.append(f"kept {number}")
    assert events == ["begin 0", "kept 0", "begin 1", "kept 1"]


def test_both_kinds_in_one_task_keep_their_order() -> None:
    def measure(rows: np.ndarray) -> Outcomes:
        part = xr.Dataset({"number": int(rows[0])})
        return part if rows[0] % 2 else lambda: part

    assert [int(part["number"]) for part in in_turn(measure, chunks(5))] == [0, 1, 2, 3, 4]


def later(numbers: Tensor, finish: Callable[[np.ndarray], xr.Dataset]) -> Outcomes:
    """As a GPU's: the numbers are those of now, what becomes of them is computed when the next chunk has been begun."""
    found = numbers.numpy().copy()
    return lambda: finish(found)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (interaction_ratio, layers, receptive_field, weight_points):
        monkeypatch.setattr(module, "read", later)


def look() -> tuple[spatially.Subject, Images]:
    subject = spatially.load(**MODEL, device="cpu")
    return subject, spatially.open_images("shapes", subject, limit=10)


PROBES: list[Probe] = [
    Fourier(),
    Variance(),
    InteractionRatio(),
    ReceptiveField(variants=["given", "untrained"]),
    Landscape(points=3),
]


@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_numbers_that_come_later_are_the_same(probe: Probe, request: pytest.FixtureRequest) -> None:
    subject, images = look()
    at_once = probe.run(subject, images, batch=4)
    request.getfixturevalue("gpu")
    xr.testing.assert_identical(probe.run(subject, images, batch=4), at_once)


def test_a_line_of_weights_too(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    subject, images = look()
    torch.save({name: one + 0.1 for name, one in subject.model.state_dict().items()}, tmp_path / "other.pt")
    probe = Interpolation(towards=str(tmp_path / "other.pt"), points=3)
    at_once = probe.run(subject, images, batch=4)
    request.getfixturevalue("gpu")
    xr.testing.assert_identical(probe.run(subject, images, batch=4), at_once)


@pytest.mark.usefixtures("gpu")
def test_a_study_keeps_each_part_under_its_own_number(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else one that goes on would measure some images twice and others never."""
    monkeypatch.setattr(Store, "clear_parts", lambda *_: None)
    wanted = {"variance": {}, "landscape": {"points": 2}}
    study = Study(models=[MODEL], data={"source": "shapes", "limit": 10}, probes=wanted, batch=4)
    store = run_study(study, tmp_path, device="cpu", console=Console(quiet=True))
    subject, images = look()
    for probe, member in ((Variance(), "image"), (Landscape(points=2), "point")):
        found = store.results()[probe.name]["test_vit"]
        for number, rows in enumerate(probe.chunks(images, batch=4)):
            part = store.read_part("test_vit", probe.name, number, key=found.attrs["key"])
            assert part is not None
            assert part[member].values.tolist() == (images.index[rows] if member == "image" else rows).tolist()
        alone = probe.run(subject, images, batch=4)
        # A study computes with all threads, which may add up otherwise.
        xr.testing.assert_allclose(found.drop_attrs(), alone.drop_attrs(), rtol=1e-4)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_numbers_that_are_none_are_an_error_when_they_come(probe: Probe) -> None:
    model = timm.create_model("test_vit", num_classes=12, img_size=32)
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight.fill_(torch.nan)
    subject = spatially.load(model, name="broken", input_size=32, device="cpu")
    images = spatially.open_images("shapes", subject, limit=8)
    measure = probe.measurer(probe.view(subject, images), images, batch=4)
    begun = measure(probe.chunks(images, batch=4)[0])
    assert not isinstance(begun, xr.Dataset)
    with pytest.raises(UserError, match=r"blocks\.1"):
        settled(begun)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_numbers_on_their_way_are_those_of_when_they_were_asked_for() -> None:
    numbers = torch.arange(1_000_000.0, device="cuda")
    begun = read(numbers, lambda array: xr.Dataset({"sum": array.sum(dtype=np.float64)}))
    assert not isinstance(begun, xr.Dataset)
    numbers.zero_()
    assert float(begun()["sum"]) == 999_999 * 1_000_000 / 2


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("probe", PROBES, ids=lambda probe: probe.name)
def test_a_gpu_ahead_has_the_numbers_of_one_that_is_waited_for(probe: Probe) -> None:
    subject = spatially.load(**MODEL, device="cuda")
    images = spatially.open_images("shapes", subject, limit=10)
    measure = probe.measurer(probe.view(subject, images), images, batch=4)
    rows = probe.chunks(images, batch=4)
    for ahead, waited in zip(in_turn(measure, rows), [settled(measure(one)) for one in rows], strict=True):
        xr.testing.assert_allclose(ahead, waited, rtol=1e-3)
