"""Opening folders, readers, arrays and the generated set; broken images, limits, the cache."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision.transforms.v2 import InterpolationMode
from torchvision.transforms.v2.functional import center_crop, pil_to_tensor, resize

import spatially
from spatially.data import Shapes
from spatially.data.decode import decode
from spatially.data.sources import Folder
from spatially.errors import UserError


def test_folder_has_its_classes_in_order(make_folder: Callable[..., Path], subject: spatially.Subject) -> None:
    images = spatially.open_images(make_folder(), subject)
    assert len(images) == 20
    assert images.classes == ("class0", "class1", "class2", "class3")
    assert images.labels.tolist() == sorted(images.labels.tolist())
    assert images.pixels.dtype == np.uint8
    assert images.pixels.shape == (20, 3, 32, 32)


def test_hidden_images_and_folders_count_for_nothing(
    make_folder: Callable[..., Path], subject: spatially.Subject
) -> None:
    root = make_folder()
    (root / "class0" / "._0.png").write_bytes(b"what macOS leaves beside a file")
    (root / "class0" / ".ipynb_checkpoints").mkdir()
    Image.new("RGB", (40, 40)).save(root / "class0" / ".ipynb_checkpoints" / "0.png")
    images = spatially.open_images(root, subject)
    assert len(images) == 20
    assert not images.skipped
    assert images.classes == ("class0", "class1", "class2", "class3")
    assert images.labels.max() == 3


def test_images_of_every_kind_count_and_no_class_is_passed_over(make_folder: Callable[..., Path]) -> None:
    root = make_folder()
    for number, ending in enumerate(("webp", "bmp", "gif", "tif", "tiff", "ppm", "pgm", "JPEG")):
        (root / f"kind{number}").mkdir()
        Image.new("L", (40, 40), number).save(root / f"kind{number}" / f"0.{ending}")
    source = Folder(root)
    assert source.classes == (*(f"class{number}" for number in range(4)), *(f"kind{number}" for number in range(8)))
    assert source.labels() == [label for label in range(4) for _ in range(5)] + list(range(4, 12))
    for number in range(20, 28):
        with source.read(number)[0] as file:
            assert decode(file).size == (40, 40)


def test_an_image_beside_the_class_folders_is_refused(
    make_folder: Callable[..., Path], subject: spatially.Subject
) -> None:
    root = make_folder()
    Image.new("RGB", (40, 40)).save(root / "overview.png")
    with pytest.raises(UserError, match=r"lie in no class folder: overview.png; move them"):
        spatially.open_images(root, subject)


def test_crops_match_torchvision(make_folder: Callable[..., Path], subject: spatially.Subject) -> None:
    root = make_folder(classes=4, each=1)
    images = spatially.open_images(root, subject)
    for row, path in enumerate(sorted(root.glob("*/*.png"))):
        picture = Image.open(path).convert("RGB")
        expected = pil_to_tensor(center_crop(resize(picture, [32], InterpolationMode.BICUBIC), [32, 32]))
        assert np.array_equal(images.pixels[row], expected)


def test_second_opening_reads_the_cache(
    make_folder: Callable[..., Path], subject: spatially.Subject, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_folder()
    first = spatially.open_images(root, subject)
    monkeypatch.setattr("spatially.data.open.decode", lambda *_: pytest.fail("decoded again"))
    second = spatially.open_images(root, subject)
    assert isinstance(second.pixels, np.memmap)
    assert np.array_equal(first.pixels, second.pixels)
    assert first.fingerprint == second.fingerprint


def test_changed_folder_and_changed_crop_are_decoded_anew(
    make_folder: Callable[..., Path], subject: spatially.Subject
) -> None:
    root = make_folder()
    first = spatially.open_images(root, subject)
    Image.new("RGB", (40, 40), "red").save(root / "class0" / "0.png")
    second = spatially.open_images(root, subject)
    assert first.fingerprint != second.fingerprint
    assert len(first) == len(second)


@pytest.mark.parametrize("damage", ["cut", "flip", "json"])
def test_damaged_cache_is_noticed_and_remade(
    damage: str, make_folder: Callable[..., Path], subject: spatially.Subject, tmp_path: Path
) -> None:
    root = make_folder()
    first = np.array(spatially.open_images(root, subject).pixels)
    (entry,) = (tmp_path / "cache" / "images").iterdir()
    content = bytearray((entry / "pixels").read_bytes())
    if damage == "cut":
        (entry / "pixels").write_bytes(content[:-100])
    elif damage == "flip":
        content[500] ^= 1
        (entry / "pixels").write_bytes(content)
    else:
        (entry / "entry.json").write_text("{")
    assert np.array_equal(spatially.open_images(root, subject).pixels, first)


@pytest.mark.parametrize("workers", [0, 1, 4])
def test_workers_do_not_change_anything(
    workers: int, make_folder: Callable[..., Path], subject: spatially.Subject, tmp_path: Path
) -> None:
    root = make_folder()
    one = spatially.open_images(root, subject, workers=1, cache=tmp_path / "a")
    other = spatially.open_images(root, subject, workers=workers, cache=tmp_path / "b")
    assert one.fingerprint == other.fingerprint


def test_broken_images_are_named_counted_and_skipped(
    make_folder: Callable[..., Path], subject: spatially.Subject
) -> None:
    root = make_folder()
    (root / "class1" / "3.png").write_text("not an image")
    whole = (root / "class2" / "2.png").read_bytes()
    (root / "class2" / "2.png").write_bytes(whole[: len(whole) // 2])
    images = spatially.open_images(root, subject)
    assert len(images) == 18
    assert [one.name for one in images.skipped] == ["class1/3.png", "class2/2.png"]
    assert 8 not in images.index
    assert images.index.max() == 19
    assert images.describe()["skipped"] == 2
    with pytest.raises(UserError, match=r"class1/3.png cannot be read"):
        spatially.open_images(root, subject, strict=True)


def test_strict_leaves_no_half_written_entry(
    make_folder: Callable[..., Path], subject: spatially.Subject, tmp_path: Path
) -> None:
    root = make_folder()
    (root / "class1" / "3.png").write_text("not an image")
    with pytest.raises(UserError, match="--strict"):
        spatially.open_images(root, subject, strict=True)
    assert list((tmp_path / "cache" / "images").iterdir()) == []


def test_a_link_that_leads_nowhere_is_a_broken_image(
    make_folder: Callable[..., Path], subject: spatially.Subject
) -> None:
    root = make_folder()
    (root / "class0" / "link.png").symlink_to(root / "gone.png")
    assert [one.name for one in spatially.open_images(root, subject).skipped] == ["class0/link.png"]


def test_limit_draws_fairly_and_keeps_numbers(make_folder: Callable[..., Path], subject: spatially.Subject) -> None:
    root = make_folder(each=25)
    some = spatially.open_images(root, subject, limit=40)
    every = spatially.open_images(root, subject)
    assert len(some) == 40
    assert len(set(some.labels.tolist())) == 4
    assert np.array_equal(some.pixels, every.pixels[some.index])
    more = spatially.open_images(root, subject, limit=60)
    assert set(some.index) <= set(more.index)


def test_order_is_a_permutation_by_seed(memory_images: spatially.data.Images) -> None:
    orders = [memory_images.order(seed) for seed in (0, 0, 1)]
    assert sorted(orders[0]) == list(range(50))
    assert np.array_equal(orders[0], orders[1])
    assert not np.array_equal(orders[0], orders[2])


def test_arrays_in_every_layout(subject: spatially.Subject) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (6, 32, 32, 3), dtype=np.uint8)
    labels = np.arange(6) % 4
    first = spatially.open_images(pixels, subject, labels=labels)
    for other in (
        spatially.open_images((pixels, labels), subject),
        spatially.open_images(torch.from_numpy(pixels).permute(0, 3, 1, 2), subject, labels=torch.from_numpy(labels)),
        spatially.open_images(torch.from_numpy(pixels).permute(0, 3, 1, 2) / 255, subject, labels=labels),
    ):
        assert other.fingerprint == first.fingerprint
        assert np.array_equal(other.pixels, first.pixels)


def test_arrays_of_another_size_are_cropped(subject: spatially.Subject) -> None:
    pixels = np.zeros((3, 50, 64, 3), np.uint8)
    assert spatially.open_images(pixels, subject, labels=[0, 1, 2]).pixels.shape == (3, 3, 32, 32)


def test_torchvision_reader(tmp_path: Path) -> None:
    import pickle

    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    data = np.random.default_rng(0).integers(0, 256, (10, 3072), dtype=np.uint8)
    (folder / "test_batch").write_bytes(pickle.dumps({"data": data, "labels": list(range(10))}))
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": [f"name{i}" for i in range(10)]}))
    import torchvision

    class Unchecked(torchvision.datasets.CIFAR10):
        def _check_integrity(self) -> bool:
            return True

    from timm.data import dataset_factory

    original = dataset_factory._TORCH_BASIC_DS["cifar10"]
    dataset_factory._TORCH_BASIC_DS["cifar10"] = Unchecked
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("torchvision.datasets.cifar.check_integrity", lambda *_: True)
            Unchecked.test_list = [["test_batch", ""]]
            subject = spatially.load(
                "resnet18", pretrained=False, num_classes=10, input_size=32, resize=32, device="cpu"
            )
            images = spatially.open_images("torch/cifar10", subject, root=tmp_path)
    finally:
        dataset_factory._TORCH_BASIC_DS["cifar10"] = original
    assert np.array_equal(images.pixels, data.reshape(10, 3, 32, 32))
    assert images.classes == tuple(f"name{i}" for i in range(10))


def test_webdataset_reader(tmp_path: Path, subject: spatially.Subject) -> None:
    pytest.importorskip("webdataset")
    generator = np.random.default_rng(0)
    with tarfile.open(tmp_path / "data-validation-0000.tar", "w") as archive:
        for number in range(8):
            buffer = io.BytesIO()
            Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(buffer, "PNG")
            for ending, content in (("png", buffer.getvalue()), ("cls", str(number % 4).encode())):
                entry = tarfile.TarInfo(f"{number:04d}.{ending}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    split = {"name": "validation", "filenames": ["data-validation-0000.tar"], "shard_lengths": [8], "num_samples": 8}
    (tmp_path / "info.json").write_text(json.dumps({"splits": {"validation": split}}))
    images = spatially.open_images("wds/data", subject, root=tmp_path, split="validation")
    assert images.labels.tolist() == [number % 4 for number in range(8)]


def test_hugging_face_reader(tmp_path: Path, subject: spatially.Subject) -> None:
    datasets = pytest.importorskip("datasets")
    generator = np.random.default_rng(0)
    pictures = [Image.fromarray(generator.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(8)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abcd"))})
    rows = {"image": pictures, "label": [number % 4 for number in range(8)]}
    folder = tmp_path / "Set"
    folder.mkdir()
    datasets.Dataset.from_dict(rows, features=features).to_parquet(folder / "validation-0.parquet")
    images = spatially.open_images(f"hfds/{folder}", subject, split="validation", root=tmp_path / "hf")
    assert images.labels.tolist() == rows["label"]
    assert images.classes == tuple("abcd")
    assert np.array_equal(images.pixels[3], np.asarray(pictures[3]).transpose(2, 0, 1))


def test_generated_set_follows_the_subjects_size(subject: spatially.Subject) -> None:
    images = spatially.open_images(Shapes(size=32, families=2, arrangements=2), subject, limit=40)
    assert images.size == (32, 32)
    assert images.bag_accuracy == 0.5
    assert images.classes is not None


def bad_inputs(root: Path) -> dict[str, tuple[object, dict, str]]:
    (root / "empty").mkdir(parents=True)
    (root / "flat").mkdir()
    Image.new("RGB", (8, 8)).save(root / "flat" / "a.png")
    (root / "broken" / "a").mkdir(parents=True)
    (root / "broken" / "a" / "x.png").write_text("no")
    pixels = np.zeros((2, 32, 32, 3), np.uint8)
    return {
        "missing": (root / "none", {}, "there is no folder"),
        "file": (root / "flat" / "a.png", {}, "is a file"),
        "empty": (root / "empty", {}, "holds no images"),
        "flat": (root / "flat", {}, "in no class folders"),
        "all broken": (root / "broken", {}, "no image of"),
        "limit": ("shapes", {"limit": 0}, "limit must be a whole number"),
        "no labels": (pixels, {}, "need labels"),
        "labels' shape": (pixels, {"labels": [1]}, "2 whole numbers"),
        "labels' type": (pixels, {"labels": [0.5, 1.0]}, "2 whole numbers"),
        "label outside": (pixels, {"labels": [0, 4]}, "4"),
        "shape": (np.zeros((2, 32, 32)), {"labels": [0, 1]}, "images must be"),
        "range": (pixels + 3.0, {"labels": [0, 1]}, "must lie in 0..1"),
        "dtype": (pixels.astype(np.int16), {"labels": [0, 1]}, "must be uint8"),
        "reader": ("torch/cifar100", {"root": root}, "could not open torch/cifar100"),
        "reader's name": ("torch/cifar1000", {"root": root}, "could not open"),
    }


BAD_INPUTS = (
    "missing",
    "file",
    "empty",
    "flat",
    "all broken",
    "limit",
    "no labels",
    "labels' shape",
    "labels' type",
    "label outside",
    "shape",
    "range",
    "dtype",
    "reader",
    "reader's name",
)


@pytest.mark.parametrize("case", BAD_INPUTS)
def test_bad_input_is_one_clear_line(case: str, tmp_path: Path, subject: spatially.Subject) -> None:
    source, options, said = bad_inputs(tmp_path / "bad")[case]
    with pytest.raises(UserError, match=said) as caught:
        spatially.open_images(source, subject, **options)
    assert "\n" not in str(caught.value)


def test_full_disk_leaves_no_half_written_entry(
    make_folder: Callable[..., Path], subject: spatially.Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    root = make_folder()
    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        with pytest.raises(OSError, match="No space left"):
            spatially.open_images(root, subject)
    assert list((tmp_path / "cache" / "images").iterdir()) == []
    assert len(spatially.open_images(root, subject)) == 20
