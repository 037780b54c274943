"""Receptive fields of networks whose field is known, and against plain gradients and an independent program."""

from pathlib import Path

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from PIL import Image
from rich.console import Console
from torch import Tensor, nn

import spatially
from spatially.errors import NotApplicable, UserError
from spatially.probes import ReceptiveField
from spatially.probes.receptive_field import squares
from spatially.study import Study, run_study
from spatially.study.store import read_dataset
from spatially.surgery import reset_positions

SMALL = {"depth": 2, "img_size": 64, "embed_dim": 32, "num_heads": 4, "num_classes": 5}
STD = (0.2, 0.3, 0.4)


def subject_of(model: nn.Module, size: int = 64, **options: object) -> spatially.Subject:
    return spatially.load(model, name="model", input_size=size, device="cpu", mean=(0.5,) * 3, std=STD, **options)


def noise(subject: spatially.Subject, count: int = 6) -> spatially.data.Images:
    pixels = np.random.default_rng(0).integers(0, 256, (count, *subject.preprocessing.input_size, 3), dtype=np.uint8)
    return spatially.open_images(pixels, subject, labels=np.zeros(count, dtype=int))


def uneven(model: nn.Module) -> nn.Module:
    """Norms with weights of their own: with equal ones the mean over channels would be the same for every image."""
    torch.manual_seed(1)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            for parameter in module.parameters(recurse=False):
                nn.init.normal_(parameter, 1.0, 0.5)
    return model.eval()


@pytest.fixture
def vit() -> spatially.Subject:
    torch.manual_seed(0)
    return subject_of(uneven(timm.create_model("vit_tiny_patch16_224", **SMALL)))


