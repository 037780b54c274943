"""Spectra of the Hessian against closed forms, dense Hessians and another library; batches, restarts, mistakes."""

import dataclasses
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import xarray as xr
from rich.console import Console
from scipy import stats
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import spatially
from spatially.errors import NotApplicable, UserError
from spatially.perturb.augment import training_batch
from spatially.probes import Hessian, hessian_figures
from spatially.probes.hessian_vector import HessianVector, select_parameters, twice_differentiable
from spatially.probes.intervals import wilson
from spatially.probes.lanczos import lanczos
from spatially.study import Study, run_study

QUIET = Console(quiet=True)
CLASSES = 3


def subject_of(model: nn.Module, *, side: int = 8, name: str = "model") -> spatially.Subject:
    return spatially.load(model, name=name, input_size=side, num_classes=CLASSES, device="cpu")


def images_for(subject: spatially.Subject, count: int = 24) -> spatially.data.Images:
    generator = np.random.default_rng(0)
    pixels = generator.integers(0, 256, (count, *subject.preprocessing.input_size, 3), dtype=np.uint8)
    return spatially.open_images(pixels, subject, labels=generator.integers(0, CLASSES, count))


def regression(side: int = 8) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * side * side, CLASSES))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES))


def transformer() -> nn.Module:
    torch.manual_seed(0)
    model = timm.models.VisionTransformer(
        img_size=16, patch_size=4, embed_dim=4, depth=1, num_heads=2, mlp_ratio=2, num_classes=CLASSES
    )
    for one in model.parameters():
        one.data += 0.2 * torch.randn_like(one)
    return model


def largest(matrix: np.ndarray, count: int) -> np.ndarray:
    values = np.linalg.eigvalsh(matrix)
    return values[np.argsort(-np.abs(values), kind="stable")][:count]


def dense(subject: spatially.Subject, images: spatially.data.Images, rows: np.ndarray, augmentation: str) -> np.ndarray:
    """Row by row, by plain autograd, with a fresh graph for each."""
    model = subject.computing_in(torch.float64)
    pixels, labels, index = images.batch(rows)
    shown, targets = training_batch(pixels, labels, augmentation=augmentation, index=index, classes=CLASSES)
    parameters = list(model.model.parameters())
    with twice_differentiable():
        targets = targets.double() if targets.is_floating_point() else targets
        gradient = torch.autograd.grad(cross_entropy(model(shown), targets), parameters, create_graph=True)
        flat = torch.cat([one.reshape(-1) for one in gradient])
        found = [
            torch.cat([part.reshape(-1) for part in torch.autograd.grad(one, parameters, retain_graph=True)])
            for one in flat
        ]
    return torch.stack(found).numpy()


def test_a_quadratic_has_the_eigenvalues_of_its_matrix() -> None:
    generator = np.random.default_rng(0)
    root = generator.standard_normal((40, 40))
    matrix = torch.from_numpy(root + root.T)
    weight = torch.rand(40, dtype=torch.float64, requires_grad=True)
    product = HessianVector(weight @ matrix @ weight / 2, [weight])
    found = lanczos(product, lambda number: torch.from_numpy(generator.standard_normal(40)), count=5, tolerance=1e-10)
    np.testing.assert_allclose(found.values, largest(matrix.numpy(), 5), rtol=1e-8)


