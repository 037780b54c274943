"""Training data from every source: the same batches for any number of processes and after a restart."""

import io
import json
import os
import random
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch._subclasses.fake_tensor import FakeTensorMode

from spatially.data import Shapes
from spatially.errors import UserError
from spatially.train.batch import Batch
from spatially.train.data import held_out_preprocessing, open_training
from spatially.train.loader import LoadedTraining
from spatially.train.order import Order
from spatially.train.recipe import Recipe
from spatially.train.resident import ResidentTraining
from spatially.train.sources import open_parts
from spatially.train.stored import usual_size

EVERYTHING = {
    "rand_augment": "rand-m9-mstd0.5-inc1",
    "erase": 0.5,
    "mixup": 0.8,
    "cutmix": 1.0,
    "interpolation": "random",
}
MODEL: dict[str, Any] = {"size": (24, 24), "mean": (0.5, 0.4, 0.3), "std": (0.2, 0.25, 0.3), "device": "cpu"}


def recipe(batch: int = 8, **augmentation: Any) -> Recipe:
    return Recipe(
        name="test",
        epochs=1,
        batch=batch,
        optimiser={"name": "sgd", "lr": 0.1},
        augmentation=augmentation,
        regularisation={"smoothing": 0.1},
    )


def arrays(count: int = 40, size: tuple[int, int] = (32, 32)) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(0)
    return generator.integers(0, 256, (count, 3, *size), dtype=np.uint8), np.arange(count) % 4


def every(batches: Any) -> list[Batch]:
    return list(batches)


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(getattr(one, name), getattr(other, name)) for name in ("images", "targets", "labels"))


@pytest.mark.parametrize("resident", [True, False])
def test_two_processes_make_the_batch_of_one(resident: bool) -> None:
    given = {"source": arrays(), "recipe": recipe(**EVERYTHING), "seed": 3, "resident": resident, "workers": 0, **MODEL}
    source = given.pop("source")
    alone = every(open_training(source, **given)[0].batches(1))
    shared = [every(open_training(source, rank=rank, world=2, **given)[0].batches(1)) for rank in range(2)]
    assert len(alone) == 28 // 8
    for whole, first, second in zip(alone, *shared, strict=True):
        # The first process has the outer pairs of the batch, the second the inner ones.
        for name in ("images", "targets", "labels"):
            (a, b), (c, d) = (getattr(part, name).chunk(2) for part in (first, second))
            assert torch.equal(getattr(whole, name), torch.cat([a, c, d, b]))


@pytest.mark.parametrize("resident", [True, False])
def test_a_restart_goes_on_with_the_same_batches(resident: bool) -> None:
    options = {"recipe": recipe(**EVERYTHING, repeats=2), "seed": 1, "resident": resident, "workers": 0, **MODEL}
    first = every(open_training(arrays(), **options)[0].batches(2))
    again = open_training(arrays(), **options)[0]
    assert all(equal(*pair) for pair in zip(first[1:], again.batches(2, first_step=1), strict=True))
    assert every(again.batches(2, first_step=again.steps_per_epoch)) == []
    assert not equal(first[0], next(iter(again.batches(3))))


@pytest.mark.parametrize("resident", [True, False])
def test_global_generators_are_neither_used_nor_changed(resident: bool) -> None:
    data = open_training(arrays(), recipe=recipe(**EVERYTHING), resident=resident, workers=0, **MODEL)[0]
    made = []
    for seed in (0, 1):
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        torch.manual_seed(seed)
        before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        made.append(every(data.batches(0)))
        after = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()  # noqa: NPY002
        assert before == after
    assert all(equal(*pair) for pair in zip(*made, strict=True))


def test_workers_do_not_change_a_batch(make_folder: Callable[..., Path]) -> None:
    root = make_folder(each=8)
    options = {"recipe": recipe(**EVERYTHING), "resident": False, **MODEL}
    alone = open_training(root, workers=0, **options)[0]
    helped = open_training(root, workers=2, **options)[0]
    for epoch in range(2):
        for one, other in zip(alone.batches(epoch), helped.batches(epoch), strict=True):
            assert equal(one, other)


