"""Landscapes against plain losses in float64, exact bowls, and the same bytes by any number of processes."""

import copy
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import xarray as xr
from rich.console import Console
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import spatially
from spatially.data import Images
from spatially.errors import NotApplicable, UserError
from spatially.perturb import training_batch
from spatially.probes import Landscape, weight_losses, weight_points
from spatially.probes.weight_paths import Plane
from spatially.study import Study, run_study

QUIET = Console(quiet=True)


class Small(nn.Module):
    """A convolution, a batch norm, a position and a head: 4 classes."""

    num_classes = 4

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 5, stride=4)
        self.norm = nn.BatchNorm2d(8)
        self.pos_embed = nn.Parameter(torch.randn(1, 8, 7, 7))
        self.head = nn.Linear(8, 4)

    def forward(self, images: Tensor) -> Tensor:
        return self.head((self.norm(self.stem(images)) + self.pos_embed).relu().mean(dim=(2, 3))) * 3


def load(model: nn.Module | None = None, **options: object) -> spatially.Subject:
    torch.manual_seed(0)
    return spatially.load(model or Small(), name="small", input_size=32, device="cpu", **{"dtype": "float64"} | options)


def pictures(subject: spatially.Subject, count: int = 22) -> Images:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, 32, 32, 3), dtype=np.uint8)
    return spatially.open_images(pixels, subject, labels=generator.integers(0, 4, count))


def plain_loss(model: nn.Module, subject: spatially.Subject, images: Images, augmentation: str) -> tuple[float, float]:
    """NLL and accuracy, written down without the library's machinery."""
    pixels, labels, index = images.batch(np.arange(len(images)))
    inputs, targets = training_batch(pixels, labels, augmentation=augmentation, index=index, classes=4)
    with torch.no_grad():
        logits = model(subject.normalise(inputs))
    return float(cross_entropy(logits, targets)), float((logits.argmax(dim=1) == targets).double().mean())


@pytest.mark.parametrize("augmentation", ["none", "flip", "crop-flip"])
def test_the_origin_is_the_plain_loss(augmentation: str) -> None:
    subject = load()
    images = pictures(subject)
    found = Landscape(points=3, augmentation=augmentation, weight_decay=0.1).run(subject, images, batch=8)
    nll, accuracy = plain_loss(subject.model, subject, images, augmentation)
    assert float(found.nll.sel(a=0, b=0)) == pytest.approx(nll, rel=1e-12)
    assert float(found.accuracy.sel(a=0, b=0)) == accuracy
    squares = sum(float(one.detach().square().sum()) for one in subject.model.parameters())
    assert float(found.l2.sel(a=0, b=0)) == pytest.approx(0.05 * squares, rel=1e-12)
    assert float(found.origin_loss) == float(found.loss.sel(a=0, b=0)) == pytest.approx(nll + 0.05 * squares)


def test_the_origin_in_the_models_own_precision_has_its_bits() -> None:
    subject = load(dtype="float32")
    images = pictures(subject)
    rows = Landscape(points=3, augmentation="none").chunks(images, batch=len(images))
    found = Landscape(points=3, augmentation="none").measurer(subject, images, batch=len(images))(rows[0])
    pixels, labels, _ = images.batch(images.order(0))
    with torch.inference_mode():
        nll = cross_entropy(subject(pixels.float() / 255), labels, reduction="none").double().sum() / len(images)
    assert found.nll.values.tolist() == [float(nll)]


def test_every_point_is_the_loss_of_the_moved_model() -> None:
    subject = load()
    images = pictures(subject)
    before = copy.deepcopy(subject.model.state_dict())
    probe = Landscape(points=(3, 2), extent=((-1, 1), (0.5, 2)), weight_decay=0.1, seed=0)
    found = probe.run(subject, images, batch=5)
    plane = Plane(subject.model, seed=0)
    for a in found.a.values:
        for b in found.b.values:
            moved = copy.deepcopy(subject.model)
            with torch.no_grad():
                for name in plane.weights:
                    moved.get_parameter(name).add_(a * plane.directions[0][name] + b * plane.directions[1][name])
            nll, accuracy = plain_loss(moved, subject, images, "crop-flip")
            squares = sum(float(one.detach().square().sum()) for one in moved.parameters())
            point = found.sel(a=a, b=b)
            assert float(point.nll) == pytest.approx(nll, rel=1e-12)
            assert float(point.l2) == pytest.approx(0.05 * squares, rel=1e-12)
            assert float(point.accuracy) == accuracy
    assert all(torch.equal(one, before[name]) for name, one in subject.model.state_dict().items())
    nll, _ = plain_loss(subject.model, subject, images, "crop-flip")
    assert float(found.origin_nll) == pytest.approx(nll, rel=1e-12)  # not on this grid
    assert not subject.model.training