def test_softmax_regression_has_a_spectrum_in_closed_form() -> None:
    subject = subject_of(regression())
    images = images_for(subject)
    probe = Hessian(augmentation="none", dtype="float64", tolerance=1e-10, share=0.7, batch_size=8, weight_decay=0.03)
    result = probe.run(subject, images)
    assert result.sizes == {"batch": 2, "rank": 5, "member": 8}
    inputs = subject.computing_in(torch.float64).normalise(torch.from_numpy(images.pixels.copy()).float() / 255)
    linear = subject.model[1].double()
    for batch, rows in enumerate(probe.chunks(images, batch=64)):
        np.testing.assert_array_equal(result.image.values[batch], images.index[rows])
        x = np.concatenate([inputs[rows].flatten(1).numpy(), np.ones((8, 1))], axis=1)
        logits = linear(torch.from_numpy(x[:, :-1])).detach()
        p = logits.softmax(1).numpy()
        # H = 1/B Σ (diag p − p pᵀ) ⊗ x xᵀ
        parts = [np.kron(np.diag(q) - np.outer(q, q), np.outer(one, one)) for q, one in zip(p, x, strict=True)]
        hessian = np.mean(parts, axis=0) + 0.03 * np.eye(CLASSES * x.shape[1])
        np.testing.assert_allclose(result.eigenvalue.values[batch], largest(hessian, 5), rtol=1e-8)
        nll = cross_entropy(logits, torch.from_numpy(images.labels[rows]))
        np.testing.assert_allclose(result.nll.values[batch], nll, rtol=1e-12)
    assert result.converged.all()
    assert float(result.negative_share) == 0
    norm = sum(float(one.detach().double().square().sum()) for one in subject.model.parameters())
    np.testing.assert_allclose(float(result.l2), 0.015 * norm, rtol=1e-12)
    assert int(result.weights) == 3 * 193


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_convex_loss_has_no_negative_eigenvalues(dtype: str) -> None:
    subject = subject_of(regression())
    images = images_for(subject)
    for which, size in (("both ends", 6), ("magnitude", 1)):
        probe = Hessian(which=which, batch_size=size, share=0.5, dtype=dtype, weight_decay=0)
        result = probe.run(subject, images)
        assert float(result.negative_share) == 0
        scale = float(np.abs(result.eigenvalue).max())
        # 579 weights, six images and three classes: at least 561 eigenvalues are 0.
        lowest = result.eigenvalue.where(result.end != "positive", drop=True).isel(rank=slice(-2, None))
        np.testing.assert_allclose(lowest, 0, atol=1e-5 * scale)


@pytest.mark.parametrize("make", [network, transformer])
def test_small_networks_against_the_dense_hessian(make: Callable[[], nn.Module]) -> None:
    subject = subject_of(make(), side=16 if make is transformer else 8)
    images = images_for(subject)
    options = {"count": 4, "batch_size": 6, "share": 0.2, "weight_decay": 0}
    (rows,) = Hessian(**options).chunks(images, batch=1)
    matrix = dense(subject, images, rows, "crop-flip")
    values = np.linalg.eigvalsh(matrix)[::-1]
    size = np.abs(values).max()
    for which in ("magnitude", "both ends"):
        result = Hessian(which=which, dtype="float64", tolerance=1e-10, **options).run(subject, images)
        truth = largest(matrix, 4) if which == "magnitude" else np.concatenate([values[:4], values[-4:]])
        np.testing.assert_allclose(result.eigenvalue.values[0], truth, rtol=1e-8, atol=1e-10)
        assert result.converged.all()
        assert float(result.negative_share) == (truth < 0).mean()
        ends = ["magnitude"] * 4 if which == "magnitude" else ["positive"] * 4 + ["negative"] * 4
        assert result.end.values.tolist() == ends
        # In single precision and at the tolerance of everyday, eigenvalues are within their residuals of true ones.
        quick = Hessian(which=which, **options).run(subject, images)
        assert quick.converged.all()
        assert (quick.products < result.products).all()
        assert (quick.residual > 0).any()
        distance = np.abs(quick.eigenvalue.values[0][:, None] - values).min(axis=1)
        assert (distance <= quick.residual.values[0] + 1e-5 * size).all()
        np.testing.assert_allclose(quick.eigenvalue.values[0], truth, atol=1e-3 * size)


def test_weight_decay_shifts_every_eigenvalue_by_itself() -> None:
    subject = subject_of(network())
    images = images_for(subject)
    options = {"which": "both ends", "count": 2, "batch_size": 8, "share": 1.0}
    none, some = (Hessian(weight_decay=decay, **options).run(subject, images) for decay in (0.0, 0.25))
    np.testing.assert_array_equal(some.eigenvalue, none.eigenvalue + 0.25)
    np.testing.assert_array_equal(some.residual, none.residual)
    np.testing.assert_array_equal(some.negative_share_without_l2, none.negative_share)
    assert float(some.weight_decay) == 0.25
    np.testing.assert_array_equal(some.nll, none.nll)


