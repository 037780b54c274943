"""`spatially train` and `spatially recipes` as a user meets them."""

import csv
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from safetensors.torch import load_file, save_file

import spatially
from spatially.data.shapes import Shapes
from spatially.train.build import build_model, normalisation
from spatially.train.data import open_training
from spatially.train.guard import Stopped
from spatially.train.library import as_yaml, read_recipe, recipe_names
from spatially.train.loop import History
from spatially.train.training import train

pytestmark = pytest.mark.usefixtures("quick")

FILE = "model.safetensors"
Run = Callable[..., tuple[int, str, str]]
CNN = {"depths": (1,), "attention_depths": (0,), "widths": (8,), "heads": (1,)}
TINY = {"embed_dim": 16, "num_heads": 2, "depth": 1}


@pytest.fixture
def pictures(tmp_path: Path) -> Callable[..., Path]:
    """A folder of class folders with generated images of 32×32."""

    def make(*, classes: int, each: int, parts: tuple[str, ...] = ("",)) -> Path:
        root = tmp_path / "pictures"
        shapes = Shapes(size=32, families=4, arrangements=3)
        for number, part in enumerate(parts):
            for label in range(classes):
                folder = root / part / f"class{label:03d}"
                folder.mkdir(parents=True)
                index = torch.arange(each) * 12 + label % 12 + 12 * each * number
                for place, pixels in enumerate(shapes.images(index)[0]):
                    Image.fromarray(pixels.permute(1, 2, 0).numpy()).save(folder / f"{place}.png")
        return root

    return make


def arguments(values: dict[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in ("--model-arg", f"{name}={json.dumps(value)}")]


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "distill": ("pit_tiny_distilled", {"dims": (8, 16, 32), "heads": (1, 2, 4), "depths": (1, 1, 1)}),
    "park-cifar": ("vit_tiny_patch16_224", TINY),
    "kim-finetune": ("vit_small_relposmlp_gab", {**TINY, "patch_size": 8}),
    "swin": ("swin_tiny_m", {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "window_size": 3}),
}


@pytest.mark.parametrize("name", recipe_names())
def test_two_epochs_of_each_recipe(name: str, run: Run, tmp_path: Path) -> None:
    model, small = MODELS.get(name, ("alternet_18", CNN))
    more: list[object] = []
    if name == "kim-finetune":
        start = timm.create_model(model, num_classes=9, img_size=32, **small)
        save_file(start.state_dict(), tmp_path / "start.safetensors")
        more = ["--checkpoint", tmp_path / "start.safetensors"]
    if name == "distill":
        more = ["--set", f"distillation.teacher={tiny_training(tmp_path / 'teacher')}"]
    code, out, error = run(
        "train", model, "--recipe", name, "--data", "shapes", "--input-size", 32, "--limit", 24, "--batch", 12,
        "--epochs", 2, "--device", "cpu", "--out", tmp_path / "out", *arguments(small), *more,
    )  # fmt: skip
    assert code == 0, error
    assert "trained: " in out
    rows = list(csv.DictReader((tmp_path / "out" / "log.csv").open()))
    expected = read_recipe(name).within(2)
    assert len(rows) == expected.total_epochs
    assert all(np.isfinite(float(row["train_loss"])) for row in rows)
    trained = read_recipe(tmp_path / "out" / "recipe.yaml")
    assert trained.run.precision == "fp32"
    assert trained.augmentation == expected.augmentation
    assert trained.schedule == expected.schedule
    subject = spatially.load(str(tmp_path / "out"), device="cpu")
    assert subject.preprocessing.input_size == (32, 32)
    assert subject.answers == 12
    saved = load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, saved[key]) for key, value in subject.model.state_dict().items())


def tiny_training(out: Path) -> Path:
    """A trained folder in a moment."""
    options: dict[str, Any] = {"epochs": 1, "settings": {"batch": 12}, "size": 32, "limit": 12, "device": "cpu"}
    return train("alternet_18", "vanilla", "shapes", out, arguments=CNN, quiet=True, **options)