class Stack(nn.Module):
    """Convolutions of positive weights without bias, a pool and a classifier."""

    def __init__(self, kernels: list[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.Conv2d(3 if not number else 4, 4, k, padding=k // 2, bias=False) for number, k in enumerate(kernels))
        )
        for layer in self.layers:
            nn.init.uniform_(layer.weight, 0.1, 1)
        self.head = nn.Linear(4, 5)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(images).mean((2, 3)))


@pytest.mark.parametrize("style", ["kim", "luo", "replknet"])
def test_linear_convolutions_have_the_support_and_the_values_of_their_kernel(style: str) -> None:
    model = Stack([3, 5])
    subject = subject_of(model, 32)
    result = ReceptiveField(style=style).run(subject, noise(subject))
    field = result.receptive_field.values
    assert field.sum() == pytest.approx(1, abs=1e-12)
    assert (int(result.row), int(result.column)) == (15, 15)
    inside = np.zeros_like(field, dtype=bool)
    inside[12:19, 12:19] = True  # 3×3 and 5×5 make 7×7
    assert (field[inside] > 0).all()
    assert (field[~inside] == 0).all()
    # The two kernels in one: what each input channel adds to the sum of the outputs.
    first, second = model.layers[0].weight, model.layers[1].weight
    joint = F.conv_transpose2d(second.sum(0, keepdim=True), first).detach()[0]
    assert joint.shape == (3, 7, 7)
    if style != "replknet":  # which counts images only where outputs are positive
        np.testing.assert_allclose(field[12:19, 12:19], joint.mean(0) / joint.mean(0).sum(), rtol=1e-4)


def test_a_patch_wise_network_stays_inside_its_patch() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 8, stride=8),
        nn.GELU(),
        nn.Conv2d(8, 8, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    subject = subject_of(model, 32)
    result = ReceptiveField(position=(2, 1)).run(subject, noise(subject))
    field = result.receptive_field.values
    assert field[16:24, 8:16].sum() == pytest.approx(1)
    assert (float(result.source_y), float(result.source_x)) == (20, 12)
    assert (result.side.values <= 8).all()


def test_against_a_plain_loop_over_images(vit: spatially.Subject) -> None:
    """The formulas, written out for one image at a time on what timm calls the features."""
    images = noise(vit, 4)
    shown = (torch.from_numpy(images.pixels).float() / 255 - 0.5) / torch.tensor(STD).view(3, 1, 1)
    sums = {"kim": 0.0, "luo": 0.0, "replknet": 0.0}
    for one in shown:
        for style in sums:
            pixels = one[None].clone().requires_grad_()
            centre = vit.model.forward_features(pixels)[
                0, 1 + 1 * 4 + 1
            ]  # row 1, column 1 of 4×4, after the class token
            target = centre.relu().sum() if style == "replknet" else centre.mean()
            gradient = torch.autograd.grad(target, pixels)[0][0].double()
            kinds = {"kim": gradient.mean(0).relu(), "luo": gradient.mean(0), "replknet": gradient.relu().sum(0)}
            sums[style] = sums[style] + kinds[style]
    for style, total in sums.items():
        expected = (total.abs() / total.abs().sum()).numpy()
        field = ReceptiveField(style=style).run(vit, images).receptive_field
        np.testing.assert_allclose(field, expected, atol=1e-4 * expected.max())


def test_the_same_for_any_batch_size(vit: spatially.Subject) -> None:
    images = noise(vit, 7)
    results = [ReceptiveField(variants=["given", "reset"]).run(vit, images, batch=batch) for batch in (1, 3, 7)]
    for other in results[1:]:
        for name in ("receptive_field", "change", "side", "r_squared"):
            np.testing.assert_allclose(other[name], results[0][name], rtol=1e-4, atol=1e-9)


def test_one_image_alone_where_batch_norm_is_followed_by_a_transposition() -> None:
    """Found on LeViT: PyTorch's own backward pass differs between one image and several."""
    torch.manual_seed(0)
    model = timm.create_model(
        "levit_128s", img_size=64, embed_dim=(32, 32), num_heads=(2, 2), depth=(1, 1), key_dim=16, num_classes=5
    )
    subject = subject_of(uneven(model))
    images = noise(subject, 3)
    one, all = (ReceptiveField().run(subject, images, batch=batch).receptive_field for batch in (1, 3))
    np.testing.assert_allclose(one, all, rtol=1e-3, atol=1e-3 * float(all.max()))


def test_bf16_models_are_summed_up_in_full(vit: spatially.Subject) -> None:
    half = subject_of(vit.model, dtype="bfloat16")
    images = noise(half)
    field, exact = ReceptiveField().run(half, images), ReceptiveField().run(vit, images)
    assert field.receptive_field.dtype == np.float64
    assert np.abs(field.receptive_field - exact.receptive_field).sum() < 0.1
    part = ReceptiveField().measure(half, images, np.arange(2))
    assert part.total.dtype == np.float64


@pytest.mark.parametrize("layer", ["blocks.0.mlp", 0, -1])
def test_any_layer(vit: spatially.Subject, layer: str | int) -> None:
    result = ReceptiveField(layer=layer, position=(3, 0)).run(vit, noise(vit))
    field = result.receptive_field.values
    if layer == 0:  # the stem reads its own patch
        assert field[48:, :16].sum() == pytest.approx(1)
    else:
        assert 0 < field[48:, :16].sum() < 1
    assert str(result.name.values) == {"blocks.0.mlp": "blocks.0.mlp", 0: "patch_embed.proj", -1: "blocks.1.mlp"}[layer]


def test_variants_side_by_side_and_the_model_as_before(vit: spatially.Subject) -> None:
    images = noise(vit)
    before = {name: value.clone() for name, value in vit.model.state_dict().items()}
    result = ReceptiveField(variants=["reset", "given", "untrained"], layer=-1, seed=2).run(vit, images)
    assert result.receptive_field.dims == ("variant", "y", "x")
    assert result.variant.values.tolist() == ["given", "untrained", "reset"]
    assert all(torch.equal(value, before[name]) for name, value in vit.model.state_dict().items())
    assert all(parameter.requires_grad for parameter in vit.model.parameters())
    given = ReceptiveField(layer=-1, seed=2).run(vit, images).receptive_field
    assert given.dims == ("y", "x")
    np.testing.assert_array_equal(result.receptive_field.sel(variant="given"), given)
    with reset_positions(vit, seed=2):
        reset = ReceptiveField(layer=-1, seed=2).run(vit, images).receptive_field
    np.testing.assert_array_equal(result.receptive_field.sel(variant="reset"), reset)
    assert not np.allclose(result.receptive_field.sel(variant="untrained"), given)
    zeroed = ReceptiveField(variants="reset", reset="zero", layer=-1).run(vit, images).receptive_field
    assert not np.allclose(zeroed, reset)


def test_convergence_is_the_difference_of_two_halves(vit: spatially.Subject) -> None:
    images = noise(vit, 12)
    result = ReceptiveField().run(vit, images)
    parts = [ReceptiveField().measure(vit, images, np.array([row])) for row in range(12)]
    halves = np.sum([part.total.values[0] for part in parts], axis=0)
    one, other = (half / half.sum() for half in halves)
    assert 0 < sum(int(part["count"][0]) for part in parts) < 12
    assert float(result.change) == pytest.approx(np.abs(one - other).sum() / 2, rel=1e-5)
    assert bool(result.converged) == (float(result.change) <= 0.05)
    alike = spatially.open_images(np.repeat(images.pixels[:1], 12, axis=0), vit, labels=np.zeros(12, dtype=int))
    assert float(ReceptiveField().run(vit, alike).change) == pytest.approx(0, abs=1e-6)
    assert np.isnan(ReceptiveField().run(vit, noise(vit, 1)).change)


def test_a_target_that_is_only_rounding_is_told() -> None:
    """After a norm with equal weights the mean over channels is constant."""
    torch.manual_seed(0)
    plain = subject_of(timm.create_model("vit_tiny_patch16_224", **SMALL))
    images = noise(plain)
    assert float(ReceptiveField().run(plain, images).signal) < 1e-5
    result = ReceptiveField(layer=-1).run(plain, images)
    assert float(result.signal) > 1e-3
    assert float(ReceptiveField(style="replknet").run(plain, images).signal) > 1e-4
    noisy = {"model": ReceptiveField().run(plain, images)}
    assert "is noise" in ReceptiveField.drawing().captions(noisy)["fields"]


def test_a_variant_without_any_gradient_leaves_the_others() -> None:
    """A mean over channels that is 0 whatever the image is."""

    class Balanced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 2, 3, padding=1), nn.Conv2d(2, 2, 1, bias=False)
            self.head = nn.Linear(2, 4)
            with torch.no_grad():
                self.last.weight[1] = -self.last.weight[0]

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.last(self.first(x)).mean((2, 3)))

    subject = subject_of(Balanced())
    probe = ReceptiveField(variants=["given", "untrained"])
    result = probe.run(subject, noise(subject))
    assert np.isnan(result.receptive_field.sel(variant="given")).all()
    assert np.isnan(result.side.sel(variant="given")).all()
    assert float(result.receptive_field.sel(variant="untrained").sum()) == pytest.approx(1)
    drawing = ReceptiveField.drawing()
    assert len(drawing.figures({"model": result})) == 3
    assert "model (untrained): half" in drawing.descriptions({"model": result})["fields"]
    assert "Of model the target is the same" in drawing.captions({"model": result})["fields"]