@pytest.mark.parametrize(
    ("make", "patterns"), [(network, ["*"]), (transformer, ["*.attn.*", "*.mlp.*", "*_embed*", "cls_token", "head.*"])]
)
def test_against_curvlinops(make: Callable[[], nn.Module], patterns: list[str]) -> None:
    """Without the weights of layer norms: curvlinops multiplies under vmap, where PyTorch 2.15 has theirs wrong."""
    curvlinops = pytest.importorskip("curvlinops")
    subject = subject_of(make(), side=16 if make is transformer else 8)
    images = images_for(subject)
    probe = Hessian(augmentation="flip", tolerance=1e-5, batch_size=8, share=0.3, weight_decay=0, parameters=patterns)
    result = probe.run(subject, images)
    (rows,) = probe.chunks(images, batch=8)
    pixels, labels, index = images.batch(rows)
    shown, _ = training_batch(pixels, labels, augmentation="flip", index=index, classes=CLASSES)
    parameters = list(select_parameters(subject.model, patterns).values())
    data = [(subject.normalise(shown), labels)]
    with twice_differentiable():
        operator = curvlinops.HessianLinearOperator(subject.model, nn.CrossEntropyLoss(), parameters, data)
        matrix = (operator @ torch.eye(operator.shape[1])).detach().double().numpy()
    truth = largest((matrix + matrix.T) / 2, 5)
    np.testing.assert_allclose(result.eigenvalue.values[0], truth, rtol=1e-4)


@pytest.mark.parametrize("augmentation", ["mixup", "cutmix"])
def test_mixed_targets(augmentation: str) -> None:
    subject = subject_of(regression(4), side=4)
    images = images_for(subject)
    probe = Hessian(augmentation=augmentation, dtype="float64", tolerance=1e-9, batch_size=6, share=0.2, weight_decay=0)
    (rows,) = probe.chunks(images, batch=1)
    truth = largest(dense(subject, images, rows, augmentation), 5)
    np.testing.assert_allclose(probe.run(subject, images).eigenvalue.values[0], truth, rtol=1e-7)