SWIN = {"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2), "window_size": 3}
BY_HAND: dict[str, tuple[dict[str, Any], Callable[..., torch.optim.Optimizer], list[float], float, float | None]] = {
    # changes, optimiser, rates of 4 epochs of 2 steps, decay, clip
    "xu-1h": ({}, partial(torch.optim.SGD, momentum=0.9), [0.01] * 6 + [1e-3] * 2, 1e-4, None),
    "swin": (
        {"regularisation.drop_path": 0.0, "regularisation.ema": 0.8, "optimiser.lr": 0.5, "regularisation.clip": 0.1},
        torch.optim.AdamW,
        [1e-6 + (0.5 * 12 / 512 - 1e-6) * step / 2 for step in range(2)]
        + [1e-5 + (0.5 * 12 / 512 - 1e-5) * (1 + math.cos(math.pi * step / 8)) / 2 for step in range(2, 8)],
        0.05,
        0.1,
    ),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_a_training_is_what_torch_alone_makes_of_the_recipe(name: str, tmp_path: Path) -> None:
    """Rates, decay, clipping, loss and average by hand, in float64; the images and the first weights are the same."""
    changes, kind, rates, decay, clip = BY_HAND[name]
    changes = {**changes, "batch": 12, "run.precision": "fp64"}
    options: dict[str, Any] = {"settings": changes, "epochs": 4, "size": 32, "limit": 24, "device": "cpu"}
    found = load_file(train("swin_tiny_key", name, "shapes", tmp_path, arguments=SWIN, quiet=True, **options) / FILE)

    recipe = read_recipe(name).within(4).override(changes)
    mean, std = normalisation("swin_tiny_key")
    data = open_training("shapes", recipe=recipe, size=(32, 32), mean=mean, std=std, device="cpu", limit=24)[0]
    model = (
        build_model("swin_tiny_key", recipe=recipe, classes=12, size=(32, 32), arguments=SWIN).model.double().train()
    )
    start = model.head.fc.weight.detach().clone()  # type: ignore[union-attr, operator]
    decayed = [one for one in model.parameters() if one.ndim > 1]  # it has no table of positions
    others = [one for one in model.parameters() if one.ndim <= 1]
    optimiser = kind([{"params": decayed, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}], lr=1.0)
    average: dict[str, torch.Tensor] = {}
    for rate, batch in zip(rates, (batch for epoch in range(4) for batch in data.batches(epoch)), strict=True):
        for group in optimiser.param_groups:
            group["lr"] = rate
        answers = model(batch.images.double()).log_softmax(dim=1)
        optimiser.zero_grad()
        (-(batch.targets.double() * answers).sum(dim=1).mean()).backward()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimiser.step()
        for key, value in model.named_parameters():
            value = value.detach()
            average[key] = 0.8 * average[key] + 0.2 * value if key in average and clip is not None else value.clone()
    for key, value in average.items():
        torch.testing.assert_close(found[key], value, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(found["head.fc.weight"], start, atol=1e-3)


def test_a_hundred_class_folders_from_a_cold_start(
    run: Run, pictures: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing but model, recipe and data; the set has no split, so it is cut by the seed."""
    root = pictures(classes=100, each=10)
    monkeypatch.chdir(tmp_path)
    changes = {"initialisation.pretrained": False, "model.input_size": 32, "model.arguments": CNN}
    mine = read_recipe("kim-finetune").within(1).override(changes)
    Path("mine.yaml").write_text(as_yaml(mine))
    code, _, error = run("train", "alternet_18", "--recipe", "mine.yaml", "--data", root)
    assert code == 0, error
    assert "100 classes" in error
    assert "640 images" in error  # ten batches of 64 from 700
    out = Path("runs/alternet_18-kim-finetune")
    assert "runs/alternet_18-kim-finetune" in error
    card = (out / "README.md").read_text()
    assert "test accuracy" in card  # the remaining 15 %
    assert json.loads((out / "config.json").read_text())["label_names"][99] == "class099"


def test_a_folder_with_train_and_val_is_taken_as_it_is(run: Run, pictures: Callable[..., Path], tmp_path: Path) -> None:
    root = pictures(classes=3, each=6, parts=("train", "val"))
    code, _, error = run(
        "train", "alternet_18", "--recipe", "vanilla", "--data", root, "--epochs", 1, "--batch", 6, "--input-size", 32,
        "--device", "cpu", "--out", tmp_path / "out", *arguments(CNN),
    )  # fmt: skip
    assert code == 0, error
    assert "3 classes" in error
    assert "18 images" in error
    subject = spatially.load(str(tmp_path / "out"), device="cpu")
    images = spatially.open_images(root / "val", subject)
    answers = subject(torch.from_numpy(images.pixels.copy()).float() / 255).argmax(dim=1).numpy()
    row = list(csv.DictReader((tmp_path / "out" / "log.csv").open()))[-1]
    assert float(row["validation_accuracy"]) == pytest.approx(float((answers == images.labels).mean()))


def test_the_same_command_again_goes_on_and_another_recipe_does_not(run: Run, tmp_path: Path) -> None:
    words = ["train", "alternet_18", "--recipe", "vanilla", "--data", "shapes", "--epochs", 1, "--batch", 12]
    words += ["--input-size", 32, "--limit", 24, "--device", "cpu", "--out", tmp_path / "out", *arguments(CNN)]
    assert run(*words)[0] == 0
    before = (tmp_path / "out" / "model.safetensors").read_bytes()
    configured = (tmp_path / "out" / "config.json").stat().st_mtime_ns
    code, _, error = run(*words)
    assert code == 0
    assert "is trained already: nothing is left to do" in error
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == before
    for more, what in (
        (["--set", "optimiser.lr=0.1"], "another recipe"),
        (["--limit", 25], "another data"),
        (["--data", "torch/none"], "could not open torch/none"),
        (["--input-size", 40], "another input size"),
        (["--model-arg", "stem=cifar"], "another model"),
    ):
        code, _, error = run(*words, *more)
        assert (code, what in error) == (2, True), error
    assert (tmp_path / "out" / "config.json").stat().st_mtime_ns == configured
    code, _, error = run(*words, "--resume", "never")
    assert code == 2
    assert "holds a training already" in error


def test_images_are_brought_as_the_training_began_where_nobody_says(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["train", "alternet_18", "--recipe", "vanilla", "--data", "shapes", "--epochs", 1, "--batch", 12]
    words += ["--input-size", 32, "--limit", 24, "--device", "cpu", "--out", tmp_path / "out", *arguments(CNN)]
    monkeypatch.setattr("spatially.train.data.fits", lambda *given: False)
    code, _, error = run(*words, "--workers", 0)
    assert code == 0, error
    monkeypatch.setattr("spatially.train.data.fits", lambda *given: True)  # such as with more free memory
    code, _, error = run(*words, "--workers", 0)
    assert (code, "is trained already" in error) == (0, True), error
    code, _, error = run(*words, "--resident")
    assert code == 2
    assert "images are read again each epoch (--loader), and now they would be kept in memory (--resident)" in error
    assert "parameters" not in error  # what a training that begins is told of


def test_processes_on_a_machine_without_a_gpu_train_together(tmp_path: Path) -> None:
    """Nobody said that it is the CPU they are to use."""
    words = ["-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "-m", "spatially", "train"]
    words += ["alternet_18", "--recipe", "vanilla", "--data", "shapes", "--epochs", "1", "--batch", "12"]
    words += ["--input-size", "32", "--limit", "24", "--out", str(tmp_path), *arguments(CNN)]
    subprocess.run(
        [sys.executable, *words],
        check=True,
        capture_output=True,
        timeout=300,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
    )
    states = load_file(tmp_path / "checkpoints/step-00000002/random.safetensors")
    assert {name.partition(".")[0] for name in states} == {"0", "1"}
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 1


BAD: list[tuple[list[object], str]] = [
    (["--recipe", "vanila"], "unknown recipe 'vanila': did you mean 'vanilla'"),
    (["--set", "optimser.lr=1"], "unknown key 'optimser.lr': did you mean 'optimiser.lr'"),
    (["--set", "optimiser.lr=fast"], "optimiser.lr must be a number above 0, but came as 'fast'"),
    (["--batch", 25], "batch must be at most the 24 training images, but came as 25: give --batch 24 or less"),
    (["--epochs", 0], "epochs must be a whole number of at least 1"),
    (["--model-arg", "depth=3"], "does not take these"),
    (["--model-arg", "depth"], "--model-arg takes KEY=VALUE"),
    (["--data", "nowhere"], "there is no folder nowhere"),
    (["--out", "/proc/run"], "--out /proc/run cannot be written"),
    (["--checkpoint", "nothing.safetensors"], "there is no file nothing.safetensors"),
    (["--device", "tpu"], "device must be auto, cpu or cuda"),
    (["--tracker", "tensorbord"], "unknown tracker 'tensorbord': did you mean 'tensorboard'"),
    (["--resume", "nowhere"], "holds no checkpoint"),
    (["--limit", -5], "limit must be a whole number of at least 1, but came as -5"),
    (["--workers", -1], "workers must be a whole number of at least 0, but came as -1"),
    (["--seed", 2**63], "run.seed must be a whole number at least 0 and at most 9223372036854775807"),
    (["--model-arg", "num_classes=5"], "num_classes is the data's number of classes, but came as 5: leave it out"),
    (["--model-arg", "in_chans=1"], "in_chans must be 3 (RGB images), but came as 1"),
    (["--model-arg", "widths=[wide]"], "alternet_18 cannot be built with depths="),
]


@pytest.mark.parametrize(("words", "message"), BAD, ids=[f"{words[0]}-{words[1]}" for words, _ in BAD])
def test_a_mistake_is_told_before_the_first_step(words: list[object], message: str, run: Run, tmp_path: Path) -> None:
    given: dict[str, object] = {
        "--recipe": "vanilla", "--data": "shapes", "--input-size": 32, "--limit": 24, "--batch": 12, "--epochs": 1,
        "--device": "cpu", "--out": tmp_path / "out",
    }  # fmt: skip
    changed = dict(zip(words[::2], words[1::2], strict=True))
    same = {key: value for key, value in given.items() if key not in changed}
    options = [word for pair in (same | changed).items() for word in pair]  # type: ignore[operator]
    code, _, error = run("train", "alternet_18", *arguments(CNN), *options)
    assert code == 2
    assert message in error
    assert not (tmp_path / "out" / "log.csv").exists()


def test_a_size_and_a_checkpoint_of_another_model_are_told_before_the_first_step(run: Run, tmp_path: Path) -> None:
    words = ["train", "swin_tiny", "--recipe", "vanilla", "--data", "shapes", "--limit", 24, "--batch", 12, "--device"]
    words += ["cpu", "--out", tmp_path / "out", *arguments({"embed_dim": 8, "depths": (1, 1), "num_heads": (1, 2)})]
    code, _, error = run(*words, "--input-size", 34)
    assert code == 2
    assert "swin_tiny cannot take images of 34×34" in error
    save_file(timm.create_model("resnet10t").state_dict(), tmp_path / "other.safetensors")
    code, _, error = run(*words, "--input-size", 32, "--checkpoint", tmp_path / "other.safetensors")
    assert code == 2
    assert "other.safetensors does not fit the model" in error
    assert not (tmp_path / "out" / "log.csv").exists()


def test_one_image_at_a_time_is_refused_where_a_map_has_one_pixel(run: Run, tmp_path: Path) -> None:
    words = ["train", "resnet10t", "--recipe", "vanilla", "--data", "shapes", "--input-size", 32, "--limit", 24]
    words += ["--epochs", 1, "--device", "cpu", "--out", tmp_path / "out"]
    for more in (["--batch", 1], ["--batch", 4, "--accumulation", 4]):
        code, _, error = run(*words, *more)
        assert (code, "leaves one image at a time, on which this model cannot be trained" in error) == (2, True), error


def test_folders_that_cannot_be_trained_on(run: Run, pictures: Callable[..., Path], tmp_path: Path) -> None:
    root = pictures(classes=2, each=3)
    words = ["train", "alternet_18", "--recipe", "vanilla", "--data", root, "--batch", 2, "--out", tmp_path / "out"]
    (root / "class002").mkdir()
    code, _, error = run(*words)
    assert (code, "without images: class002" in error) == (2, True)
    (root / "class002").rmdir()
    (root / "class001").rename(tmp_path / "away")
    code, _, error = run(*words)
    assert (code, "has one class, 'class000'" in error) == (2, True)


def test_classes_of_one_image_leave_nothing_to_validate_on(
    run: Run, pictures: Callable[..., Path], tmp_path: Path
) -> None:
    words = ["train", "alternet_18", "--recipe", "vanilla", "--data", pictures(classes=3, each=1), "--batch", 2]
    code, _, error = run(*words, "--device", "cpu", "--out", tmp_path / "out")
    assert (code, "has two images, which a cut into training and validation images needs" in error) == (2, True), error
    assert not (tmp_path / "out").exists()


def test_too_little_memory_is_told_before_the_first_step(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spatially.train.training.free_memory", lambda device: 400_000)
    code, _, error = run(
        "train", "alternet_18", "--recipe", "vanilla", "--data", "shapes", "--input-size", 32, "--limit", 64, "--batch",
        64, "--device", "cpu", "--out", tmp_path / "out", *arguments(CNN),
    )  # fmt: skip
    assert code == 2
    assert "give --accumulation" in error


@pytest.mark.parametrize("code", [0, 130])
def test_a_training_that_was_asked_to_stop_ends_with_its_code(
    code: int, run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(*given: Any, **options: Any) -> None:
        raise Stopped(code)

    monkeypatch.setattr("spatially.train.training.fit", stopped)
    found, _, error = run(
        "train", "alternet_18", "--recipe", "vanilla", "--data", "shapes", "--input-size", 32, "--limit", 24, "--batch",
        12, "--device", "cpu", "--out", tmp_path / "out", *arguments(CNN),
    )  # fmt: skip
    assert found == code
    assert "error" not in error


def test_a_recipe_that_finds_nothing_in_a_model_says_so(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spatially.train.training.fit", lambda *given, **options: History((), tmp_path))
    words = ["--recipe", "park-cifar", "--data", "shapes", "--limit", 96, "--device", "cpu", "--out", tmp_path]
    code, _, error = run("train", "resnet10t", *words)
    assert code == 0, error
    assert "resnet10t takes nothing of what the recipe asks of a model (patch_size, stem)" in error
    code, _, error = run("train", "vit_tiny_patch16_224", *words, *arguments(TINY))
    assert code == 0, error
    assert "takes nothing" not in error


def test_recipes_are_listed_and_printed_in_full(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("recipes")
    assert code == 0
    assert all(name in out for name in recipe_names())
    code, out, _ = run("recipes", "deit", "--set", "batch=256")
    assert code == 0
    assert out.startswith("# deit: ")
    assert "# in force: lr 0.00025 at a batch of 256, 300 epochs in all" in out
    (tmp_path / "mine.yaml").write_text(out)
    printed = read_recipe(tmp_path / "mine.yaml")
    assert printed.learning_rate == pytest.approx(2.5e-4)
    assert printed == read_recipe("deit").override({"batch": 256}).resolve()
