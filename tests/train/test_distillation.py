"""Teachers: their own size and normalisation, the data's classes, and a training that learns from one."""

import re
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace

import pytest
import timm
import torch
import torch.nn.functional as F

import spatially
import spatially.models
from spatially.errors import UserError
from spatially.subject import Preprocessing
from spatially.subject.source import no_weights
from spatially.train.card import Identity, write_model
from spatially.train.distillation import Teacher, load_teacher
from spatially.train.loop import fit

tiny = SimpleNamespace(**run_path(str(Path(__file__).parent / "tiny.py")))
STUDENT = Preprocessing((8, 8), resize=(8, 8), mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))


def normalised(pixels: torch.Tensor, mean: list[float], std: list[float]) -> torch.Tensor:
    return (pixels - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)


def test_teacher_sees_the_pixels_in_its_own_size_and_normalisation() -> None:
    model = timm.create_model("resnet10t", num_classes=3).eval()
    subject = spatially.load(model, input_size=32, mean=(0.1, 0.2, 0.3), std=(0.9, 0.8, 0.7), device="cpu")
    pixels = torch.rand(2, 3, 8, 8)
    found = Teacher(subject, STUDENT)(normalised(pixels, [0.4, 0.5, 0.6], [0.2, 0.3, 0.4]))
    larger = F.interpolate(pixels, (32, 32), mode="bicubic", antialias=True)
    with torch.no_grad():
        expected = model(normalised(larger, [0.1, 0.2, 0.3], [0.9, 0.8, 0.7]))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_teacher_in_a_trained_folder_answers_in_the_order_of_the_datas_classes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = timm.create_model("resnet10t", num_classes=3)
    identity = Identity(name="resnet10t", preprocessing=Preprocessing((32, 32), resize=(32, 32)))
    write_model(tmp_path, model.state_dict(), identity, classes=("c", "a", "b"), recipe=tiny.recipe(), row=None)
    recipe = tiny.recipe(distillation={"teacher": str(tmp_path)})
    teacher = load_teacher(recipe, ("a", "b", "c"), STUDENT, torch.device("cpu"))
    assert teacher is not None
    images = torch.randn(2, 3, 8, 8)
    own = Teacher(spatially.load(str(tmp_path), device="cpu"), STUDENT)(images)
    torch.testing.assert_close(teacher(images), own[:, [1, 2, 0]])


def test_teacher_of_other_classes_is_refused() -> None:
    recipe = tiny.recipe(distillation={"teacher": "resnet10t", "pretrained": False})
    for classes in (("a", "b", "c"), tuple(f"class {number}" for number in range(1001))):
        with pytest.raises(UserError, match=r"teacher: resnet10t does not know the data's classes") as told:
            load_teacher(recipe, classes, STUDENT, torch.device("cpu"))
        assert "; train a teacher on these classes first and give its folder, --set" in str(told.value)
        assert not re.search("class.map|measured", str(told.value))
    assert load_teacher(tiny.recipe(), ("a",), STUDENT, torch.device("cpu")) is None


def test_a_teacher_without_weights_asks_for_the_teachers_and_not_the_students(monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str, **_: object) -> None:
        raise no_weights(name)

    monkeypatch.setattr("spatially.train.distillation.load", nothing)
    with pytest.raises(UserError) as told:
        load_teacher(tiny.recipe(distillation={"teacher": "resnet10t"}), ("a",), STUDENT, torch.device("cpu"))
    assert str(told.value).startswith("distillation.teacher: there are no weights for resnet10t here")
    assert "--set distillation.teacher=FOLDER" in str(told.value)
    assert "--set distillation.checkpoint=FILE" in str(told.value)
    assert "--no-pretrained" not in str(told.value)
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"distillation\.teacher: resnet10x cannot be opened: unknown model"):
        load_teacher(tiny.recipe(distillation={"teacher": "resnet10x"}), ("a",), STUDENT, torch.device("cpu"))


class Right:
    """A teacher that knows: the images of class c have mean c."""

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        means = images.mean(dim=(1, 2, 3))[:, None]
        return -20 * (means - torch.arange(3)).abs()


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_student_learns_from_the_teacher_alone(tmp_path: Path, kind: str) -> None:
    class Misled(tiny.TinyData):  # type: ignore[name-defined,misc]
        """Targets that say nothing."""

        def batches(self, epoch: int, *, first_step: int = 0):
            for batch in super().batches(epoch, first_step=first_step):
                yield type(batch)(batch.images, torch.full_like(batch.targets, 1 / 3), batch.labels)

    changes = {"distillation": {"teacher": "x", "kind": kind, "alpha": 1.0, "temperature": 2.0}, "optimiser.lr": 0.05}
    history = fit(
        tiny.network(drop=0.0),
        Misled(steps=100),
        tiny.TinyValidation(),
        tiny.recipe(**changes, **{"regularisation.ema": None}),
        tmp_path,
        identity=tiny.IDENTITY,
        teacher=Right(),  # type: ignore[arg-type]
        console=tiny.QUIET,
        curves=False,
    )
    assert history.rows[-1]["validation_accuracy"] > 0.9