class Transposing(nn.Module):
    """Patches as tokens and back: the gradient of a single image comes to the batch norm transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.mix = nn.Conv2d(3, 4, 4, stride=4), nn.Linear(4, 4)
        self.norm, self.head = nn.BatchNorm2d(4), nn.Linear(4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.mix(self.stem(images).flatten(2).transpose(1, 2)).tanh()
        return self.head(self.norm(tokens.transpose(1, 2).unflatten(2, (2, 2))).mean((2, 3)))


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, CLASSES)
    )


@pytest.mark.parametrize("make", [normalised, Transposing])
def test_one_image_a_batch(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    subject = subject_of(make())
    images = images_for(subject, 4)
    probe = Hessian(batch_size=1, share=1.0, dtype="float64", tolerance=1e-9, weight_decay=0)
    result = probe.run(subject, images)
    assert result.sizes["batch"] == 4
    rows = probe.chunks(images, batch=1)[2]
    truth = largest(dense(subject, images, np.repeat(rows, 2), "crop-flip"), 5)
    np.testing.assert_allclose(result.eigenvalue.values[2], truth, rtol=1e-6, atol=1e-9)


def test_some_parameters_alone() -> None:
    subject = subject_of(network())
    images = images_for(subject)
    options = {"batch_size": 8, "share": 0.3, "dtype": "float64", "tolerance": 1e-9, "weight_decay": 0}
    result = Hessian(parameters=["3.*"], **options).run(subject, images)
    (rows,) = Hessian(**options).chunks(images, batch=8)
    part = slice(-(36 * CLASSES + CLASSES), None)
    truth = largest(dense(subject, images, rows, "crop-flip")[part, part], 5)
    np.testing.assert_allclose(result.eigenvalue.values[0], truth, rtol=1e-7)
    assert int(result.weights) == 111
    assert Hessian(parameters="3.*").parameters == ("3.*",)
    assert all(one.requires_grad for one in subject.model.parameters())


def test_the_model_is_as_it_was() -> None:
    subject = subject_of(transformer(), side=16)
    images = images_for(subject)
    before = {name: one.clone() for name, one in subject.model.state_dict().items()}
    Hessian(dtype="float64", batch_size=6).run(subject, images)
    assert subject.dtype == torch.float32
    for name, one in subject.model.state_dict().items():
        assert one.dtype == before[name].dtype
        assert torch.equal(one, before[name])
    assert all(one.grad is None and one.requires_grad for one in subject.model.parameters())


def test_a_subject_in_half_precision_is_measured_in_single() -> None:
    model = network()
    half = spatially.load(model, name="m", input_size=8, num_classes=CLASSES, device="cpu", dtype="bfloat16")
    single = subject_of(model)
    images = images_for(single)
    options = {"batch_size": 8, "share": 0.3}
    np.testing.assert_array_equal(
        Hessian(**options).run(half, images).eigenvalue, Hessian(**options).run(single, images).eigenvalue
    )


def test_our_regular_attention_takes_part() -> None:
    subject = spatially.load(
        "swin_tiny_r", pretrained=False, num_classes=CLASSES, input_size=32, device="cpu",
        model_options={"depths": (1, 1), "num_heads": (1, 2), "embed_dim": 8},
    )  # fmt: skip
    images = images_for(subject, 6)
    result = Hessian(batch_size=3, share=0.5, parameters=["layers.0.*"], count=2).run(subject, images)
    assert result.converged.all()
    assert float(result.asymmetry.max()) < 1e-4
    assert np.abs(result.eigenvalue).min() > 0


def test_batches_are_a_share_of_the_data() -> None:
    subject = subject_of(regression())
    images = images_for(subject, 50)
    for share, size, count in ((0.1, 16, 1), (1.0, 16, 3), (0.5, 5, 5), (0.001, 1, 1)):
        chunks = Hessian(share=share, batch_size=size).chunks(images, batch=7)
        assert [len(rows) for rows in chunks] == [size] * count
        assert len(set(np.concatenate(chunks).tolist())) == size * count


def study(**more: object) -> Study:
    return Study(
        models=[{"model": "resnet10t", "pretrained": False, "num_classes": 12, "input_size": 32, "resize": 32}],
        data={"source": "shapes", "limit": 24},
        probes={"hessian": {"batch_size": 4, "share": 0.5, "count": 2, "parameters": ["fc.*"], **more}},
        batch=8,
    )


def test_interrupted_it_goes_on_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One thread: matrices this small are slowed down by more.
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    run_study(study(), tmp_path / "whole", device="cpu", console=QUIET)
    original, calls = Hessian.measure, []

    def interrupted(self: Hessian, *arguments: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return original(self, *arguments, **options)

    monkeypatch.setattr(Hessian, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(study(), tmp_path / "cut", device="cpu", console=QUIET)
    run_study(study(), tmp_path / "cut", device="cpu", console=QUIET)
    assert len(calls) == 4
    file = Path("results") / "resnet10t.hessian.nc"
    assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()


def handed(monkeypatch: pytest.MonkeyPatch, **options: object) -> dict[str, object]:
    """What the search for eigenvalues is given."""
    seen: dict[str, object] = {}

    def watched(*arguments: object, **given: object) -> object:
        seen.update(given)
        return lanczos(*arguments, **given)  # type: ignore[arg-type]

    monkeypatch.setattr("spatially.probes.hessian.lanczos", watched)
    subject = subject_of(regression(4), side=4)
    Hessian(batch_size=4, share=0.2, **options).run(subject, images_for(subject))  # type: ignore[arg-type]
    return seen


def test_options_reach_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"count": 2, "which": "both ends", "tolerance": 0.01, "products": 30, "confirm": True}
    seen = handed(monkeypatch, basis=12, weight_decay=0.3, **options)
    assert seen == options | {"room": 12, "shift": 0.3}


def test_the_seed_draws_mini_batches_and_their_augmentation() -> None:
    subject = subject_of(regression())
    images = images_for(subject)
    first, other = (Hessian(seed=seed, batch_size=24, share=1.0, dtype="float64") for seed in (0, 5))
    assert first.chunks(images, batch=1)[0].tolist() != other.chunks(images, batch=1)[0].tolist()
    (rows,) = other.chunks(images, batch=1)
    pixels, labels, index = images.batch(rows)
    shown, targets = training_batch(pixels, labels, augmentation="crop-flip", index=index, classes=CLASSES, seed=5)
    expected = cross_entropy(subject.computing_in(torch.float64)(shown), targets)
    assert float(other.run(subject, images).nll[0]) == pytest.approx(float(expected.detach()), rel=1e-12)


def test_numbers_of_a_spectrum_by_hand() -> None:
    eigenvalues = np.array([[-9.0, 4.0, -0.05], [2.0, -0.05, -3.0], [5.0, 1.0, 0.2], [1.0, 0.5, 0.3]])
    outcomes = xr.Dataset(
        {"eigenvalue": (("batch", "rank"), eigenvalues), "converged": (("batch", "rank"), eigenvalues > 0)}
    ).assign(weight_decay=0.1)
    found = Hessian().summarise(outcomes, chance=1 / 3)
    assert float(found.negative_share) == 4 / 12
    outcomes["weight_decay"] = 0.25  # without it the 0.2 is negative as well
    assert float(Hessian().summarise(outcomes, chance=1 / 3).negative_share_without_l2) == 5 / 12
    # four mini-batches, not twelve eigenvalues
    assert (float(found.negative_share_low), float(found.negative_share_high)) == pytest.approx(wilson(4 / 3, 4))
    assert float(found.largest) == np.mean([4, 2, 5, 1])
    half = stats.t.ppf(0.975, 3) * np.std([4, 2, 5, 1], ddof=1) / 2
    assert float(found.largest_high) == pytest.approx(3 + half)
    assert float(found.largest_low) == pytest.approx(3 - half)


class Once(torch.autograd.Function):
    @staticmethod
    def forward(context, value):  # type: ignore[no-untyped-def]
        return value.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(context, gradient):  # type: ignore[no-untyped-def]
        return gradient.clone()


class Wrong(torch.autograd.Function):
    """A scaled value whose backward hides from the second derivative that it depends on the scale."""

    @staticmethod
    def forward(context, value, scale):  # type: ignore[no-untyped-def]
        context.save_for_backward(value)
        context.scale = scale.detach()
        return value * scale

    @staticmethod
    def backward(context, gradient):  # type: ignore[no-untyped-def]
        return gradient * context.scale, gradient * context.saved_tensors[0]


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale, self.head = nn.Linear(192, 4), nn.Linear(192, 4), nn.Linear(4, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1)
        return self.head(Wrong.apply(self.body(pixels), self.scale(pixels)))


class AlmostRight(Scaled):
    """The wrong part is a small share of the whole."""

    def forward(self, images: Tensor) -> Tensor:
        pixels = images.flatten(1)
        return self.head(self.body(pixels) + 0.03 * Wrong.apply(self.body(pixels), self.scale(pixels)))


class Spectral(nn.Module):
    """A filter of complex numbers over the frequencies of an image."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(8, 5, dtype=torch.cfloat))
        self.head = nn.Linear(192, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.fft.irfft2(torch.fft.rfft2(images) * self.filter).flatten(1))


