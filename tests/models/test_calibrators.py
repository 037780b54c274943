"""The two ends of the ruler: a bag that no permutation of patches changes, a template that every permutation undoes."""

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from spatially.data.shapes import LARGEST_NOISE, Shapes
from spatially.errors import UserError
from spatially.models import BagOfPatches, RigidTemplate
from spatially.models.cells import class_means, correlation, cut

NAMES = ("bag_of_patches", "rigid_template")


def images_of(shapes: Shapes, count: int) -> tuple[Tensor, Tensor]:
    images, labels = shapes.images(torch.arange(count))
    return images.float() / 255, labels


def permuted(images: Tensor, block: int, *, seed: int = 0) -> Tensor:
    """Every image's whole blocks in an order of its own; what is left of the blocks stays."""
    generator = torch.Generator().manual_seed(seed)
    out = images.clone()
    rows, columns = images.shape[2] // block, images.shape[3] // block
    for image, source in zip(out, images, strict=True):
        for place, origin in enumerate(torch.randperm(rows * columns, generator=generator).tolist()):
            (y, x), (v, u) = divmod(place, columns), divmod(origin, columns)
            image[:, y * block : (y + 1) * block, x * block : (x + 1) * block] = source[
                :, v * block : (v + 1) * block, u * block : (u + 1) * block
            ]
    return out


def accuracy(model: torch.nn.Module, images: Tensor, labels: Tensor) -> float:
    return (model(images).argmax(1) == labels).double().mean().item()


@pytest.fixture(scope="module")
def bag() -> torch.nn.Module:
    return timm.create_model("bag_of_patches", pretrained=True)


@pytest.fixture(scope="module")
def template() -> torch.nn.Module:
    return timm.create_model("rigid_template", pretrained=True)


@pytest.fixture(scope="module")
def clean() -> tuple[Tensor, Tensor]:
    return images_of(Shapes(), 480)


def test_correlation_is_the_textbook_one_and_exact_in_any_order():
    generator = torch.Generator().manual_seed(0)
    cells = torch.randint(0, 256, (6, 3 * 16 * 16), generator=generator).double()
    expected = torch.corrcoef(cells)
    torch.testing.assert_close(correlation(cells, cells), expected, atol=1e-12, rtol=0)
    order = torch.randperm(cells.shape[1], generator=generator)
    assert torch.equal(correlation(cells[:, order], cells[:, order]), correlation(cells, cells))
    assert correlation(torch.full((1, 48), 7.0, dtype=torch.float64), cells[:, :48]).eq(0).all()


def test_class_means_find_the_object():
    shapes = Shapes(size=(64, 96))
    images, labels = shapes.images(torch.arange(120))
    means = class_means(images, labels, cell=shapes.part)
    assert means.cells.shape == (12, 4, 6, 3, 16, 16)
    expected = torch.zeros(4, 6, dtype=torch.bool)
    expected[1:3, 2:4] = True
    assert torch.equal(means.informative, expected)
    direct = images[labels == 5].double().mean(0)
    assert (cut(direct[None], 16)[0] - means.cells[5]).abs().max() <= 0.5


@pytest.mark.parametrize("mixing", [0.0, 0.3])
@pytest.mark.parametrize("fitted_on_the_same", [True, False])
def test_bag_reaches_the_best_accuracy_of_a_bag(bag, mixing, fitted_on_the_same):
    shapes, count = Shapes(mixing=mixing), 2400
    model = bag
    if fitted_on_the_same:
        model = BagOfPatches.fit(*shapes.images(torch.arange(10_000_000, 10_000_600)), patch=shapes.part)
    expected = shapes.best_accuracy("bag")
    reached = accuracy(model, *images_of(shapes, count))
    assert abs(reached - expected) < 2.576 * (expected * (1 - expected) / count) ** 0.5