def test_squares_hold_the_shares() -> None:
    field = np.zeros((20, 20))
    field[8:12, 8:12] = 0.5 / 16
    field[0, 0] = 0.5
    np.testing.assert_allclose(squares(field, (10, 10), [0.1, 0.5, 0.99]), [2, 4, 20])
    np.testing.assert_allclose(squares(np.ones((9, 9)), (4.5, 4.5), [1 / 81, 9 / 81, 1]), [1, 3, 9])
    assert squares(np.ones((10, 10)), (0.5, 0.5), [1.0])[0] == 19  # around a corner, over the border


def test_a_gaussian_field_is_fitted() -> None:
    """A large Gaussian kernel, so that the field is known in closed form."""
    kernel = torch.exp(-((torch.arange(31) - 15.0) ** 2) / (2 * 4.0**2))
    model = Stack([31])
    with torch.no_grad():
        model.layers[0].weight.copy_((kernel[:, None] * kernel).expand(4, 3, 31, 31))
    subject = subject_of(model, 48)
    result = ReceptiveField().run(subject, noise(subject))
    assert float(result.r_squared) == pytest.approx(1, abs=1e-4)
    assert (float(result.sigma_x), float(result.sigma_y)) == pytest.approx((4, 4), rel=1e-2)


class Breaks(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.stem, self.middle, self.head = nn.Conv2d(3, 8, 4, stride=4), nn.Conv2d(8, 8, 3, padding=1), nn.Linear(8, 5)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        if self.how == "cut":
            x = x.detach()
        if self.how == "round":
            x = x.round()
        x = x + self.middle(x)
        if self.how == "flat":
            return self.head(images.mean((2, 3)).repeat(1, 3)[:, :8])
        return self.head(x.mean((2, 3)))


def test_bad_input_is_named(vit: spatially.Subject) -> None:
    cut = subject_of(Breaks("cut"), 32)
    with pytest.raises(NotApplicable, match=r"model is not differentiable: no gradient of .* reaches the image"):
        ReceptiveField().run(cut, noise(cut))
    rounded = subject_of(Breaks("round"), 32)
    with pytest.raises(UserError, match="is 0 at every pixel"):
        ReceptiveField().run(rounded, noise(rounded))
    broken = Breaks("")
    nn.init.constant_(broken.middle.bias, float("nan"))
    subject = subject_of(broken, 32)
    with pytest.raises(UserError, match="receptive field of model is not finite: the output of middle is not finite"):
        ReceptiveField().run(subject, noise(subject))
    with pytest.raises(UserError, match=r"position \(in norm\) \(4, 0\) lies outside the grid: rows go from 0 to 3"):
        ReceptiveField(position=(4, 0)).run(vit, noise(vit))
    with pytest.raises(UserError, match=r"unknown layer 'blocks\.9\.mlp'"):
        ReceptiveField(layer="blocks.9.mlp").run(vit, noise(vit))
    with pytest.raises(UserError, match="unknown layer '99'"):
        ReceptiveField(layer=99).run(vit, noise(vit))
    resnet = subject_of(timm.create_model("resnet10t", num_classes=5))
    with pytest.raises(NotApplicable, match="no positions that can be re-initialised"):
        ReceptiveField(variants=["reset"]).run(resnet, noise(resnet))
    empty = noise(vit, 1)
    empty = type(empty)(empty.pixels[:0], empty.labels[:0], empty.index[:0], "nothing", "nothing")
    with pytest.raises(UserError, match="at least one image"):
        ReceptiveField().run(vit, empty)
    flat = subject_of(nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 5)), 32)
    with pytest.raises(NotApplicable, match="no feature map"):
        ReceptiveField().run(flat, noise(flat))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"style": "lua"}, "unknown style 'lua': did you mean 'luo'"),
        ({"variants": ["trained"]}, "unknown variant"),
        ({"variants": []}, "at least one of"),
        ({"reset": "ones"}, "unknown reset"),
        ({"position": "top"}, "position must be 'centre', 'lower_right', or a row and a column"),
        ({"position": (1, 2, 3)}, "position must be"),
        ({"tolerance": 0}, "tolerance must be a number above 0"),
        ({"layer": 1.5}, "layer must be"),
    ],
)
def test_wrong_options_are_named(options: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        ReceptiveField(**options)


def test_a_study_goes_on_where_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = {"model": "resnet10t", "pretrained": False, "num_classes": 12, "input_size": 32, "resize": 32}
    study = Study(
        models=[model],
        data={"source": "shapes", "limit": 12},
        probes={"receptive_field": {"variants": ["given", "untrained"]}},
        batch=4,
    )
    quiet, file = Console(quiet=True), Path("results") / "resnet10t.receptive_field.nc"
    run_study(study, tmp_path / "whole", device="cpu", console=quiet)
    original, calls = ReceptiveField._sums, []

    def interrupted(self: ReceptiveField, *arguments: object, **options: object) -> object:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return original(self, *arguments, **options)

    monkeypatch.setattr(ReceptiveField, "_sums", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run_study(study, tmp_path / "cut", device="cpu", console=quiet)
    run_study(study, tmp_path / "cut", device="cpu", console=quiet)
    assert len(calls) == 4  # three chunks, one of them twice
    assert (tmp_path / "cut" / file).read_bytes() == (tmp_path / "whole" / file).read_bytes()
    assert read_dataset(tmp_path / "cut" / file).receptive_field.dims == ("variant", "y", "x")


def test_figures_and_table(vit: spatially.Subject) -> None:
    images = noise(vit)
    results = {
        "several": ReceptiveField(variants=["given", "reset"]).run(vit, images),
        "alone": ReceptiveField().run(vit, images),
    }
    drawing = ReceptiveField.drawing()
    drawn = drawing.figures(results)
    assert list(drawn) == ["fields", "fields_log", "squares"]
    shown = [panel for panel in drawn["fields"].axes if panel.images and panel.get_visible()]
    assert len(shown) == 3
    field = results["several"].receptive_field.sel(variant="given").values
    pictures = {name: np.asarray(drawn[name].axes[0].images[0].get_array()) for name in ("fields", "fields_log")}
    np.testing.assert_allclose(pictures["fields"], (field - field.min()) / np.ptp(field))
    logarithm = np.log10(field * field.size + 1)
    np.testing.assert_allclose(pictures["fields_log"], (logarithm - logarithm.min()) / np.ptp(logarithm))
    table = drawing.tables(results)["receptive_field"]
    assert table["variant"].tolist() == ["given", "reset", "given"]
    assert table["side_50"].tolist()[0] == float(results["alone"].side.sel(share=0.5))
    assert set(drawn) <= set(drawing.captions(results))
    assert set(drawn) == set(drawing.descriptions(results))


@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "deit_tiny_distilled_patch16_224"])
def test_against_openerf(name: str, tmp_path: Path) -> None:
    """An independent program, one image at a time: pip install openerf."""
    pytest.importorskip("openerf")
    from openerf.erf import compute_erf

    torch.manual_seed(0)
    model = uneven(timm.create_model(name, depth=3, num_classes=5))
    folder = tmp_path / "images" / "class"
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    for number in range(4):
        Image.fromarray(generator.integers(0, 256, (240, 260, 3), dtype=np.uint8)).save(folder / f"{number}.png")
    theirs = compute_erf(model, image_dir=tmp_path / "images", device="cpu", show_progress=False).erf_map
    subject = spatially.load(model, name="model", device="cpu", input_size=224)
    images = spatially.open_images(str(tmp_path / "images"), subject, answers=False)
    field = ReceptiveField().run(subject, images).receptive_field.values
    np.testing.assert_allclose(field, theirs, atol=1e-4 * theirs.max())
    assert np.abs(field - theirs).sum() < 1e-4
