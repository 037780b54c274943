"""What tests of training share."""

from collections.abc import Callable

import pytest

from spatially.cli import main


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*words: object) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main([str(word) for word in words])
        said = capsys.readouterr()
        return int(stop.value.code or 0), said.out, " ".join(said.err.split())

    return run


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No learning curves, and few generated images to validate on."""
    monkeypatch.setattr("spatially.train.loop.write_curves", lambda *given: None)
    monkeypatch.setattr("spatially.train.sources.HELD_OUT", 48)