class Through(nn.Module):
    def __init__(self, function) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.body, self.head, self.function = nn.Linear(192, 4), nn.Linear(4, CLASSES), function

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.function(self.body(images.flatten(1))))


class Still(nn.Module):
    def forward(self, images: Tensor) -> Tensor:
        return images.mean((2, 3))


def test_models_without_a_hessian() -> None:
    def run(model: nn.Module, **options: object) -> None:
        torch.manual_seed(0)
        subject = subject_of(model)
        Hessian(**{"batch_size": 4, **options}).run(subject, images_for(subject))

    with pytest.raises(NotApplicable, match="Once cannot be differentiated twice"):
        run(Through(Once.apply))
    with pytest.raises(UserError, match="not symmetric"):
        run(Scaled())
    with pytest.raises(UserError, match=r"not symmetric .* is wrong$"):  # float64 has digits enough to tell
        run(AlmostRight(), dtype="float64")
    run(AlmostRight())
    with pytest.raises(NotApplicable, match=r"complex weights \(filter\)"):
        run(Spectral())
    run(Spectral(), parameters=["head.*"])
    with pytest.raises(NotApplicable, match="no parameters"):
        run(Still())
    with pytest.raises(NotApplicable, match="no gradient of its loss"):
        run(Through(lambda value: value.detach()), parameters=["body.*"])
    with pytest.raises(UserError, match=r"unknown parameter 'boby\.\*'"):
        run(Through(torch.relu), parameters=["boby.*"])
    broken = Through(torch.relu)
    broken.body.weight.data.fill_(torch.nan)
    with pytest.raises(UserError, match="the loss of model is not finite: the output of body is not finite"):
        run(broken)