class Deaf(nn.Module):
    """Every class alike, whatever the weights."""

    num_classes = 4

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3))
        self.offset = nn.Parameter(torch.randn(4))

    def forward(self, images: Tensor) -> Tensor:
        return 0 * (images.mean(dim=(2, 3)) @ self.weight.T + self.offset)


def test_a_model_that_does_not_listen_shows_the_bowl_of_its_l2() -> None:
    subject = load(Deaf())
    found = Landscape(points=5, weight_decay=0.2).run(subject, pictures(subject), batch=8)
    assert np.allclose(found.nll, np.log(4), rtol=1e-12)
    weight = subject.model.weight.detach()
    first, second = (one["weight"] for one in Plane(subject.model, seed=0).directions)
    a, b = np.meshgrid(found.a, found.b, indexing="ij")
    dot = lambda x, y: float((x * y).sum())  # noqa: E731
    squares = dot(weight, weight) * (1 + a**2 + b**2) + 2 * a * dot(weight, first) + 2 * b * dot(weight, second)
    squares = (
        squares + 2 * a * b * dot(first, second) + dot(subject.model.offset.detach(), subject.model.offset.detach())
    )
    assert np.allclose(found.l2, 0.1 * squares, rtol=1e-12)
    # The second derivative along a filter-normalised direction is λ‖d‖² = λ‖w‖².
    assert float(found.curvature) == pytest.approx(0.2 * dot(weight, weight), rel=1e-9)


def test_authors_add_the_norms_unsquared() -> None:
    subject = load(Deaf())
    found = Landscape(points=3, weight_decay=0.2, style="authors").run(subject, pictures(subject), batch=8)
    weight, offset = subject.model.weight.detach(), subject.model.offset.detach()
    first = Plane(subject.model, seed=0, style="authors").directions[0]["weight"]
    assert float(found.l2.sel(a=0, b=0)) == pytest.approx(0.2 * float(weight.norm() + offset.norm()), rel=1e-12)
    assert float(found.l2.sel(a=1, b=0)) == pytest.approx(
        0.2 * float((weight + first).norm() + offset.norm()), rel=1e-9
    )


def test_circles_by_hand() -> None:
    subject = load()
    found = Landscape(points=5, extent=(-2, 2)).run(subject, pictures(subject), batch=8)
    assert found.radius.values.tolist() == [0, 1, 2]
    around = []
    for angle in np.arange(72) * np.pi / 36:
        x, y = np.cos(angle), np.sin(angle)
        left, low = int(min(np.floor(x), 1)), int(min(np.floor(y), 1))
        corners = [
            (left + i, low + j, abs(1 - i - (x - left)) * abs(1 - j - (y - low))) for i in (0, 1) for j in (0, 1)
        ]
        around.append(
            sum(share * float(found.loss.sel(a=a, b=b)) for a, b, share in corners) - float(found.origin_loss)
        )
    assert float(found.rise.sel(radius=1)) == pytest.approx(np.mean(around))
    assert float(found.rise_least.sel(radius=1)) == pytest.approx(min(around))
    assert float(found.rise_most.sel(radius=1)) == pytest.approx(max(around))
    assert float(found.rise.sel(radius=0)) == 0


@pytest.mark.parametrize(
    ("points", "extent", "radii"),
    [
        ((5, 3), (-1, 1), [0, 1]),  # by the wider step
        ((5, 5), ((-1, 1), (-2, 2)), [0, 1]),
        ((5, 7), ((-2, 2), (-1, 2)), [0, 1]),  # as far as all four sides reach
        ((3, 3), ((0, 2), (-1, 1)), [0]),  # the origin at a side
        ((3, 3), ((1, 2), (-1, 1)), [0]),  # and outside
    ],
)
def test_circles_lie_in_the_grid(points: tuple[int, int], extent: object, radii: list[float]) -> None:
    subject = load(Deaf())
    found = Landscape(points=points, extent=extent).run(subject, pictures(subject, 8), batch=8)  # type: ignore[arg-type]
    assert found.radius.values.tolist() == radii
    assert np.isfinite(found.rise).all()
    assert float(found.rise[0]) == 0


