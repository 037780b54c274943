"""The demo's models: small, trained by one command, kept as float16, opened by their names."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import spatially
from spatially.cli.demo import demo_models, demo_probes
from spatially.errors import UserError
from spatially.models import demo
from spatially.probes import PROBES
from spatially.study.spec import make_study
from spatially.train import demo as demo_training

pytestmark = pytest.mark.usefixtures("quick")

Run = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("name", demo.DEMO)
def test_a_member_of_the_demo_is_small_and_takes_its_images(name: str) -> None:
    subject = spatially.load(f"demo/{name}", pretrained=False, num_classes=12, device="cpu")
    numbers = sum(value.numel() for value in subject.model.state_dict().values())
    assert numbers <= 500_000  # 1 MB as float16
    assert subject(torch.zeros(1, 3, 64, 64)).shape == (1, 12)


@pytest.mark.parametrize("name", demo.trained())
def test_the_demos_weights_are_what_their_facts_say(name: str) -> None:
    facts = json.loads(demo.facts_file(name).read_text())
    assert demo.weights_file(name).stat().st_size <= 1_000_000
    subject = spatially.load(f"demo/{name}", device="cpu", dtype="float32")
    assert {value.dtype for value in subject.model.parameters()} == {torch.float32}
    assert demo_training.accuracy(subject, 240) == pytest.approx(facts["accuracy"], abs=0.06)


def test_the_demo_is_trained_kept_and_loaded(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package"
    monkeypatch.setattr(demo_training, "MEASURED", 60)
    code, out, error = run(
        "train-demo", "pit", "--out", tmp_path / "runs", "--folder", package, "--set", "epochs=1", "--set",
        "schedule.warmup_epochs=0", "--set", "batch=12", "--limit", 24, "--device", "cpu",
    )  # fmt: skip
    assert code == 0, error
    assert "demo/pit" in out
    monkeypatch.setattr(demo, "FOLDER", package)
    assert demo.trained() == ["pit"]
    facts = json.loads((package / "pit.json").read_text())
    assert facts["recipe"]["epochs"] == 1
    changes = "--set epochs=1 --set schedule.warmup_epochs=0 --set batch=12 --limit 24"
    assert facts["command"] == f"spatially train-demo pit {changes}"
    assert {value.dtype for value in load_file(package / "pit.safetensors").values()} == {torch.float16}
    subject = spatially.load("demo/pit", device="cpu")
    trained = spatially.load(str(tmp_path / "runs" / "pit"), device="cpu")
    for name, value in trained.model.state_dict().items():
        assert torch.equal(subject.model.state_dict()[name], value.half().float())
    images = spatially.open_images("shapes", subject, limit=60)
    right = subject(torch.from_numpy(images.pixels.copy()).float() / 255).argmax(1).numpy() == images.labels
    assert facts["accuracy"] == pytest.approx(right.mean())
    assert demo_models("all") == [{"model": name} for name in ("bag_of_patches", "rigid_template", "demo/pit")]
    assert demo_models("calibrators") == [{"model": name} for name in ("bag_of_patches", "rigid_template")]


def test_the_demos_probes_have_options_for_its_images() -> None:
    assert demo_probes("paste,fourier") == {"paste": {"block": 8}, "fourier": {}}
    every = make_study(models="demo/pit", data="shapes", probes=demo_probes("all")).make_probes()
    assert [probe.name for probe in every] == list(PROBES)
    assert every[0].blocks == (4, 8, 16, 32)  # type: ignore[attr-defined]


def test_the_demos_loss_is_that_of_images_as_its_models_were_trained_on() -> None:
    options = demo_probes("hessian,landscape")
    subject = spatially.load("demo/vit", device="cpu", dtype="float32")
    images = spatially.open_images("shapes", subject, limit=48)
    terrain = spatially.probes.Landscape(**options["landscape"] | {"points": 3}).run(subject, images)
    assert terrain.origin_accuracy == demo_training.accuracy(subject, 48) == 1
    assert options["hessian"]["augmentation"] == options["landscape"]["augmentation"]


@pytest.mark.slow
@pytest.mark.skipif("pit" not in demo.trained(), reason="the demo's models are not trained here")
def test_every_probe_has_something_to_say_of_a_pit(run: Run, tmp_path: Path) -> None:
    code, _, error = run("demo", "--models", "demo/pit", "--limit", 160, "--device", "cpu", "--out", tmp_path)
    assert code == 0, error
    found = {path.name.split(".")[1] for path in (tmp_path / "results").glob("*.nc")}
    # These ask for more than generated images: a second checkpoint, and shapes that disagree with textures.
    assert found == set(PROBES) - {"interpolation", "shape_bias"}
    assert (tmp_path / "report.html").is_file()


def test_a_member_of_the_demo_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "FOLDER", tmp_path)
    with pytest.raises(UserError, match="demo/swin_m is not trained here: make it with spatially train-demo swin_m"):
        spatially.load("demo/swin_m")
    with pytest.raises(UserError, match="unknown model 'demo/swinm': did you mean 'demo/swin_m'"):
        spatially.load("demo/swinm")
    with pytest.raises(UserError, match="unknown model of the demo 'swinn'"):
        demo_training.train_demo(["swinn"])