def test_mistakes() -> None:
    subject = subject_of(regression())
    with pytest.raises(UserError, match="takes 16 images, but there are 10"):
        Hessian().run(subject, images_for(subject, 10))
    features = spatially.load(
        "resnet10t", pretrained=False, device="cpu", input_size=32, model_options={"num_classes": 0}
    )
    with pytest.raises(UserError, match="classif"):
        Hessian().run(features, images_for(subject))
    labelled = images_for(subject)
    with pytest.raises(UserError, match="labels: must be from 0 to 2"):
        Hessian().run(subject, dataclasses.replace(labelled, labels=np.full(24, -1)))
    for options, words in (
        ({"which": "largest"}, "unknown which 'largest'"),
        ({"dtype": "float16"}, "unknown dtype"),
        ({"augmentation": "crop"}, "unknown augmentation"),
        ({"count": 0}, "count must be a whole number of at least 1"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
        ({"share": 0}, "share must be a number above 0"),
        ({"tolerance": 1}, "tolerance must be a number between 0 and 1"),
        ({"weight_decay": -1}, "weight_decay must be a number of at least 0"),
        ({"products": 3}, "products must be a whole number of at least 5"),
        ({"basis": 11}, "basis must be a whole number of at least 12"),
        ({"parameters": []}, "parameters must be patterns"),
    ):
        with pytest.raises(UserError, match=words):
            Hessian(**options)


def test_too_few_products_are_said(tmp_path: Path) -> None:
    subject = subject_of(transformer(), side=16)
    result = Hessian(products=5, batch_size=8).run(subject, images_for(subject))
    assert not result.converged.all()
    assert float(result.converged_share) < 1
    assert "Not converged: m: " in hessian_figures.captions({"m": result})["spectrum"]


def test_figures_and_tables() -> None:
    results = {}
    for name, model in (("flat", regression()), ("sharp", network())):
        subject = subject_of(model, name=name)
        with torch.no_grad():
            for one in model.parameters():
                one *= 3 if name == "sharp" else 1
        results[name] = Hessian(batch_size=4, share=1.0).run(subject, images_for(subject))
    figures = hessian_figures.figures(results)
    assert set(figures) == {"spectrum", "negative"}
    captions, words = hessian_figures.captions(results), hessian_figures.descriptions(results)
    assert set(figures) <= set(captions) & set(words) | {"hessian"}
    assert "the 5 of largest magnitude" in captions["spectrum"]
    panel = figures["spectrum"].axes[0]
    outlines = [one for one in panel.patches if hasattr(one, "get_data") and not one.get_fill()]
    for outline, result in zip(outlines, results.values(), strict=True):
        heights, edges, _ = outline.get_data()
        np.testing.assert_allclose(heights.sum(), 100)
        assert (np.abs(edges) < 1e-12).any()
        values = result.eigenvalue.values.ravel()
        negative = heights[edges[1:] <= 1e-12].sum() / 100
        np.testing.assert_allclose(negative, (values < 0).mean())
    table = hessian_figures.tables(results)["hessian"].set_index("model")
    np.testing.assert_allclose(table["negative_share"]["sharp"], float(results["sharp"].negative_share))
    np.testing.assert_allclose(table["largest"]["flat"], results["flat"].eigenvalue.max("rank").mean())


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_agrees() -> None:
    model = transformer()
    here = subject_of(model, side=16)
    images = images_for(here)
    options = {"batch_size": 8, "share": 1.0, "dtype": "float64", "tolerance": 1e-9}
    expected = Hessian(**options).run(here, images)
    there = spatially.load(model, name="model", input_size=16, num_classes=CLASSES, device="cuda")
    found = Hessian(**options).run(there, images)
    np.testing.assert_allclose(found.eigenvalue, expected.eigenvalue, rtol=1e-6)


@pytest.mark.slow
def test_two_processes_give_the_same_bytes(tmp_path: Path) -> None:
    words = "probe resnet10t --no-pretrained --num-classes 12 --input-size 32 --resize 32 --data shapes --limit 24"
    options = ["--probes", "hessian", "--set", "hessian.batch_size=4", "--set", "hessian.share=0.8", "--device", "cpu"]
    command = ["-m", "spatially", *words.split(), *options, "--set", 'hessian.parameters=["fc.*"]', "--out"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for start, out in (([sys.executable], "one"), (launcher, "two")):
        subprocess.run([*start, *command, str(tmp_path / out)], check=True, capture_output=True, timeout=300)
    one, two = (tmp_path / out / "results" / "resnet10t.hessian.nc" for out in ("one", "two"))
    assert one.read_bytes() == two.read_bytes()