def test_half_radius_and_accuracy_of_circles_by_hand() -> None:
    """Accuracy 1 − 0.2·|a|, the same for every b: on circles it falls by 0.2·r·(mean of |cos|)."""
    a = np.linspace(-2, 2, 5)
    slope = np.repeat(1 - 0.2 * np.abs(a)[:, None], 5, axis=1)
    flat = (("a", "b"), np.zeros((5, 5)))
    outcomes = xr.Dataset(
        {"nll": flat, "l2": flat, "nll_deviation": flat, "accuracy": (("a", "b"), slope)}, coords={"a": a, "b": a}
    ).assign(measured=(("a", "b"), np.full((5, 5), 10)))
    for name in ("nll", "l2", "nll_deviation", "accuracy", "measured"):
        outcomes[f"origin_{name}"] = outcomes[name].sel(a=0, b=0).drop_vars(("a", "b"))
    found = Landscape(points=5, extent=(-2, 2)).summarise(outcomes, chance=0.6)
    mean = float(np.abs(np.cos(np.arange(72) * np.pi / 36)).mean())
    np.testing.assert_allclose(found.ring_accuracy, 1 - 0.2 * mean * np.arange(3), rtol=1e-12)
    assert float(found.half_radius) == pytest.approx(0.2 / (0.2 * mean))  # half-way from 1 down to 0.6, not to 0
    assert np.isnan(Landscape(points=5).summarise(outcomes, chance=0.1).half_radius)


@pytest.mark.parametrize("style", ["filter", "authors"])
def test_the_seed_draws_directions_and_augmentation(style: str) -> None:
    subject = load()
    images = pictures(subject)
    found = Landscape(points=2, seed=4, style=style).run(subject, images, batch=8)
    pixels, labels, index = images.batch(np.arange(len(images)))
    inputs, targets = training_batch(pixels, labels, index=index, classes=4, seed=4)
    each = cross_entropy(subject(inputs).detach(), targets, reduction="none")
    assert float(found.origin_nll) == pytest.approx(float(each.mean()), rel=1e-12)
    assert float(found.origin_nll_deviation) == pytest.approx(float(each.std()), rel=1e-9)
    plane, moved = Plane(subject.model, seed=4, style=style), copy.deepcopy(subject.model)
    with torch.no_grad():
        for name in plane.weights:
            moved.get_parameter(name).sub_(plane.directions[0][name] + plane.directions[1][name])
        nll = cross_entropy(moved(subject.normalise(inputs)), targets)
    assert float(found.nll.sel(a=-1, b=-1)) == pytest.approx(float(nll), rel=1e-12)


def test_mixed_images_have_mixed_targets() -> None:
    subject = load()
    images = pictures(subject, 8)
    found = Landscape(points=2, augmentation="mixup").run(subject, images, batch=8)
    order = images.order(0)
    pixels, labels, index = images.batch(order)
    inputs, targets = training_batch(pixels, labels, augmentation="mixup", index=index, classes=4)
    with torch.no_grad():
        logits = subject(inputs)
    assert float(found.origin_nll) == pytest.approx(float(cross_entropy(logits, targets.double())), rel=1e-12)
    right = logits.argmax(dim=1) == targets.argmax(dim=1)  # the class with the larger share
    assert float(found.origin_accuracy) == float(right.double().mean())


def test_images_are_augmented_once_and_again_only_for_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    subject = load()
    images = pictures(subject)
    calls, original = [], training_batch

    def counted(*arguments: Tensor, **options: object) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return original(*arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(weight_losses, "training_batch", counted)
    kept = Landscape(points=3).run(subject, images, batch=8)
    assert len(calls) == 3  # batches, for nine points
    monkeypatch.setattr(weight_losses, "free_memory", lambda _: 4 * 8 * 3 * 32 * 32 * 4 + 1000)  # for one batch
    again = Landscape(points=3).run(subject, images, batch=8)
    assert len(calls) == 3 + 1 + 9 * 2
    assert kept.equals(again)


class Fragile(Small):
    """Answers NaN as soon as its head is not what it was."""

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.register_buffer("kept", self.head.weight.detach().clone() + broken)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + torch.where((self.head.weight - self.kept).abs().max() > 0.1, torch.nan, 0.0)


def test_nan_away_from_the_origin_is_kept_and_said() -> None:
    subject = load(Fragile())
    found = Landscape(points=3).run(subject, pictures(subject), batch=8)
    assert int(np.isnan(found.nll).sum()) == int(np.isnan(found.accuracy).sum()) == 8
    assert np.isfinite(found.l2).all()
    drawing = Landscape.drawing()
    assert "of small at 8 of 9 points" in drawing.captions({"small": found})["contours"]
    assert set(drawing.figures({"small": found})) == {"contours", "surfaces", "accuracy", "profiles"}


def test_nan_at_the_origin_is_an_error() -> None:
    subject = load(Fragile(broken=True))
    with pytest.raises(
        UserError,
        match=r"the loss of small at its own weights is nan: the output of .* is not finite; look at its weights",
    ):
        Landscape(points=3).run(subject, pictures(subject), batch=8)


class Vectors(nn.Module):
    num_classes = 4

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, images: Tensor) -> Tensor:
        return nn.functional.pad(images.mean(dim=(2, 3)) * self.scale, (0, 1))


