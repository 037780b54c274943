"""The line between two checkpoints: its ends are the two models, and what does not fit is refused."""

import copy
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from safetensors.torch import save_file
from torch import nn
from torch.nn.functional import cross_entropy

import spatially
from spatially.data import Images
from spatially.errors import NotApplicable, UserError
from spatially.perturb import training_batch
from spatially.probes import Interpolation
from spatially.study import Study, run_study


def network() -> nn.Module:
    model = nn.Sequential(
        nn.Conv2d(3, 6, 5, stride=4),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )
    model.num_classes = 4  # type: ignore[assignment]
    return model


@pytest.fixture
def subject() -> spatially.Subject:
    torch.manual_seed(0)
    return spatially.load(network(), name="small", input_size=32, device="cpu", dtype="float64")


@pytest.fixture
def images(subject: spatially.Subject) -> Images:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (14, 32, 32, 3), dtype=np.uint8)
    return spatially.open_images(pixels, subject, labels=generator.integers(0, 4, 14))


@pytest.fixture
def other(tmp_path: Path) -> tuple[Path, nn.Module]:
    torch.manual_seed(1)
    model = network().double()
    model[1].running_mean.normal_()
    model[1].running_var.uniform_(0.5, 2)
    path = tmp_path / "small.safetensors"
    save_file(model.state_dict(), path)
    return path, model.eval()


def plain_loss(model: nn.Module, subject: spatially.Subject, images: Images) -> float:
    pixels, labels, index = images.batch(np.arange(len(images)))
    inputs, targets = training_batch(pixels, labels, index=index, classes=4)
    with torch.no_grad():
        return float(cross_entropy(model(subject.normalise(inputs)), targets))


def test_ends_and_middle(subject: spatially.Subject, images: Images, other: tuple[Path, nn.Module]) -> None:
    path, end = other
    found = Interpolation(towards=str(path), points=9, weight_decay=0.1).run(subject, images, batch=5)
    assert found.t.values.tolist() == [-0.5, -0.25, 0, 0.25, 0.5, 0.75, 1, 1.25, 1.5]
    middle = copy.deepcopy(subject.model)
    with torch.no_grad():
        for name, tensor in middle.state_dict().items():
            if tensor.is_floating_point():
                tensor.copy_(0.75 * subject.model.state_dict()[name] + 0.25 * end.state_dict()[name])
    for t, model in ((0.0, subject.model), (1.0, end), (0.25, middle)):
        assert float(found.nll.sel(t=t)) == pytest.approx(plain_loss(model, subject, images), rel=1e-12)
        squares = sum(float(one.detach().square().sum()) for one in model.parameters())
        assert float(found.l2.sel(t=t)) == pytest.approx(0.05 * squares, rel=1e-12)
    inside = found.loss.sel(t=slice(0, 1))
    chord = [float((1 - t) * inside[0] + t * inside[-1]) for t in inside.t]
    assert float(found.barrier) == pytest.approx(float((inside - chord).max()), abs=1e-12)
    assert float(found.barrier_t) == float(inside.t[int(np.argmax(inside.values - chord))])
    assert "towards_fingerprint" in found.attrs
    assert str(path.parent.parent) not in json.dumps(found.attrs)
    assert f"{path.parent.name}/{path.name}" in found.attrs["options"]


def test_towards_itself_nothing_changes(subject: spatially.Subject, images: Images, tmp_path: Path) -> None:
    path = tmp_path / "same.safetensors"
    save_file(subject.model.state_dict(), path)
    found = Interpolation(towards=str(path), points=2, extent=(-1, 3)).run(subject, images, batch=5)
    assert found.t.values.tolist() == [-1, 0, 1, 3]
    assert np.ptp(found.nll.values) == 0
    assert float(found.barrier) == pytest.approx(0, abs=1e-12)


def test_a_study_names_each_models_file(other: tuple[Path, nn.Module], tmp_path: Path) -> None:
    for seed, name in ((3, "one"), (4, "two")):
        torch.manual_seed(seed)
        made = spatially.load("test_resnet", pretrained=False, num_classes=12, input_size=32, seed=seed, device="cpu")
        save_file(made.model.state_dict(), tmp_path / f"{name}.safetensors")
    model = {"model": "test_resnet", "pretrained": False, "num_classes": 12, "input_size": 32, "resize": 32}
    options = {"towards": str(tmp_path / "{model}.safetensors"), "points": 2, "extent": [0, 1]}
    study = Study(
        models=[model | {"name": "one"}, model | {"name": "two", "seed": 1}],
        data={"source": "shapes", "limit": 6},
        probes={"interpolation": options},
        batch=6,
    )
    store = run_study(study, tmp_path / "run", device="cpu", console=Console(quiet=True))
    results = store.results()["interpolation"]
    assert list(results) == ["one", "two"]
    assert results["one"].attrs["towards_fingerprint"] != results["two"].attrs["towards_fingerprint"]
    drawing = Interpolation.drawing()
    assert list(drawing.figures(results)) == ["line"]
    table = drawing.tables(results)["interpolation"]
    assert table["loss_1"].tolist() == [float(one.loss.sel(t=1)) for one in results.values()]
    assert "barrier" in drawing.descriptions(results)["line"]
    (tmp_path / "one.safetensors").write_bytes((tmp_path / "two.safetensors").read_bytes())
    with pytest.raises(UserError, match="measured otherwise"):
        run_study(study, tmp_path / "run", device="cpu", console=Console(quiet=True))


def test_what_does_not_fit(subject: spatially.Subject, images: Images, tmp_path: Path) -> None:
    with pytest.raises(NotApplicable, match="there is no second checkpoint; name it"):
        Interpolation().check(subject, images)
    with pytest.raises(UserError, match="there is no file"):
        Interpolation(towards=str(tmp_path / "none.pth")).check(subject, images)
    path = tmp_path / "another.safetensors"
    save_file(nn.Linear(3, 4).state_dict(), path)
    with pytest.raises(UserError, match="does not fit the model"):
        Interpolation(towards=str(path)).check(subject, images)
    with pytest.raises(UserError, match="points must be a whole number"):
        Interpolation(points=1)
