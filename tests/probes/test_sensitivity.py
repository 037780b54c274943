"""The probe against plain loops, closed forms, and models whose answer is known."""

import numpy as np
import pytest
import timm
import torch
from torch import nn

import spatially
from spatially.errors import UserError
from spatially.perturb import mask_blocks, shuffle_blocks
from spatially.probes import Sensitivity
from spatially.probes.base import cut
from spatially.probes.intervals import wilson


def test_accuracy_and_confidence_agree_with_a_plain_loop(
    subject: spatially.Subject, memory_images: spatially.data.Images
) -> None:
    result = Sensitivity(blocks=[4, 8], ratios=[0, 0.5, 1], seed=2).run(subject, memory_images, batch=16)
    pixels = torch.from_numpy(memory_images.pixels) / 255
    labels = torch.from_numpy(memory_images.labels)
    for kind, perturb in (("shuffle", shuffle_blocks), ("mask", mask_blocks)):
        for block in (4, 8):
            for ratio in (0, 0.5, 1):
                point = result.sel(kind=kind, block=block, ratio=ratio)
                with torch.inference_mode():
                    logits = subject(perturb(pixels, block=block, ratio=ratio, index=range(50), seed=2))
                right = logits.argmax(1) == labels
                confidence = logits.softmax(1).gather(1, labels[:, None])[:, 0]
                assert np.array_equal(point.correct, right)
                assert np.allclose(point.probability, confidence, atol=1e-6)
                assert point.accuracy == right.double().mean()
                assert np.isclose(point.average_confidence, confidence[right].mean(), atol=1e-6)
                low, high = wilson(int(right.sum()), 50)
                assert (point.accuracy_low, point.accuracy_high) == (low, high)
                assert point.average_confidence_low <= point.average_confidence <= point.average_confidence_high


def test_dataset_says_what_was_measured(subject: spatially.Subject, memory_images: spatially.data.Images) -> None:
    result = Sensitivity(kinds=["mask"], blocks=[5], ratios=[0, 1]).run(subject, memory_images)
    assert result.correct.dims == ("image", "kind", "block", "ratio")
    assert result.correct.dtype == bool
    assert result.image.values.tolist() == list(range(50))
    assert result.label.values.tolist() == memory_images.labels.tolist()
    assert result.covered.item() == 30 * 30 / (32 * 32)
    assert result.measured.values.tolist() == [[[50, 50]]]
    for name in (
        "definition",
        "options",
        "model",
        "weights_fingerprint",
        "data_fingerprint",
        "seed",
        "versions",
        "chance",
    ):
        assert name in result.attrs
    assert result.attrs["chance"] == 0.25
    assert np.isnan(result.structure_reliance.item())


def test_summaries_follow_their_formulas(subject: spatially.Subject, memory_images: spatially.data.Images) -> None:
    result = Sensitivity(blocks=[8], ratios=[0, 0.25, 1]).run(subject, memory_images)
    chance = 0.25
    for kind in ("shuffle", "mask"):
        accuracy = result.accuracy.sel(kind=kind, block=8).values
        relative = (accuracy - chance) / (accuracy[0] - chance)
        area = 1 - (0.25 * (relative[0] + relative[1]) / 2 + 0.75 * (relative[1] + relative[2]) / 2)
        expected = np.clip(area, 0, 1) if accuracy[0] > chance else np.nan
        assert np.isclose(result.sensitivity_area.sel(kind=kind, block=8), expected, equal_nan=True)
    accuracy = result.accuracy.sel(kind="shuffle", block=8).values
    reliance = np.clip(1 - (accuracy[2] - chance) / (accuracy[0] - chance), 0, 1) if accuracy[0] > chance else np.nan
    assert np.isclose(result.structure_reliance.item(), reliance, equal_nan=True)


class Constant(nn.Module):
    """Always the same class."""

    num_classes = 2

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.tensor([[2.0, 0.0]]).expand(len(images), 2)


def test_no_correct_image_gives_no_confidence_and_no_reliance() -> None:
    subject = spatially.load(Constant(), input_size=8, device="cpu")
    images = spatially.open_images(np.zeros((6, 8, 8, 3), np.uint8), subject, labels=[1] * 6)
    result = Sensitivity(blocks=[4], ratios=[0, 1]).run(subject, images)
    assert (result.accuracy == 0).all()
    assert result.average_confidence.isnull().all()
    assert result.structure_reliance.isnull().all()
    assert result.sensitivity_area.isnull().all()


class Brightness(nn.Module):
    """Reads the mean alone: shuffling cannot matter to it."""

    num_classes = 2

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        # Whole levels add up to the same sum in every order.
        level = (images * 255).round().sum(dim=(1, 2, 3)) / (images[0].numel() * 255)
        return torch.stack([0.5 - level, level - 0.5], dim=1)


def test_a_model_blind_to_places_has_reliance_zero_with_an_honest_interval() -> None:
    subject = spatially.load(Brightness(), input_size=16, device="cpu")
    generator = np.random.default_rng(0)
    labels = np.arange(60) % 2
    pixels = (generator.integers(0, 100, (60, 16, 16, 3)) + 150 * labels[:, None, None, None]).astype(np.uint8)
    result = Sensitivity(kinds=["shuffle"], blocks=[4], ratios=[0, 1]).run(
        subject, spatially.open_images(pixels, subject, labels=labels)
    )
    assert result.accuracy.values.tolist() == [[[1, 1]]]
    assert result.structure_reliance.item() == 0
    assert result.structure_reliance_low.item() == 0
    assert 0 < result.structure_reliance_high.item() < 0.15


