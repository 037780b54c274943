"""The robustness table: each test against models whose answers can be told beforehand."""

import json
from dataclasses import replace
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
import torch
from rich.console import Console
from torch import nn

import spatially
from spatially.data.backgrounds import NINE
from spatially.errors import NotApplicable, UserError
from spatially.perturb import fgsm, occlude
from spatially.perturb.fgsm import direction
from spatially.perturb.pixels import as_float
from spatially.probes import Robustness
from spatially.probes.robustness import fgsm_name
from spatially.study import Study, run_study
from spatially.subject.imagenet_classes import IMAGENET_A, imagenet_synsets

_SHARED = run_path(str(Path(__file__).parent / "published.py"))
CORNER, MIDDLE, paint, reader = (_SHARED[name] for name in ("CORNER", "MIDDLE", "paint", "reader"))
main_images, make_imagenet_a, make_backgrounds = (
    _SHARED[name] for name in ("main_images", "make_imagenet_a", "make_backgrounds")
)


def accuracy(result, test: str) -> float:  # type: ignore[no-untyped-def]
    return float(result.accuracy.sel(test=test))


def test_against_a_plain_loop(memory_images: spatially.data.Images) -> None:
    torch.manual_seed(0)
    linear = nn.Sequential(nn.Flatten(), nn.Linear(3 * 32 * 32, 4))
    subject = spatially.load(linear, name="linear", input_size=32, num_classes=4, device="cpu")
    answered = subject(as_float(memory_images.batch(np.arange(50))[0])).argmax(1).numpy()
    memory_images = replace(memory_images, labels=answered)  # so that there is something to lose
    epsilons = [1 / 255, "8/255"]
    result = Robustness(epsilons=epsilons).run(subject, memory_images, batch=50)
    assert result.test.values.tolist() == ["standard", "occlusion", "fgsm 1/255", "fgsm 8/255"]
    pixels, label, _ = memory_images.batch(np.arange(50))
    shown = as_float(pixels)
    expected = {
        "standard": shown,
        "occlusion": occlude(shown),
        "fgsm 1/255": fgsm(subject, shown, label, epsilon=1 / 255),
        "fgsm 8/255": fgsm(subject, shown, label, epsilon=8 / 255),
    }
    for name, images in expected.items():
        right = (subject(images).argmax(1) == label).numpy()
        assert np.array_equal(result.correct.sel(shown=name), right)
        assert accuracy(result, name) == right.mean()
        found = result.sel(test=name)
        assert found.accuracy_low <= found.accuracy <= found.accuracy_high
    assert accuracy(result, "fgsm 8/255") < accuracy(result, "fgsm 1/255") <= accuracy(result, "standard") == 1
    assert result.epsilon.values[2:].tolist() == [1 / 255, 8 / 255]
    assert result.test_chance.values.tolist() == [0.25] * 4


def test_in_half_precision_the_gradient_is_not(
    memory_images: spatially.data.Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    attacked: list[torch.dtype] = []

    def watched(model: spatially.Subject, *arguments: torch.Tensor) -> torch.Tensor:
        attacked.append(model.dtype)
        return direction(model, *arguments)

    monkeypatch.setattr("spatially.probes.robustness.direction", watched)

    def load(dtype: str) -> spatially.Subject:
        torch.manual_seed(0)
        layers = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 4))
        return spatially.load(layers, name="half", input_size=32, num_classes=4, device="cpu", dtype=dtype)

    half, full = load("bfloat16"), load("float32")
    pixels, label, _ = memory_images.batch(np.arange(50))
    moved = fgsm(full, as_float(pixels), label, epsilon=4 / 255)
    right = (half(moved).argmax(1) == label).numpy()
    result = Robustness(epsilons=["4/255"]).run(half, memory_images, batch=50)
    assert np.array_equal(result.correct.sel(shown="fgsm 4/255"), right)
    assert set(attacked) == {torch.float32}


def test_occlusion_blinds_who_looks_there() -> None:
    for place, left in ((CORNER, 1.0), (MIDDLE, 0.0)):
        one = reader(place)
        images = main_images(one)
        result = Robustness(epsilons=[]).run(one, images)
        assert accuracy(result, "standard") == 1
        assert accuracy(result, "occlusion") == left
    seen = Robustness(occlusion=4, place=(0, 0), epsilons=[]).run(one, images)
    assert accuracy(seen, "occlusion") == 1
    assert Robustness(occlusion=None, epsilons=[]).run(one, images).test.values.tolist() == ["standard"]


