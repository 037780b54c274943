"""Shape bias of models that see only the shape, only the texture, or neither."""

import shutil
from pathlib import Path
from runpy import run_path

import numpy as np
import pytest
import torch
from PIL import Image
from rich.console import Console
from torch import nn

import spatially
from spatially.errors import NotApplicable, UserError
from spatially.probes import ShapeBias
from spatially.study import Study, run_study
from spatially.subject import Preprocessing, Subject
from spatially.subject.classes import ClassNames
from spatially.subject.imagenet_classes import IMAGENET_A, SIXTEEN, imagenet_synsets

_SHARED = run_path(str(Path(__file__).parent / "published.py"))
CLASSES, CORNER, MIDDLE, SIDE = (_SHARED[name] for name in ("CLASSES", "CORNER", "MIDDLE", "SIDE"))
reader, colour, paint, make_cue_conflict = (
    _SHARED[name] for name in ("reader", "colour", "paint", "make_cue_conflict")
)


def opened(folder: Path, subject: Subject) -> spatially.data.Images:
    return spatially.open_images(folder, subject, answers=False)


@pytest.mark.parametrize(("place", "expected"), [(CORNER, 1.0), (MIDDLE, 0.0)])
def test_who_names_the_shape_reads_1_and_who_names_the_texture_0(
    tmp_path: Path, place: tuple[int, int], expected: float
) -> None:
    folder = make_cue_conflict(tmp_path / "cue")
    subject = reader(place)
    result = ShapeBias().run(subject, opened(folder, subject), batch=50)
    assert result.sizes["image"] == 16 * 15  # where shape and texture are the same there is no conflict
    assert result.shape_bias == expected
    assert result.shape_bias_low <= expected <= result.shape_bias_high
    assert result.decided == 1
    assert (result.class_shape_bias == expected).all()
    assert set(result.decision.values.tolist()) == {"shape" if expected else "texture"}
    assert (result["shape"] != result["texture"]).all()
    for row in (0, 100, 239):
        shape, texture = Path(str(result.file.values[row])).stem.split("-")
        assert shape[:-1] == CLASSES[int(result["shape"][row])]
        assert texture[:-1] == CLASSES[int(result["texture"][row])]


