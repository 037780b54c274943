"""What a checkpoint keeps of a training's parts comes back."""

from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

from spatially.train.state import capture, restore
from spatially.train.step import training_step

tiny = SimpleNamespace(**run_path(str(Path(__file__).parent / "tiny.py")))


def test_the_scale_of_half_precision_comes_back() -> None:
    recipe = tiny.recipe(**{"run.precision": "fp16"})
    first, second = (training_step(tiny.network(), recipe) for _ in range(2))
    for batch in tiny.TinyData().batches(0):
        first(batch)
    assert first.scaler is not None
    assert second.scaler is not None
    first.scaler.update(512.0)
    groups, facts = capture(first)
    restore(second, groups, facts, 0)
    assert second.scaler.state_dict() == first.scaler.state_dict()
    assert second.scaler.get_scale() == 512.0
    assert second.updates == 5