def test_imagenet_a_is_answered_among_its_200_classes(tmp_path: Path) -> None:
    folder = make_imagenet_a(tmp_path / "imagenet-a")
    outside = next(number for number in range(1000) if number not in IMAGENET_A)
    # Two members taken for each other are wrong. One taken for a class outside is not: that class cannot be the answer, and
    # the nearest colour among the 200 has to be asked for.
    swapped = reader(confusion={IMAGENET_A[0]: IMAGENET_A[1]})
    result = Robustness(epsilons=[], imagenet_a=str(folder)).run(swapped, main_images(swapped), batch=64)
    assert accuracy(result, "imagenet_a") == 198 / 200
    wrong = result.imagenet_a_label.values[~result.imagenet_a_correct.values]
    assert sorted(wrong.tolist()) == [0, 1]
    assert result.test_chance.sel(test="imagenet_a") == 1 / 200
    assert result["count"].sel(test="imagenet_a") == 200
    elsewhere = reader(confusion={IMAGENET_A[0]: outside})
    logits = elsewhere(torch.tensor([[20 / 255, 20 / 255, (20 + 24 * 6) / 255]])[:, :, None, None].repeat(1, 1, 16, 16))
    assert int(logits.argmax()) == outside
    subset = logits[0, list(IMAGENET_A)].argmax().item()
    result = Robustness(epsilons=[], imagenet_a=str(folder)).run(elsewhere, main_images(elsewhere), batch=64)
    assert bool(result.imagenet_a_correct.sel(imagenet_a_image=0)) == (subset == 0)


def test_imagenet_a_with_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    folder = make_imagenet_a(tmp_path / "imagenet-a")
    (folder / imagenet_synsets()[IMAGENET_A[7]] / "0.png").write_bytes(b"no image")
    one = reader()
    result = Robustness(epsilons=[], imagenet_a=str(folder)).run(one, main_images(one), batch=1)
    assert result["count"].sel(test="imagenet_a") == 199
    assert accuracy(result, "imagenet_a") == 1
    assert len(json.loads(result.attrs["imagenet_a_skipped"])) == 1
    assert str(tmp_path) not in json.dumps(result.attrs)


def test_a_foreground_counts_only_if_right_on_every_background(tmp_path: Path) -> None:
    folder = make_backgrounds(tmp_path / "bg")
    looker = reader(MIDDLE)
    result = Robustness(epsilons=[], backgrounds=str(folder)).run(looker, main_images(looker), batch=5)
    assert accuracy(result, "backgrounds") == 1
    assert result["count"].sel(test="backgrounds") == 18
    # Who reads the background is right on its own class's background alone, and so never on every one.
    taken_in = reader(CORNER)
    result = Robustness(epsilons=[], backgrounds=str(folder)).run(taken_in, main_images(taken_in), batch=5)
    assert accuracy(result, "backgrounds") == 0
    # An answer that belongs to none of the nine is wrong.
    lost = reader(MIDDLE, confusion={3: 500})
    result = Robustness(epsilons=[], backgrounds=str(folder)).run(lost, main_images(lost), batch=5)
    assert accuracy(result, "backgrounds") == 16 / 18
    assert set(result.backgrounds_label.values[~result.backgrounds_correct.values].tolist()) == {3}


class EasilyPutOff(nn.Module):
    """Names the foreground, unless the background is the one colour that puts it off: then something else."""

    num_classes = 9

    def __init__(self, background: float) -> None:
        super().__init__()
        self.background = background

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        level = (images[:, 2, 8, 8] * 255 - 20) / 24
        logits = -(level[:, None] - torch.arange(9.0)).abs()
        put_off = ((images[:, 2, 0, 0] * 255 - 20) / 24 - self.background).abs() < 0.5
        return torch.where(put_off[:, None], logits.roll(1, dims=1), logits)


@pytest.mark.parametrize(("background", "expected"), [(4.0, 0.0), (9.0, 1.0)])
def test_one_background_is_enough_to_be_wrong(tmp_path: Path, background: float, expected: float) -> None:
    """A model of the nine classes needs no map; each of the 18 foregrounds meets all 18 backgrounds in any batch."""
    folder = make_backgrounds(tmp_path / "bg")
    (folder / "in_to_in9.json").unlink()
    one = spatially.load(EasilyPutOff(background), name="nine", input_size=16, device="cpu")
    images = spatially.open_images(np.zeros((4, 16, 16, 3), np.uint8), one, labels=[0, 1, 2, 3])
    for batch in (1, 7, 64):
        result = Robustness(epsilons=[], backgrounds=str(folder)).run(one, images, batch=batch)
        assert accuracy(result, "backgrounds") == expected