class FileNames(nn.Module):
    """Sixteen classes; looks up what to answer by the picture's two colours."""

    num_classes = 16

    def __init__(self, answer: dict[tuple[int, int], int]) -> None:
        super().__init__()
        self.answer = answer
        self.known = {tuple(colour(members[0])): number for number, members in enumerate(SIXTEEN.values())}
        self.inner = {tuple(colour(members[-1])): number for number, members in enumerate(SIXTEEN.values())}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        pixels = (images * 255).round().int()
        shapes = [self.known.get(tuple(one), 15) for one in pixels[:, :, 0, 0].tolist()]
        inside = [self.inner.get(tuple(one), 15) for one in pixels[:, :, SIDE // 2, SIDE // 2].tolist()]
        chosen = [self.answer.get(pair, 15) for pair in zip(shapes, inside, strict=True)]
        return nn.functional.one_hot(torch.tensor(chosen), 16).float()


def test_counts_by_hand(tmp_path: Path) -> None:
    """Cats by shape, dogs by texture, everything else as a truck: 15 + 1 shapes… counted one by one."""
    folder = make_cue_conflict(tmp_path / "cue")
    cat, dog, truck = (CLASSES.index(name) for name in ("cat", "dog", "truck"))
    answer = {(cat, texture): cat for texture in range(16)} | {(dog, texture): texture for texture in range(16)}
    subject = spatially.load(FileNames(answer), name="names", input_size=SIDE, device="cpu")
    result = ShapeBias().run(subject, opened(folder, subject), batch=33)
    shape = texture = other = 0
    for one in range(16):
        for two in range(16):
            said = answer.get((one, two), truck)
            if one == two:
                continue
            shape, texture, other = shape + (said == one), texture + (said == two), other + (said not in (one, two))
    assert [int((result.decision == name).sum()) for name in ("shape", "texture", "other")] == [shape, texture, other]
    assert result.shape_bias.item() == shape / (shape + texture)
    assert result.decided.item() == (shape + texture) / 240
    assert result.shape_rate.item() == shape / 240
    assert result.class_shape_bias.sel({"class": "cat"}) == 1
    assert result.class_shape_bias.sel({"class": "dog"}) == 0
    assert result.class_shape_bias.sel({"class": "truck"}) == 1
    assert result.class_decided.sel({"class": "cat"}) == 15
    assert result.class_decided.sel({"class": "bear"}) == 1  # the truck texture alone


class Fixed(nn.Module):
    """The same logits for every image, and a little of the image for the gradient's sake."""

    def __init__(self, logits: torch.Tensor) -> None:
        super().__init__()
        self.register_buffer("logits", logits)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.logits.expand(len(images), -1) + 0 * images.mean()


def test_a_class_has_the_mean_of_its_members_probabilities(tmp_path: Path) -> None:
    """All dogs together are more probable than the one knife, but a dog on average is not."""
    folder = make_cue_conflict(tmp_path / "cue")
    probability = torch.full((1000,), 1e-6)
    probability[list(SIXTEEN["dog"])] = 0.005
    probability[list(SIXTEEN["knife"])] = 0.4
    subject = reader()
    subject = Subject(
        Fixed(probability.log()),
        subject.preprocessing,
        name="fixed",
        answers=1000,
        device=torch.device("cpu"),
        classes=ClassNames(None, imagenet_synsets()),
    )
    images = opened(folder, subject)
    view = ShapeBias().view(subject, images)
    means = view(torch.rand(2, 3, SIDE, SIDE)).exp()
    expected = torch.stack([probability[list(members)].mean() for members in SIXTEEN.values()])
    assert torch.allclose(means, expected.expand(2, -1), rtol=1e-4)
    result = ShapeBias().run(subject, images)
    assert set(result.answer.values.tolist()) == {CLASSES.index("knife")}
    assert result.attrs["class_aggregation"] == "mean"
    assert "[404]" in result.attrs["class_members"]


def test_a_model_with_the_sixteen_names_in_another_order(tmp_path: Path) -> None:
    folder = make_cue_conflict(tmp_path / "cue")

    class Backwards(FileNames):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            return super().forward(images).flip(1)

    answer = {(shape, texture): shape for shape in range(16) for texture in range(16)}
    subject = Subject(
        Backwards(answer),
        Preprocessing((SIDE, SIDE), resize=(SIDE, SIDE)),
        name="backwards",
        answers=16,
        device=torch.device("cpu"),
        classes=ClassNames(tuple(name.title() for name in reversed(CLASSES))),
    )
    assert ShapeBias().run(subject, opened(folder, subject)).shape_bias == 1


def test_nothing_decided_is_undefined(tmp_path: Path) -> None:
    folder = make_cue_conflict(tmp_path / "cue")
    for file in list(folder.rglob("*.png")):  # no trucks but by their own shape
        if "truck" in file.name and file.parent.name != "truck":
            file.unlink()
    for file in list((folder / "truck").iterdir()):
        if file.stem != "truck1-truck2":
            file.unlink()
    subject = spatially.load(FileNames({}), name="trucks", input_size=SIDE, device="cpu")
    result = ShapeBias().run(subject, opened(folder, subject))
    assert np.isnan(result.shape_bias)
    assert result.decided == 0


def test_layouts_that_are_something_else(tmp_path: Path, memory_images: spatially.data.Images) -> None:
    subject = reader()
    with pytest.raises(NotApplicable, match=r"no cue-conflict images.*cat1-elephant2\.png"):
        ShapeBias().run(subject, memory_images)
    paint(tmp_path / "plain" / "cat" / "1.png", 1)
    paint(tmp_path / "plain" / "dog" / "1.png", 1)
    with pytest.raises(NotApplicable, match="no cue-conflict images"):
        ShapeBias().run(subject, opened(tmp_path / "plain", subject))
    folder = make_cue_conflict(tmp_path / "cue")
    shutil.copytree(folder, tmp_path / "same")
    for file in list((tmp_path / "same").rglob("*.png")):
        if file.stem.split("-")[0][:-1] != file.stem.split("-")[1][:-1]:
            file.unlink()
    with pytest.raises(UserError, match="there is no conflict"):
        ShapeBias().run(subject, opened(tmp_path / "same", subject))
    shutil.copy(folder / "cat" / "cat1-dog2.png", folder / "bear" / "cat1-dog2.png")
    with pytest.raises(UserError, match=r"bear/cat1-dog2\.png.*does not name its folder's shape"):
        ShapeBias().run(subject, opened(folder, subject))
    (folder / "bear" / "cat1-dog2.png").rename(folder / "bear" / "bear1-zebra2.png")
    with pytest.raises(UserError, match="does not name"):
        ShapeBias().run(subject, opened(folder, subject))
    (folder / "bear" / "bear1-zebra2.png").unlink()
    shutil.rmtree(folder / "oven")
    shutil.copytree(folder / "car", folder / "zebra")
    with pytest.raises(UserError, match=r"lacks oven and has zebra besides"):
        ShapeBias().run(subject, opened(folder, subject))


def test_a_model_of_other_classes(tmp_path: Path, subject: Subject) -> None:
    folder = make_cue_conflict(tmp_path / "cue")
    with pytest.raises(NotApplicable, match="shape bias needs a model with the 1000 classes of ImageNet"):
        ShapeBias().run(subject, opened(folder, subject))


def test_names_of_files(tmp_path: Path, subject: Subject, memory_images: spatially.data.Images) -> None:
    folder = make_cue_conflict(tmp_path / "cue")
    (folder / "airplane" / "airplane1-bear2.png").write_bytes(b"broken")
    images = opened(folder, subject)
    names = images.names(np.arange(len(images)))
    assert names is not None
    assert len(names) == len(images) == 255
    assert "airplane/airplane1-bear2.png" not in names
    for row in (0, 77, 254):
        label, pixels = images.labels[row], images.pixels[row][:, 0, 0]
        assert names[row].split("/")[0] == CLASSES[label]
        assert np.array_equal(np.asarray(Image.open(folder / names[row]))[0, 0], pixels)
    assert memory_images.names(np.arange(2)) is None


def test_the_published_subsets() -> None:
    assert len(set(IMAGENET_A)) == 200
    assert [imagenet_synsets()[number] for number in (IMAGENET_A[0], IMAGENET_A[-1])] == ["n01498041", "n12267677"]
    assert len(SIXTEEN) == 16
    assert list(SIXTEEN) == sorted(SIXTEEN)
    members = [number for numbers in SIXTEEN.values() for number in numbers]
    assert len(members) == len(set(members)) == 207
    assert [len(SIXTEEN[name]) for name in ("bird", "bottle", "dog", "truck")] == [49, 7, 109, 8]


def test_in_a_study_it_runs_on_cue_conflicts_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On other images the study says why it does not."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0})  # one thread: quicker where others compute as well
    folder = make_cue_conflict(tmp_path / "cue")
    model = {"model": "resnet10t", "pretrained": False, "num_classes": 1000, "input_size": 32, "resize": 32}
    quiet = Console(quiet=True)
    asked = Study(models=[model], data={"source": str(folder)}, probes={"shape_bias": {}}, batch=64)
    first = run_study(asked, tmp_path / "one", device="cpu", console=quiet).results()["shape_bias"]["resnet10t"]
    subject = spatially.load(**model, device="cpu")
    alone = ShapeBias().run(subject, opened(folder, subject), batch=64)
    assert first.drop_attrs().equals(alone.drop_attrs())
    other = Study(models=[model], data={"source": "shapes", "limit": 12}, probes={"shape_bias": {}}, batch=64)
    with pytest.raises(NotApplicable, match="cue-conflict"):
        run_study(other, tmp_path / "two", device="cpu", console=quiet)


def test_another_texture_in_a_name_is_another_measurement(tmp_path: Path) -> None:
    """The same pixels under the names of other textures have the same fingerprint of images."""
    subject = reader()
    attributes = []
    for name, texture in (("one", "dog1"), ("two", "truck1")):
        folder = make_cue_conflict(tmp_path / name)
        for file in list((folder / "cat").iterdir()):
            file.unlink()
        paint(folder / "cat" / f"cat1-{texture}.png", 1)
        attributes.append(ShapeBias().facts(subject, opened(folder, subject)))
    assert attributes[0] != attributes[1]