@pytest.mark.parametrize("block", [16, 32])
def test_a_vit_without_positions_does_not_see_a_shuffle_of_its_patches(block: int) -> None:
    """Equal logits to 1e-9 in float64 whenever k is a multiple of the patch that divides the grid."""
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=96, depth=2, num_classes=10, pos_embed="none")
    subject = spatially.load(model, input_size=96, device="cpu", dtype="float64")
    images = torch.rand(4, 3, 96, 96, dtype=torch.float64)
    shuffled = shuffle_blocks(images, block=block, ratio=1.0, index=range(4))
    assert not torch.equal(images, shuffled)
    with torch.inference_mode():
        assert (subject(images) - subject(shuffled)).abs().max() < 1e-9
        broken = shuffle_blocks(images, block=8, ratio=1.0, index=range(4))
        assert (subject(images) - subject(broken)).abs().max() > 1e-4


def test_another_batch_size_gives_the_same_predictions(
    subject: spatially.Subject, memory_images: spatially.data.Images
) -> None:
    probe = Sensitivity(blocks=[8], ratios=[0, 0.5, 1])
    one, other = (probe.run(subject, memory_images, batch=batch) for batch in (7, 50))
    assert np.array_equal(one.prediction, other.prediction)
    assert np.abs(one.probability - other.probability).max() < 1e-5


def test_the_clean_images_are_passed_through_once(
    subject: spatially.Subject, memory_images: spatially.data.Images
) -> None:
    probe = Sensitivity(blocks=[8, 16], ratios=[0, 0.5, 1])
    calls = []
    subject.model.register_forward_hook(lambda *_: calls.append(1))
    probe.run(subject, memory_images, batch=50)
    assert len(calls) == probe.passes == 9


class Even(nn.Module):
    """Right on images whose first pixel is bright: accuracy 90 % by construction."""

    num_classes = 2

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        bright = (images[:, 0, 0, 0] > 0.1).float()
        return torch.stack([bright, 1 - bright], dim=1) * 5


class Nothing(nn.Module):
    num_classes = 2

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return images.mean(dim=(2, 3))[:, :2] * float("nan")


def test_a_model_that_answers_with_nan_is_refused() -> None:
    subject = spatially.load(Nothing(), input_size=8, device="cpu")
    images = spatially.open_images(np.zeros((6, 8, 8, 3), np.uint8), subject, labels=[0, 1] * 3)
    with pytest.raises(UserError, match="answers with NaN to 12 images"):
        Sensitivity(kinds=["shuffle"], blocks=[4], ratios=[0, 1]).run(subject, images)


def test_one_value_is_as_good_as_a_list() -> None:
    assert Sensitivity(kinds="mask", blocks=8, ratios=1) == Sensitivity(kinds=["mask"], blocks=[8], ratios=[1.0])
    assert Sensitivity(kinds=["mask", "shuffle", "mask"]).kinds == ("shuffle", "mask")


def precise(seed: int = 0) -> tuple[spatially.Subject, spatially.data.Images]:
    subject = spatially.load(Even(), input_size=8, device="cpu")
    pixels = np.random.default_rng(seed).integers(0, 256, (4000, 8, 8, 3), dtype=np.uint8)
    return subject, spatially.open_images(pixels, subject, labels=np.zeros(4000, int))


def test_precision_stops_each_point_when_it_is_known_well_enough() -> None:
    subject, images = precise()
    probe = Sensitivity(kinds=["mask"], blocks=[4], ratios=[0, 1], precision=0.03)
    result = probe.run(subject, images, batch=100)
    assert (result.measured < 4000).all()
    assert ((result.accuracy_high - result.accuracy_low) <= 0.06).all()
    clean = result.sel(ratio=0).squeeze()
    assert clean.accuracy_low < 0.898 < clean.accuracy_high
    assert np.isnan(result.correct.values).any() == (len(set(result.measured.values.ravel().tolist())) > 1)
    assert np.isclose(result.correct.mean("image"), result.accuracy).all()


def test_precision_discards_what_was_measured_after_the_stop() -> None:
    subject, images = precise()
    probe = Sensitivity(blocks=[4], ratios=[0, 0.5, 1], precision=0.04)
    careful = probe.run(subject, images, batch=100)
    view = subject.align(images.classes, images.labels)
    wasteful = [probe.measure(view, images, rows) for rows in cut(images, batch=100, seed=0)]
    joined = probe.finish(wasteful, view, images, batch=100)
    assert joined.identical(careful)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"blocks": [0]}, "block must be"),
        ({"blocks": [-4]}, "block must be"),
        ({"blocks": []}, "blocks must name"),
        ({"ratios": [1.5]}, "ratio must lie"),
        ({"ratios": [-0.1]}, "ratio must lie"),
        ({"kinds": ["shufle"]}, "did you mean 'shuffle'"),
        ({"precision": 2.0}, "precision must lie"),
        ({"precision": "high"}, "precision must lie"),
        ({"blocks": ["a"]}, "block must be"),
        ({"ratios": ["a"]}, "ratio must lie"),
    ],
)
def test_bad_options_are_named(options: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Sensitivity(**options)


def test_a_block_larger_than_the_image_is_named(
    subject: spatially.Subject, memory_images: spatially.data.Images
) -> None:
    with pytest.raises(UserError, match="does not fit into an image of 32×32"):
        Sensitivity(blocks=[64]).run(subject, memory_images)