@pytest.mark.skipif(sys.platform == "win32", reason="signals are sent to processes")
def test_workers_leave_signals_to_the_main_process(make_folder: Callable[..., Path]) -> None:
    options = {"recipe": recipe(**EVERYTHING), "resident": False, **MODEL}
    root = make_folder(each=8)
    training = open_training(root, workers=2, **options)[0]
    batches = training.batches(0)
    made = [next(batches), next(batches)]  # one of each worker, which has begun then
    workers = training._loader._iterator._workers  # type: ignore[attr-defined]
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
        os.kill(worker.pid, signal.SIGINT)
    made += [*batches, *training.batches(1)]
    alone = open_training(root, workers=0, **options)[0]
    expected = [*alone.batches(0), *alone.batches(1)]
    assert all(equal(*pair) for pair in zip(made, expected, strict=True))
    assert all(worker.is_alive() for worker in workers)
    del training._loader._iterator  # type: ignore[attr-defined]
    assert [worker.exitcode for worker in workers] == [0, 0]  # asked to end, not killed


LEFT = """
import sys
from spatially.train.data import open_training
from spatially.train.library import read_recipe
options = {"size": (8, 8), "mean": (0.5,) * 3, "std": (0.5,) * 3, "device": "cpu", "resident": False, "workers": 2}
training = open_training(sys.argv[1], recipe=read_recipe("xu-1h").override({"batch": 2}), **options)[0]
batches = training.batches(0)
next(batches)
raise RuntimeError("in the middle of an epoch")
"""


