"""Files are whole or absent, checked when read, and the same bytes for the same Dataset."""

from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from spatially.errors import UserError
from spatially.files import WriteError
from spatially.study.store import DamagedFile, Store, read_dataset, slug, write_dataset


def example(count: int = 600) -> xr.Dataset:
    generator = np.random.default_rng(0)
    return xr.Dataset(
        {
            "correct": (("image", "kind"), generator.random((count, 2)) < 0.5),
            "value": ("image", generator.random(count)),
        },
        coords={"image": np.arange(count), "kind": ["shuffle", "mask"]},
        attrs={"model": "a", "probe": "sensitivity", "chance": 0.1, "images": count},
    )


def test_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.nc"
    write_dataset(path, example())
    found = read_dataset(path)
    assert found.identical(example())
    assert found.correct.dtype == bool
    assert [one.name for one in path.parent.iterdir()] == ["result.nc"]


def test_same_dataset_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_dataset(tmp_path / name, example())
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_strings_of_joined_parts_stay_whole(tmp_path: Path) -> None:
    """A string of the first part is the shorter one, and what is read knows its length."""
    names = ["cat/cat1-dog1.png", "cat/cat1-elephant12.png"]
    for number, name in enumerate(names):
        write_dataset(tmp_path / f"{number}.nc", xr.Dataset({"file": ("image", [name])}))
    parts = [read_dataset(tmp_path / f"{number}.nc") for number in range(2)]
    write_dataset(tmp_path / "joined.nc", xr.concat(parts, dim="image"))
    assert read_dataset(tmp_path / "joined.nc").file.values.tolist() == names


@pytest.mark.parametrize("keep", [0, 10, 1000, -1])
def test_a_file_cut_short_is_damaged(keep: int, tmp_path: Path) -> None:
    path = tmp_path / "result.nc"
    write_dataset(path, example())
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DamagedFile, match="damaged or was cut short; delete it"):
        read_dataset(path)


def test_flipped_values_are_noticed(tmp_path: Path) -> None:
    path = tmp_path / "result.nc"
    write_dataset(path, example())
    content = bytearray(path.read_bytes())
    noticed = 0
    for place in range(len(content) // 3, len(content), len(content) // 9):
        altered = content.copy()
        altered[place] ^= 255
        path.write_bytes(altered)
        try:
            noticed += not read_dataset(path).identical(example())
        except DamagedFile:
            noticed += 1
            continue
        assert read_dataset(path).identical(example()), "altered values were read as if they were right"
    assert noticed


def test_full_disk_keeps_the_old_file_and_leaves_no_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "result.nc"
    write_dataset(path, example(10))
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(
        WriteError, match="No space left on device; free some space there and run the same command again"
    ):
        write_dataset(path, example())
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_part_of_another_measurement_is_not_taken(tmp_path: Path) -> None:
    store = Store(tmp_path)
    write_dataset(store.part_path("m", "paste", 3), example().assign_attrs(key="one"))
    assert store.read_part("m", "paste", 3, key="one") is not None
    assert store.read_part("m", "paste", 3, key="two") is None
    assert store.read_part("m", "paste", 4, key="one") is None
    store.part_path("m", "paste", 3).write_bytes(b"half")
    assert store.read_part("m", "paste", 3, key="one") is None


def test_empty_folder_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="run `spatially probe"):
        Store(tmp_path / "none").results()
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        Store(tmp_path / "file")


@pytest.mark.parametrize(
    ("name", "expected"), [("hf/google/vit", "hf_google_vit"), ("a.b-c", "a.b-c"), ("../..", "model")]
)
def test_slug_is_a_plain_file_name(name: str, expected: str) -> None:
    assert slug(name) == expected
