"""Parquet shards as a source of images: content, names, classes, and what is refused."""

import io
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import spatially
from spatially.data.parquet import Shards, splits_beside
from spatially.errors import UserError

pyarrow = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")


def encoded(pixels: np.ndarray) -> bytes:
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def write(path: Path, pixels: np.ndarray, labels: list[int]) -> None:
    images = [{"bytes": encoded(one), "path": f"{number}.png"} for number, one in enumerate(pixels)]
    parquet.write_table(pyarrow.table({"image": images, "label": labels}), path, row_group_size=2)


@pytest.fixture
def pixels() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (8, 32, 32, 3), dtype=np.uint8)


def test_shards_are_read_in_the_order_of_their_names(tmp_path: Path, pixels: np.ndarray) -> None:
    write(tmp_path / "set-val-00001-of-00002.parquet", pixels[5:], [1, 2, 3])
    write(tmp_path / "set-val-00000-of-00002.parquet", pixels[:5], [0, 1, 2, 3, 0])
    shards = Shards(str(tmp_path / "set-val-*.parquet"))
    assert len(shards) == 8
    assert shards.labels() == [0, 1, 2, 3, 0, 1, 2, 3]
    for number in range(8):
        file, label = shards.read(number)
        assert np.array_equal(np.asarray(Image.open(file)), pixels[number])
        assert label == shards.labels()[number]
    assert shards.name(6) == "1.png"
    assert shards.classes is None


def test_probes_read_them_too(tmp_path: Path, pixels: np.ndarray, subject: spatially.Subject) -> None:
    write(tmp_path / "set-val.parquet", pixels, [0, 1, 2, 3] * 2)
    images = spatially.open_images(tmp_path / "set-val.parquet", subject)
    assert np.array_equal(images.pixels, pixels.transpose(0, 3, 1, 2))
    assert images.labels.tolist() == [0, 1, 2, 3] * 2


@pytest.mark.parametrize(
    ("held_out", "found"),
    [(("val",), ("val", None)), (("test",), ("test", None)), (("validation", "test"), ("validation", "test"))],
)
def test_held_out_shards_are_found_beside(
    tmp_path: Path, pixels: np.ndarray, held_out: tuple[str, ...], found: tuple[str, str | None]
) -> None:
    for number, part in enumerate(("train", *held_out), start=1):
        write(tmp_path / f"train-set-{part}-00000-of-0000{number}.parquet", pixels[:number], [0] * number)
    for pattern in ("train-set-train-*.parquet", "train-set-train-00000-of-00001.parquet"):
        train, *others = splits_beside(str(tmp_path / pattern))
        assert len(train) == 1
        for shards, part in zip(others, found, strict=True):
            assert (shards is None) == (part is None)
            assert shards is None or f"-{part}-" in shards.paths[0]


def test_a_folder_of_several_sets_is_ambiguous(tmp_path: Path, pixels: np.ndarray) -> None:
    for name in ("small-train-00000-of-00002", "small-train-00001-of-00002", "other-train-00000-of-00001"):
        write(tmp_path / f"{name}.parquet", pixels, [0, 1] * 4)
    with pytest.raises(UserError, match="holds shards of other, small; name one"):
        splits_beside(str(tmp_path))
    (tmp_path / "other-train-00000-of-00001.parquet").unlink()
    assert len(splits_beside(str(tmp_path))[0]) == 16


def test_what_is_no_shard_is_refused(tmp_path: Path, pixels: np.ndarray) -> None:
    parquet.write_table(pyarrow.table({"picture": [b"x"], "label": [0]}), tmp_path / "columns.parquet")
    parquet.write_table(pyarrow.table({"image": [b"x"], "label": [0]}), tmp_path / "bytes.parquet")
    (tmp_path / "text.parquet").write_text("no table")
    write(tmp_path / "few-train-0.parquet", pixels[:3], [0, 1, 2])
    (tmp_path / "few-classes.json").write_text(json.dumps(["one", "two"]))
    bad = {
        "columns": "must have the columns image and label, but has picture, label",
        "bytes": "must hold {bytes, path}",
        "text": "could not read",
        "nothing": "there are no Parquet shards",
        "few-train-0": "has label 2, but only 2 class names",
    }
    for name, message in bad.items():
        with pytest.raises(UserError, match=message):
            Shards(str(tmp_path / f"{name}.parquet"))


def test_an_image_without_bytes_is_skipped(tmp_path: Path, pixels: np.ndarray, subject: spatially.Subject) -> None:
    images = [{"bytes": encoded(pixels[0]), "path": "a.png"}, {"bytes": None, "path": "b.png"}]
    parquet.write_table(pyarrow.table({"image": images, "label": [0, 1]}), tmp_path / "set.parquet")
    opened = spatially.open_images(tmp_path / "set.parquet", subject)
    assert len(opened) == 1
    assert [one.name for one in opened.skipped] == ["b.png"]
