"""What cannot work is said before the first step."""

import os
import sys
from pathlib import Path

import pytest
import torch
from PIL import Image
from torch import nn

from spatially.errors import UserError
from spatially.train import checks
from spatially.train.recipe import Recipe


def recipe(batch: int = 8, **changes: object) -> Recipe:
    plain = Recipe(name="test", epochs=1, batch=batch, optimiser={"name": "sgd", "lr": 0.1})  # type: ignore[arg-type]
    return plain.override(changes)


def images(root: Path, *classes: str) -> Path:
    for name in classes:
        (root / name).mkdir(parents=True)
        Image.new("RGB", (8, 8)).save(root / name / "one.PNG")
    return root


class Network(nn.Module):
    """Keeps for the backward pass what can be counted by hand: the input of a ReLU's square, 3·H·W floats an image."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, classes)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        if pixels.shape[-1] % 4:
            raise AssertionError("sides must be multiples of 4")
        return self.head(self.norm(pixels).square().mean(dim=(2, 3)))


def test_an_output_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"--out .*file/run cannot be written: Not a directory; choose another folder"):
        checks.check_output(tmp_path / "file" / "run")
    with pytest.raises(UserError, match="cannot be written: File name too long"):
        checks.check_output(tmp_path / ("long" * 100))
    checks.check_output(tmp_path / "new" / "run")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_folders_of_one_name_would_be_one_class(tmp_path: Path) -> None:
    mixed = images(tmp_path / "mixed", "cat/indoors", "cat/outdoors", "dog/indoors")
    with pytest.raises(UserError, match=r"two that are called indoors: cat.indoors and dog.indoors; put images right"):
        checks.check_folder(mixed)
    checks.check_folder(images(tmp_path / "deep", "animals/cat", "animals/dog", "cars/bus"))


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere names of folders are text")
@pytest.mark.parametrize("part", ["", "train"])
def test_a_class_folder_whose_name_is_not_text_is_refused(tmp_path: Path, part: str) -> None:
    images(tmp_path / part, "a", "b")
    os.rename(os.fsencode(tmp_path / part / "a"), os.fsencode(tmp_path / part) + b"/caf\xe9")
    with pytest.raises(UserError, match=r"a class's name must be UTF-8, but in .* one came as caf\\udce9: rename it"):
        checks.check_folder(tmp_path)


def test_a_class_whose_name_is_not_text_is_refused() -> None:
    with pytest.raises(UserError, match=r"but in the arrays one came as caf\\udce9: rename it"):
        checks.check_classes(("a", "caf\udce9"), where="the arrays")


def test_hidden_images_are_none(tmp_path: Path) -> None:
    root = images(tmp_path, "a", "b", "c/.ipynb_checkpoints")
    with pytest.raises(UserError, match="without images: c; add images"):
        checks.check_folder(root)


def test_folders_without_images_and_folders_of_one_class(tmp_path: Path) -> None:
    checks.check_folder(images(tmp_path / "good", "a", "b"))
    one = images(tmp_path / "one", "a")
    with pytest.raises(UserError, match="has one class, 'a', and a classifier needs at least two"):
        checks.check_folder(one)
    empty = images(tmp_path / "empty", "a", "b")
    (empty / "c").mkdir()
    (empty / "d").mkdir()
    (empty / "d" / "notes.txt").write_text("no image")
    with pytest.raises(UserError, match=r"class folders of .*empty without images: c, d; add images"):
        checks.check_folder(empty)
    halves = images(tmp_path / "halves" / "train", "a", "b").parent
    images(halves / "val", "a", "b")
    checks.check_folder(halves)
    (halves / "val" / "c").mkdir()
    with pytest.raises(UserError, match=r"class folders of .*halves/val without images: c"):
        checks.check_folder(halves)


def test_classes() -> None:
    checks.check_classes(("a", "b"), where="here")
    with pytest.raises(UserError, match="here has one class, 'a'"):
        checks.check_classes(("a",), where="here")
    with pytest.raises(UserError, match="'a' comes twice"):
        checks.check_classes(("a", "b", "a"), where="here")


def test_a_batch_is_cut_into_equal_parts() -> None:
    checks.check_processes(recipe(batch=12, **{"run.accumulation": 2}), 3)
    with pytest.raises(UserError, match=r"cannot be cut into 5 processes × 2 accumulated parts: give --batch 20"):
        checks.check_processes(recipe(batch=12, **{"run.accumulation": 2}), 5)


def test_sizes_that_the_model_cannot_take() -> None:
    model = Network()
    checks.check_answers(model, "network", size=(8, 8), classes=3)
    with pytest.raises(UserError, match=r"network cannot take images of 8×6 \(sides must be multiples of 4\)"):
        checks.check_answers(model, "network", size=(8, 6), classes=3)
    with pytest.raises(UserError, match=r"network answers with \(1, 3\) numbers for one image, not with 4 classes"):
        checks.check_answers(model, "network", size=(8, 8), classes=4)


def test_a_step_is_counted_as_it_is() -> None:
    model, side = Network().double(), 64
    fixed, each = checks.step_bytes(model, recipe(**{"run.precision": "fp64"}), (side, side))
    # the batch normalisation keeps its input, the square its own; the pooled square goes into the linear layer
    assert each == 8 * (2 * 3 * side * side + 3)
    weights = 8 * sum(value.numel() for value in model.parameters())
    assert fixed - 2 * weights == pytest.approx(0, abs=2048)  # gradients and momentum; then what normalisation keeps
    heavier = recipe(**{"run.precision": "fp64", "optimiser.name": "adamw", "regularisation.ema": 0.99})
    assert checks.step_bytes(model, heavier, (side, side))[0] - fixed == 2 * weights


def test_one_image_at_a_time_is_too_few_for_batch_normalisation_of_one_pixel() -> None:
    model = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Flatten())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    for chosen, processes in ((recipe(1), 1), (recipe(4, **{"run.accumulation": 2}), 2)):
        with pytest.raises(
            UserError, match=f"the batch of {chosen.batch} in .* leaves one image at a time, .*Expected"
        ):
            checks.check_part(model, chosen, size=(8, 8), processes=processes)
    checks.check_part(model, recipe(4), size=(8, 8), processes=2)
    checks.check_part(Network(), recipe(1), size=(8, 8), processes=1)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_too_little_memory_suggests_what_fits() -> None:
    model, chosen = Network(), recipe(batch=64)
    fixed, each = checks.step_bytes(model, chosen, (64, 64))
    checks.check_memory(model, chosen, size=(64, 64), processes=1, free=fixed + 64 * each)
    with pytest.raises(
        UserError, match=r"a step of 64 images needs .*: give --accumulation 4, .* or --batch 20 or less"
    ):
        checks.check_memory(model, chosen, size=(64, 64), processes=1, free=fixed + 20 * each)
    # with the advice taken it fits
    advised = chosen.override({"run.accumulation": 4})
    checks.check_memory(model, advised, size=(64, 64), processes=1, free=fixed + 20 * each)
    checks.check_memory(model, chosen, size=(64, 64), processes=4, free=fixed + 20 * each)
    with pytest.raises(UserError, match="too little for one image: choose a smaller model"):
        checks.check_memory(model, chosen, size=(64, 64), processes=1, free=each // 2)
    checks.check_memory(model, chosen, size=(64, 64), processes=1, free=None)


def test_checking_leaves_no_trace() -> None:
    model = Network().eval()
    model.norm.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    checks.check_answers(model, "network", size=(8, 8), classes=3)
    checks.step_bytes(model, recipe(), (8, 8))
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert (model.training, model.norm.training, model.head.training) == (False, True, False)
    assert all(value.grad is None for value in model.parameters())


def test_free_memory_is_told_in_bytes() -> None:
    free = checks.free_memory(torch.device("cpu"))
    assert free is None or free > 2**20


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_cuda_a_step_takes_what_was_counted_and_an_estimate_is_tried_before_it_is_believed() -> None:
    import timm

    model = timm.create_model("vit_tiny_patch16_224").cuda()
    chosen = recipe(batch=64, **{"run.precision": "bf16"})
    fixed, each = checks.step_bytes(model, chosen, (224, 224))
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(torch.zeros(64, 3, 224, 224, device="cuda")).sum()
    loss.backward()
    used = torch.cuda.max_memory_allocated() - before
    assert used == pytest.approx(fixed / 2 + 64 * each, rel=0.3)  # half of what is fixed is momentum, not there yet
    model.zero_grad(set_to_none=True)
    checks.check_memory(model, chosen, size=(224, 224), processes=1, free=2**20)  # it fits, whatever was said
    assert all(value.grad is None for value in model.parameters())
    large = chosen.override({"batch": 1024})
    torch.cuda.set_per_process_memory_fraction(2**30 / torch.cuda.get_device_properties(0).total_memory)
    try:
        with pytest.raises(UserError, match="give --accumulation"):
            checks.check_memory(model, large, size=(224, 224), processes=1, free=2**30)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