@pytest.mark.parametrize(("size", "noise"), [(32, LARGEST_NOISE), (64, LARGEST_NOISE), (64, 0.0)])
def test_parts_and_nothing_else_are_recognised(size, noise):
    """With patches of a whole part: four words in every image, no background or clutter taken for one."""
    model = timm.create_model("bag_of_patches", pretrained=True, img_size=size, patch=size // 4)
    assert len(model.words) == 16
    counts = model.count(images_of(Shapes(size=size, noise=noise, jitter=1), 600)[0])
    assert counts.sum(1).eq(4).all()


def test_quarter_parts_are_recognised_nearly_always(bag):
    """The default patches are quarters of a part, some of them nearly plain: one in a thousand may be mistaken."""
    assert len(bag.words) == 64
    counts = bag.count(images_of(Shapes(jitter=1), 600)[0])
    assert (counts.sum(1) - 16).abs().double().mean() < 0.016


def test_template_is_right_and_sure(template, clean):
    images, labels = clean
    assert accuracy(template, images, labels) >= 0.99
    assert template(images).softmax(1)[torch.arange(len(labels)), labels].mean() > 0.99


@pytest.mark.parametrize("block", [16, 8])
def test_template_falls_to_chance_when_blocks_are_permuted(template, clean, block):
    images, labels = clean
    before, after = accuracy(template, images, labels), accuracy(template, permuted(images, block), labels)
    chance = Shapes().chance
    assert (after - chance) / (before - chance) < 0.1


def test_template_of_an_image_that_matches_nothing_prefers_no_class(template):
    assert template(torch.rand(4, 3, 64, 64)).std(1).eq(0).all()


@pytest.mark.parametrize("seed", [0, 1])
def test_bag_keeps_every_bit_when_patches_are_permuted(bag, clean, seed):
    images, _ = clean
    for block in (8, 16):
        assert torch.equal(bag(permuted(images, block, seed=seed)), bag(images))


def test_bag_of_half_parts_keeps_every_bit_too(clean):
    model = timm.create_model("bag_of_patches", pretrained=True, patch=8)
    images, labels = clean
    assert torch.equal(model(permuted(images, 8)), model(images))
    assert accuracy(model, images, labels) > 0.3


def test_bag_leaves_the_remainder_strip_out():
    shapes = Shapes(size=70, part=16)
    model = BagOfPatches.fit(*shapes.images(torch.arange(120)), patch=16)
    images, _ = images_of(shapes, 24)
    other = images.clone()
    other[:, :, 64:], other[:, :, :, 64:] = 0.5, 0.25
    assert torch.equal(model(permuted(other, 16)), model(images))


def test_bag_rounds_what_lies_between_levels(bag, clean):
    images = clean[0][:48]
    noisy = images + (torch.rand(images.shape, generator=torch.Generator().manual_seed(0)) - 0.5) * 0.9 / 255
    assert torch.equal(bag(noisy), bag(images))
    wild = torch.randn(4, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert torch.equal(bag(permuted(wild, 16)), bag(wild))


def test_bag_does_not_depend_on_batch_dtype_or_autocast(bag, clean):
    images = clean[0][:21]
    whole = bag(images)
    assert torch.equal(torch.cat([bag(chunk) for chunk in images.split(4)]), whole)
    assert torch.equal(bag(images.double()).float(), whole)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(bag(images), whole)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", NAMES)
def test_calibrators_agree_on_cuda(name, clean):
    model = timm.create_model(name, pretrained=True)
    images = clean[0][:48]
    here = model(images)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        there = model.to("cuda")(images.to("cuda")).cpu()
        shuffled = model(permuted(images, 16).to("cuda")).cpu()
    torch.testing.assert_close(there, here, atol=0 if name == "bag_of_patches" else 1e-5, rtol=0)
    assert torch.equal(shuffled, here) == (name == "bag_of_patches")


@pytest.mark.parametrize("name", NAMES)
def test_weights_survive_safetensors(name, clean, tmp_path):
    model, images = timm.create_model(name, pretrained=True), clean[0][:24]
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    empty = timm.create_model(name)
    empty.load_state_dict(load_file(tmp_path / "model.safetensors"))
    assert torch.equal(empty(images), model(images))
    assert not list(model.parameters())


@pytest.mark.parametrize("name", NAMES)
def test_timm_knows_name_preprocessing_and_classes(name):
    assert timm.is_model(name)
    model = timm.create_model(name, pretrained=True, img_size=32, num_classes=12)
    assert (model.num_classes, model.class_names) == (12, Shapes().classes)
    config = timm.data.resolve_model_data_config(model)
    assert config["input_size"] == (3, 32, 32)
    assert (config["mean"], config["std"]) == ((0.0,) * 3, (1.0,) * 3)
    assert (config["crop_pct"], config["interpolation"]) == (1.0, "bilinear")
    assert timm.get_pretrained_cfg(name).input_size == (3, 64, 64)
    images, labels = images_of(Shapes(size=32), 120)
    assert accuracy(model, images, labels) >= (0.99 if name == "rigid_template" else 0.33)
    assert model(images.double()).dtype == torch.float64


@pytest.mark.parametrize("name", NAMES)
def test_a_model_that_is_not_fitted_says_so(name):
    with pytest.raises(UserError, match="not fitted: use"):
        timm.create_model(name)(torch.zeros(1, 3, 64, 64))
    with pytest.raises(UserError, match="12 classes: got 3 and 10"):
        timm.create_model(name, pretrained=True, num_classes=10)


def test_wrong_images_are_refused(template):
    images, labels = Shapes().images(torch.arange(24))
    with pytest.raises(UserError, match="64 × 64 as fitted"):
        template(torch.zeros(1, 3, 96, 96))
    with pytest.raises(UserError, match="floats"):
        template(images)
    with pytest.raises(UserError, match="images must be uint8"):
        RigidTemplate.fit(images.float(), labels, cell=16)
    with pytest.raises(UserError, match="each at least once"):
        BagOfPatches.fit(images, labels * 2, patch=16)
    with pytest.raises(UserError, match="1 to 64 pixels"):
        BagOfPatches.fit(images, labels, patch=65)
    with pytest.raises(UserError, match="nothing to fit"):
        RigidTemplate.fit(torch.zeros_like(images), labels, cell=16)