def test_folders_that_are_not_what_they_should_be(tmp_path: Path) -> None:
    one = reader()
    images = main_images(one)

    def run(**options: str) -> None:
        Robustness(epsilons=[], **options).run(one, images)  # type: ignore[arg-type]

    with pytest.raises(UserError, match="imagenet_a: there is no folder"):
        run(imagenet_a=str(tmp_path / "nowhere"))
    paint(tmp_path / "few" / "n01498041" / "0.png", 6)
    paint(tmp_path / "few" / "cat" / "0.png", 6)
    with pytest.raises(UserError, match=r"200 folders n01498041.*lacks n01531178.*199 in all.*has cat besides"):
        run(imagenet_a=str(tmp_path / "few"))
    (tmp_path / "bg" / "original" / "val").mkdir(parents=True)
    with pytest.raises(UserError, match=r"lacks fg_mask/val, only_bg_t/val"):
        run(backgrounds=str(tmp_path / "bg"))
    folder = make_backgrounds(tmp_path / "bg")
    (folder / "in_to_in9.json").rename(tmp_path / "elsewhere.json")
    with pytest.raises(UserError, match=r"needs in_to_in9\.json.*backgrounds_map=FILE"):
        run(backgrounds=str(folder))
    run(backgrounds=str(folder), backgrounds_map=str(tmp_path / "elsewhere.json"))
    (tmp_path / "broken.json").write_text('{"0": 12}')
    with pytest.raises(UserError, match="must map each of"):
        run(backgrounds=str(folder), backgrounds_map=str(tmp_path / "broken.json"))
    (tmp_path / "elsewhere.json").rename(folder / "in_to_in9.json")
    mask = folder / "fg_mask" / "val" / NINE[0] / "n0.npy"
    np.save(mask, np.full((4, 4, 3), 7))
    with pytest.raises(UserError, match=r"must be \(height, width\) of 0 and 1"):
        run(backgrounds=str(folder))
    mask.write_bytes(b"no array")
    with pytest.raises(UserError, match=r"n0\.npy is not a whole \.npy file of numbers"):
        run(backgrounds=str(folder))
    np.save(mask.with_name("lost.npy"), np.zeros((16, 16), bool))
    with pytest.raises(UserError, match=r"1 masks have no photograph.*lost\.npy"):
        run(backgrounds=str(folder))
    for path in (folder / "only_bg_t" / "val" / NINE[8]).iterdir():
        path.unlink()
    (folder / "only_bg_t" / "val" / NINE[8]).rmdir()
    with pytest.raises(UserError, match="lacks 08_fish"):
        run(backgrounds=str(folder))


def test_models_that_do_not_fit(
    tmp_path: Path, subject: spatially.Subject, memory_images: spatially.data.Images
) -> None:
    for name in ("imagenet_a", "backgrounds"):
        with pytest.raises(NotApplicable, match=f"{name} needs a model with the 1000 classes of ImageNet"):
            Robustness(**{name: str(tmp_path)}).run(subject, memory_images)  # type: ignore[arg-type]

    class Rounding(nn.Module):
        num_classes = 4

        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return nn.functional.one_hot((images.mean(dim=(1, 2, 3)) * 3).long(), 4).float()

    step_function = spatially.load(Rounding(), name="steps", input_size=32, device="cpu")
    with pytest.raises(NotApplicable, match=r"not differentiable.*epsilons"):
        Robustness().run(step_function, memory_images)
    assert accuracy(Robustness(epsilons=[]).run(step_function, memory_images), "standard") >= 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"epsilons": [2]}, "epsilon"),
        ({"epsilons": "many"}, "epsilon"),
        ({"occlusion": -1}, "share of the side"),
        ({"place": "left"}, "place"),
        ({"imagenet_a": 3}, "imagenet_a must be a path"),
    ],
)
def test_options_that_mean_nothing(options: dict, said: str) -> None:
    with pytest.raises(UserError, match=said):
        Robustness(**options)


def test_an_occlusion_larger_than_the_image(subject: spatially.Subject, memory_images: spatially.data.Images) -> None:
    with pytest.raises(UserError, match="does not fit into an image of 32×32"):
        Robustness(occlusion=40).check(subject, memory_images)


def test_names_of_epsilons() -> None:
    assert [fgsm_name(value) for value in (0.0, 1 / 255, 0.5, 1.0)] == ["fgsm 0", "fgsm 1/255", "fgsm 0.5", "fgsm 1"]


MODEL = {"model": "resnet10t", "pretrained": False, "num_classes": 1000, "input_size": 32, "resize": 32}


def study(imagenet_a: Path, backgrounds: Path) -> Study:
    options = {"epsilons": ["1/255", "4/255"], "imagenet_a": str(imagenet_a), "backgrounds": str(backgrounds)}
    return Study(models=[MODEL], data={"source": "shapes", "limit": 48}, probes={"robustness": options}, batch=24)


def test_a_study_that_was_interrupted_ends_with_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})  # one thread: quicker where others compute as well
    asked = study(make_imagenet_a(tmp_path / "a"), make_backgrounds(tmp_path / "b"))
    quiet = Console(quiet=True)
    run_study(asked, tmp_path / "whole", device="cpu", console=quiet)
    original, calls = Robustness.measure, []

    def interrupted(self: Robustness, *arguments: object, **options: object) -> object:
        calls.append(1)
        if len(calls) in (2, 7, 14):  # in the images, in ImageNet-A, in the backgrounds
            raise KeyboardInterrupt
        return original(self, *arguments, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Robustness, "measure", interrupted)
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            run_study(asked, tmp_path / "parts", device="cpu", console=quiet)
    run_study(asked, tmp_path / "parts", device="cpu", console=quiet)
    whole, parts = (
        (tmp_path / name / "results" / "resnet10t.robustness.nc").read_bytes() for name in ("whole", "parts")
    )
    assert whole == parts
    # Other pixels in one of the folders are another measurement.
    paint(tmp_path / "a" / imagenet_synsets()[IMAGENET_A[0]] / "0.png", 999)
    with pytest.raises(UserError, match="imagenet_a_fingerprint differ"):
        run_study(asked, tmp_path / "parts", device="cpu", console=quiet)
