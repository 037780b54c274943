"""Processes that a launcher started find each other, or the training does not begin."""

import pytest

from spatially.errors import UserError
from spatially.train.processes import check_launched, joining, on_cpu


def test_several_processes_without_a_gpu_share_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert not on_cpu()  # there may be something else to compute on
    assert on_cpu(asked=True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert on_cpu()
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    assert not on_cpu()


def test_processes_that_do_not_know_of_each_other_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    check_launched(2)
    with pytest.raises(
        UserError, match=r"WORLD_SIZE in the environment is 2, but accelerate found processes: 1; start"
    ):
        check_launched(1)


def test_what_accelerate_says_of_processes_that_nobody_started_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with (
        pytest.raises(UserError, match=r"is 2, but the processes could not be joined \(no address\); start"),
        joining(),
    ):
        raise ValueError("no address\nmore")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match="no address"), joining():
        raise ValueError("no address")