def test_an_error_ends_the_workers_too(make_folder: Callable[..., Path]) -> None:
    command = [sys.executable, "-c", LEFT, str(make_folder(each=8))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("RuntimeError: in the middle of an epoch")


@pytest.mark.parametrize("crop", ["resized", "padded", "none"])
def test_both_ways_agree_where_nothing_is_drawn(make_folder: Callable[..., Path], crop: str) -> None:
    """Without chance, images from the device's memory and from the loader differ by a grey level at most."""
    root = make_folder(each=8, size=(40, 44))
    fixed = {
        "crop": crop,
        "scale": (1.0, 1.0),
        "ratio": (1.1, 1.1),
        "padding": 0,
        "flip": 1.0,
        "interpolation": "bicubic",
    }
    options = {"recipe": recipe(**fixed), "workers": 0, **MODEL}
    pairs = [open_training(root, resident=resident, **options)[0].batches(0) for resident in (True, False)]
    level = 1 / 255 / min(MODEL["std"])
    for one, other in zip(*pairs, strict=True):
        assert torch.equal(one.targets, other.targets)
        assert (one.images - other.images).abs().max() <= 1.01 * level


def test_images_are_normalised_and_validation_is_seen_once() -> None:
    pixels, labels = arrays(size=(24, 24))
    source = {"train": (pixels, labels), "validation": (pixels[:11], labels[:11])}
    training, _, test = open_training(source, recipe=recipe(crop="none", flip=0.0), **MODEL)
    assert test is None
    mean, std = (torch.tensor(MODEL[name])[:, None, None] for name in ("mean", "std"))
    expected = (torch.from_numpy(pixels).float() / 255 - mean) / std
    parts = [open_training(source, recipe=recipe(), rank=rank, world=2, **MODEL)[1] for rank in range(2)]
    seen = {}
    for rank, part in enumerate(parts):
        assert len(part) == 11
        images, found = (torch.cat(all_of) for all_of in zip(*part.batches(), strict=True))
        seen |= {
            2 * row + rank: (image, int(label)) for row, (image, label) in enumerate(zip(images, found, strict=True))
        }
    assert len(seen) == 11
    for row, (image, label) in seen.items():
        assert label == labels[row]
        assert torch.allclose(image, expected[row], atol=1e-5)
    batch = next(iter(training.batches(0)))
    for image, label in zip(batch.images, batch.labels, strict=True):
        distance = (expected - image).abs().flatten(1).amax(1)
        assert distance.min() < 1e-5
        assert label == labels[int(distance.argmin())]


def made(resident: bool, **augmentation: Any) -> Batch:
    """The first batch of images that are left as they are but for this."""
    chosen = recipe(**{"crop": "none", "flip": 0.0, **augmentation})
    return next(
        iter(open_training(arrays(size=(24, 24)), recipe=chosen, resident=resident, workers=0, **MODEL)[0].batches(0))
    )


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize(
    "changes", [{"crop": "resized"}, {"rand_augment": "rand-m9-n4"}, {"jitter": 0.4}, {"erase": 1.0}]
)
def test_what_a_recipe_asks_for_is_done_to_images(changes: dict[str, Any], resident: bool) -> None:
    plain, found = made(resident), made(resident, **changes)
    assert torch.equal(found.targets, plain.targets)
    assert torch.allclose(plain.targets.sort(dim=1).values, torch.tensor([0.025, 0.025, 0.025, 0.925]))
    other = (found.images != plain.images).any(dim=1)
    assert other.flatten(1).any(dim=1).sum() >= 6  # of 8: some draws change little
    if "erase" in changes:
        assert (other.flatten(1).double().mean(dim=1) < 0.5).all()


@pytest.mark.parametrize("resident", [True, False])
def test_mirrored_and_padded_images_are_the_same_pixels_elsewhere(resident: bool) -> None:
    plain = made(resident).images
    assert torch.equal(made(resident, flip=1.0).images, plain.flip(-1))
    found = made(resident, crop="padded", padding=2).images
    black = -torch.tensor(MODEL["mean"]) / torch.tensor(MODEL["std"])
    around = black[:, None, None].repeat(1, 28, 28).repeat(8, 1, 1, 1)
    around[:, :, 2:-2, 2:-2] = plain
    places = []
    for image, whole in zip(found, around, strict=True):
        cuts = {(y, x): whole[:, y : y + 24, x : x + 24] for y in range(5) for x in range(5)}
        places.append(next(place for place, cut in cuts.items() if torch.allclose(cut, image, atol=1e-5)))
    assert len(set(places)) > 3


@pytest.mark.parametrize("resident", [True, False])
@pytest.mark.parametrize("kind", ["mixup", "cutmix"])
def test_images_and_targets_are_mixed_with_the_opposite_ones_by_one_share(kind: str, resident: bool) -> None:
    plain, found = made(resident), made(resident, **{kind: 1.0})
    row = int((plain.labels != plain.labels.flip(0)).nonzero()[0])
    share = float((found.targets[row, plain.labels[row]] - 0.025) / 0.9)
    assert 0.01 < share < 0.99
    assert torch.allclose(found.targets, share * plain.targets + (1 - share) * plain.targets.flip(0), atol=1e-6)
    if kind == "mixup":
        expected = share * plain.images + (1 - share) * plain.images.flip(0)
        assert torch.allclose(found.images, expected, atol=1e-5)
        return
    own = (found.images == plain.images).all(dim=1)
    assert (own | (found.images == plain.images.flip(0)).all(dim=1)).all()
    assert float(own[row].double().mean()) == pytest.approx(share, abs=0.01)  # a pixel may be alike by chance


@pytest.mark.parametrize("resident", [True, False])
def test_repeated_augmentation_shows_an_image_several_times_in_a_batch(resident: bool) -> None:
    same, drawn = made(resident, repeats=4).images, made(resident, repeats=4, crop="resized").images
    assert all(torch.equal(same[first], same[first + more]) for first in (0, 4) for more in (1, 2, 3))
    assert not torch.equal(same[0], same[4])
    assert not torch.equal(drawn[0], drawn[1])


def test_a_small_set_lies_on_the_device_as_bytes_and_a_large_one_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"recipe": recipe(), "workers": 0, **MODEL}
    small = open_training(arrays(), **options)[0]
    assert isinstance(small, ResidentTraining)
    assert small._pixels.dtype == torch.uint8
    needed = 28 * 3 * 32 * 32
    for free, kind in ((4 * needed, ResidentTraining), (4 * needed - 4, LoadedTraining)):
        monkeypatch.setattr("os.sysconf", lambda name, free=free: 4 if name == "SC_PAGE_SIZE" else free // 4)
        assert type(open_training(arrays(), **options)[0]) is kind


def test_validation_takes_no_more_images_at_a_time_than_training() -> None:
    """Where a batch is taken in parts because it does not fit, neither would so many validation images."""
    parts = {
        accumulation: open_training(arrays(), recipe=recipe().override({"run.accumulation": accumulation}), **MODEL)[1]
        for accumulation in (1, 4)
    }
    sizes = {accumulation: {len(labels) for _, labels in part.batches()} for accumulation, part in parts.items()}
    assert max(sizes[1]) > 2
    assert max(sizes[4]) == 2


@pytest.mark.parametrize("augmentation", [EVERYTHING, {"jitter": 0.4}, {"crop": "padded"}])
def test_making_a_batch_waits_for_nothing(augmentation: dict[str, Any]) -> None:
    """Tensors without values: reading one, or a shape that depends on one, raises. So a CUDA graph can hold it all."""
    data = open_training(arrays(), recipe=recipe(**augmentation), resident=True, **MODEL)[0]
    assert isinstance(data, ResidentTraining)
    every(data.batches(0))  # fills the table of normal numbers
    rows, state = Order(count=28, batch=8, seed=0).epoch(0)
    inputs = rows[0], state[0], data.plan(rows, state)[0], torch.ones(6)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        images, targets, labels = data.make(*(mode.from_tensor(one) for one in inputs))
    assert (images.shape, targets.shape, labels.shape) == ((8, 3, 24, 24), (8, 4), (8,))


def test_accumulation_cuts_a_batch() -> None:
    batch = next(iter(open_training(arrays(), recipe=recipe(), **MODEL)[0].batches(0)))
    chunks = batch.chunks(4)
    assert [len(one) for one in chunks] == [2, 2, 2, 2]
    assert torch.equal(torch.cat([one.images for one in chunks]), batch.images)


def test_folder_with_its_own_validation(tmp_path: Path, make_folder: Callable[..., Path]) -> None:
    images = make_folder(each=6)
    root = tmp_path / "set"
    root.mkdir()
    images.rename(root / "train")
    for name in ("val", "test"):
        images = make_folder(each=2)
        images.rename(root / name)
    training, validation, test = open_training(root, recipe=recipe(), **MODEL)
    assert (training.images_per_epoch, len(validation)) == (24, 8)
    assert test is not None
    assert len(test) == 8
    assert training.classes == validation.classes == tuple(f"class{number}" for number in range(4))
    (root / "val" / "class3").rename(root / "val" / "other")
    with pytest.raises(UserError, match=r"differs in class3, other"):
        open_training(root, recipe=recipe(), **MODEL)


def test_folder_without_validation_is_cut_by_the_seed(make_folder: Callable[..., Path]) -> None:
    training, validation, test = open_training(make_folder(each=20), recipe=recipe(), **MODEL)
    assert test is not None
    assert (training.images_per_epoch, len(validation), len(test)) == (56, 12, 12)


def test_decoded_once_and_broken_images_skipped(
    make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    root = make_folder(each=20, size=(40, 36))
    for number in range(3):
        (root / "class0" / f"{number}.png").write_bytes(b"no picture")
    options = {"recipe": recipe(), "resident": True, **MODEL}
    with pytest.warns(UserWarning, match=r"cannot be read, 3 of the images: class0.\d.png \("):
        first = open_training(root, **options)
    assert sum(len(part) for part in first[1:] if part) + first[0].images_per_epoch >= 70
    monkeypatch.setattr("spatially.train.stored.decode", lambda *_: pytest.fail("decoded again"))
    with pytest.warns(UserWarning, match="3 of the images"):
        second = open_training(root, **options)
    assert all(equal(*pair) for pair in zip(first[0].batches(0), second[0].batches(0), strict=True))


def test_a_class_whose_training_images_are_all_broken_is_refused(make_folder: Callable[..., Path]) -> None:
    root = make_folder(each=10)
    for path in (root / "class1").iterdir():
        path.write_bytes(b"no picture")
    with pytest.raises(UserError, match=r"can be read: class1 \(class1/\d\.png: not an image, …\); mend them") as told:
        open_training(root, recipe=recipe(), resident=True, **MODEL)
    assert "class0" not in str(told.value)


def test_no_file_stays_open_when_sizes_are_looked_at(
    make_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    part = open_parts(make_folder(each=4, size=(40, 36)), size=(24, 24), split=(0.5, 0.5, 0.0), seed=0).train
    opened: list[Any] = []
    read = type(part.source).read

    def remembered(source: Any, number: int) -> Any:
        opened.append(read(source, number)[0])
        return opened[-1], 0

    monkeypatch.setattr(type(part.source), "read", remembered)
    assert usual_size(part) == (40, 36)
    assert opened
    assert all(file.closed for file in opened)


def test_the_loader_replaces_a_broken_image(make_folder: Callable[..., Path]) -> None:
    root = make_folder(each=20)
    for number in range(3, 8):  # more than validation takes of a class
        (root / "class1" / f"{number}.png").write_bytes(b"no picture")
    data = open_training(root, recipe=recipe(), resident=False, workers=0, split=(0.9, 0.1, 0.0), **MODEL)[0]
    with pytest.warns(UserWarning, match="the next image takes its place"):
        assert len(every(data.batches(0))) == data.steps_per_epoch


def test_generated_shapes_are_other_images_than_the_probes_see() -> None:
    training, validation, _ = open_training(
        "shapes", recipe=recipe(crop="none", flip=0.0), limit=48, **{**MODEL, "size": (32, 32), "mean": (0, 0, 0)}
    )
    assert (training.images_per_epoch, len(validation)) == (48, 1200)
    assert training.classes == Shapes(size=32).classes
    probed, _ = Shapes(size=32).images(torch.arange(48))
    batch = next(iter(training.batches(0)))
    pixels = (batch.images * torch.tensor(MODEL["std"])[:, None, None] * 255).round().to(torch.uint8)
    assert not any(torch.equal(one, other) for one in pixels for other in probed)
    made, labels = Shapes(size=32, seed=1).images(torch.arange(48))
    for one, label in zip(pixels, batch.labels, strict=True):
        assert any(torch.equal(one, other) and label == its for other, its in zip(made, labels, strict=True))


def write_shards(folder: Path, *, names: bool) -> None:
    parquet = pytest.importorskip("pyarrow.parquet")
    import pyarrow

    pixels, labels = arrays(30)
    for part, rows in {"train": range(24), "val": range(24, 30)}.items():
        shards = [rows[::2], rows[1::2]] if part == "train" else [rows]
        for number, shard in enumerate(shards):
            images = []
            for row in shard:
                file = io.BytesIO()
                Image.fromarray(pixels[row].transpose(1, 2, 0)).save(file, "PNG")
                images.append({"bytes": file.getvalue(), "path": f"{row}.png"})
            table = pyarrow.table({"image": images, "label": labels[list(shard)]})
            if names:
                features = {"label": {"names": ["a", "b", "c", "d"], "_type": "ClassLabel"}}
                about = {"huggingface": json.dumps({"info": {"features": features}})}
                table = table.replace_schema_metadata(about)
            parquet.write_table(table, folder / f"small-{part}-{number:05}-of-{len(shards):05}.parquet")
    if not names:
        (folder / "small-classes.json").write_text(json.dumps(["e", "f", "g", "h"]))


@pytest.mark.parametrize("names", [True, False])
def test_parquet_shards(tmp_path: Path, names: bool) -> None:
    write_shards(tmp_path, names=names)
    pixels, labels = arrays(30)
    options = {"recipe": recipe(crop="none", flip=0.0), **{**MODEL, "size": (32, 32)}}
    for source in (tmp_path / "small-train-*.parquet", tmp_path):
        training, validation, test = open_training(source, **options)
        assert test is None
        assert (training.images_per_epoch, len(validation)) == (24, 6)
        assert training.classes == (("a", "b", "c", "d") if names else ("e", "f", "g", "h"))
    images, found = next(iter(validation.batches()))
    assert found.tolist() == labels[24:].tolist()
    shown = images * torch.tensor(MODEL["std"])[:, None, None] + torch.tensor(MODEL["mean"])[:, None, None]
    assert torch.equal((shown * 255).round().to(torch.uint8), torch.from_numpy(pixels[24:]))


def write_archive(folder: Path, part: str, rows: range) -> dict[str, Any]:
    pixels, labels = arrays(30)
    with tarfile.open(folder / f"{part}.tar", "w") as archive:
        for row in rows:
            file = io.BytesIO()
            Image.fromarray(pixels[row].transpose(1, 2, 0)).save(file, "PNG")
            for ending, content in (("png", file.getvalue()), ("cls", str(labels[row]).encode())):
                entry = tarfile.TarInfo(f"{row:04d}.{ending}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    return {"name": part, "filenames": [f"{part}.tar"], "shard_lengths": [len(rows)], "num_samples": len(rows)}


def test_archives_that_are_read_from_front_to_back(tmp_path: Path) -> None:
    pytest.importorskip("webdataset")
    parts = {"train": range(24), "validation": range(24, 30)}
    splits = {part: write_archive(tmp_path, part, rows) for part, rows in parts.items()}
    (tmp_path / "info.json").write_text(json.dumps({"splits": splits}))
    options = {"recipe": recipe(crop="none", flip=0.0), "root": tmp_path, **{**MODEL, "size": (32, 32)}}
    training, validation, _ = open_training("wds/data", **options)
    assert training.classes == ("0", "1", "2", "3")
    assert sorted(torch.cat([batch.labels for batch in training.batches(0)]).tolist()) == sorted(arrays(30)[1][:24])
    assert next(iter(validation.batches()))[1].tolist() == arrays(30)[1][24:].tolist()
    with pytest.raises(UserError, match="front to back, and is too large"):
        open_training("wds/data", resident=False, **options)


def test_reader_by_number(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    pixels, labels = arrays(30)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list("abcd"))})
    folder = tmp_path / "Set"
    folder.mkdir()
    for part, rows in {"train": range(24), "test": range(24, 30)}.items():
        pictures = [Image.fromarray(pixels[row].transpose(1, 2, 0)) for row in rows]
        table = datasets.Dataset.from_dict({"image": pictures, "label": labels[list(rows)]}, features=features)
        table.to_parquet(folder / f"{part}-0.parquet")
    for resident in (True, False):
        training, validation, test = open_training(
            f"hfds/{folder}", recipe=recipe(), root=tmp_path / "hf", resident=resident, workers=0, **MODEL
        )
        assert (training.classes, training.images_per_epoch, len(validation), test) == (tuple("abcd"), 24, 6, None)
        assert len(every(training.batches(0))) == 3


def test_bad_sources_are_refused(tmp_path: Path) -> None:
    pixels, labels = arrays(8)
    bad: dict[str, Any] = {
        "labels must be 8 whole numbers": (pixels, labels[:5]),
        "pixels must be uint8": (pixels.astype(np.float32), labels),
        "0 or more": (pixels, labels - 1),
        "named train, validation, test": {"training": (pixels, labels)},
        "there is no folder": tmp_path / "nowhere",
        "no Parquet shards": str(tmp_path / "no-*.parquet"),
        "batch must be at most": (pixels, labels),
        "below the number of classes, 2, but reach 3": {"train": (pixels, labels), "classes": ("a", "b")},
    }
    for message, source in bad.items():
        with pytest.raises(UserError, match=message):
            open_training(source, recipe=recipe(64 if "batch" in message else 2), **MODEL)


def test_larger_images_are_validated_on_their_middle() -> None:
    small = held_out_preprocessing((32, 32), (32, 32), (0,) * 3, (1,) * 3, "random")
    large = held_out_preprocessing((375, 500), (224, 224), (0,) * 3, (1,) * 3, "bilinear")
    assert (small.resize, small.interpolation) == ((32, 32), "bicubic")
    assert (large.resize, large.interpolation) == ((256, 256), "bilinear")


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_graph_and_host_make_the_same_batches() -> None:
    source, given = arrays(64), {"recipe": recipe(16, **EVERYTHING), "seed": 2, **MODEL}
    host = every(open_training(source, **given)[0].batches(1))
    for graph in (False, True):
        device = open_training(source, **{**given, "device": "cuda"}, graph=graph)[0]
        made = every(device.batches(1))
        for one, other in zip(host, made, strict=True):
            assert torch.equal(one.labels, other.labels.cpu())
            assert torch.allclose(one.targets, other.targets.cpu(), atol=1e-6)
            difference = (one.images - other.images.cpu()).abs()
            # A value halfway between two levels may fall to either; a histogram then moves with it.
            assert (difference > 1e-4).float().mean() < 0.02
        again = every(device.batches(1, first_step=1))
        assert all(equal(*pair) for pair in zip(made[1:], again, strict=True))