def test_models_and_options_that_do_not_fit() -> None:
    subject = load(Vectors())
    with pytest.raises(NotApplicable, match="no weights of two dimensions"):
        Landscape().check(subject, pictures(subject))
    small = load()
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    unlabelled = spatially.open_images(pixels, small, labels=[-1] * 4, answers=False)
    with pytest.raises(UserError, match="labels: must be from 0 to 3"):
        Landscape().run(small, unlabelled)
    for options, message in (
        ({"points": 1}, "points must be whole numbers of at least 2"),
        ({"points": (3, 4, 5)}, "points must be one for both axes or one for each"),
        ({"extent": (1, -1)}, "extent must go from a lower to a higher"),
        ({"extent": ("a", "b")}, "extent must hold two numbers"),
        ({"weight_decay": -1}, "weight_decay must be a number of at least 0"),
        ({"style": "author"}, "unknown style 'author': did you mean 'authors'"),
        ({"augmentation": "all"}, "unknown augmentation"),
    ):
        with pytest.raises(UserError, match=message):
            Landscape(**options)


def test_grids() -> None:
    probe = Landscape(points=(3, 5), extent=((-1, 1), (0, 2)))
    assert probe.axes == ((-1.0, 0.0, 1.0), (0.0, 0.5, 1.0, 1.5, 2.0))
    assert probe.passes == 15
    assert Landscape(points=4).passes == 17
    assert len(Landscape().places) == 441
    first = Landscape().chunks(None, batch=1)[0]  # type: ignore[arg-type]
    assert Landscape().places[int(first[0])] == (0.0, 0.0)


# Studies

MODEL = {"model": "test_resnet", "pretrained": False, "num_classes": 12, "input_size": 32, "resize": 32}


def study(**options: object) -> Study:
    return Study(
        models=[MODEL],
        data={"source": "shapes", "limit": 10},
        probes={"landscape": {"points": 3, **options}},
        batch=4,
    )


def contents(folder: Path) -> bytes:
    return (folder / "results" / "test_resnet.landscape.nc").read_bytes()


def test_interrupted_at_any_point_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_study(study(), tmp_path / "whole", device="cpu", console=QUIET)
    measure, calls = weight_points.Measuring.__call__, []

    def interrupted(self: weight_points.Measuring, rows: np.ndarray, **options: object) -> object:
        calls.append(int(rows[0]))
        if len(calls) in (1, 5, 8):
            raise KeyboardInterrupt
        return measure(self, rows, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(weight_points.Measuring, "__call__", interrupted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run_study(study(), tmp_path / "cut", device="cpu", console=QUIET)
    run_study(study(), tmp_path / "cut", device="cpu", console=QUIET)
    assert len(calls) == 9 + 3  # no point twice but those that were interrupted
    assert contents(tmp_path / "cut") == contents(tmp_path / "whole")


def test_two_processes_give_the_same_bytes(tmp_path: Path) -> None:
    run_study(study(), tmp_path / "one", device="cpu", console=QUIET)
    words = "probe test_resnet --no-pretrained --num-classes 12 --input-size 32 --resize 32 --data shapes --limit 10 --batch 4"
    options = [
        "--probes",
        "landscape",
        "--set",
        "landscape.points=3",
        "--device",
        "cpu",
        "--out",
        str(tmp_path / "two"),
    ]
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "spatially",
    ]
    subprocess.run([*launcher, *words.split(), *options], check=True, capture_output=True, timeout=300)
    assert contents(tmp_path / "two") == contents(tmp_path / "one")


def test_the_plan_counts_points(tmp_path: Path) -> None:
    console = Console(record=True, width=160, quiet=False, file=open("/dev/null", "w"))  # noqa: SIM115
    run_study(study(), tmp_path, device="cpu", console=console, dry_run=True)
    assert " 90 " in console.export_text()  # nine points of ten images


def test_report(tmp_path: Path) -> None:
    from spatially.report.study import report_study

    run_study(study(), tmp_path, device="cpu", console=QUIET)
    page = report_study(tmp_path).read_text()
    assert "Loss landscapes" in page or "landscape_surfaces" in page
    assert (tmp_path / "tables" / "landscape.csv").exists()
    assert {path.stem for path in (tmp_path / "figures").glob("*.svg")} >= {
        f"landscape_{name}" for name in ("contours", "surfaces", "accuracy", "profiles")
    }
