"""What tells one set of images from another, wherever it lies."""

import os
import shutil
from pathlib import Path

import numpy as np
from PIL import Image

from spatially.train.fingerprint import fingerprint
from spatially.train.sources import Part, open_parts


def folder(root: Path) -> Path:
    for number in range(40):
        place = root / f"class{number % 2}"
        place.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (4, 4), (number, 0, 0)).save(place / f"{number:02d}.png")
    return root


def part(source: object, **options: object) -> Part:
    return open_parts(source, size=(4, 4), split=(0.5, 0.5, 0.0), seed=0, **options).train  # type: ignore[arg-type]


def test_a_copy_is_the_same_set_and_another_image_label_or_choice_is_not(tmp_path: Path) -> None:
    found = fingerprint(part(folder(tmp_path / "one")))
    assert found.startswith("20 images ")
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    for path in (tmp_path / "copy").rglob("*.png"):
        os.utime(path, (1, 1))
    assert fingerprint(part(tmp_path / "copy")) == found
    assert fingerprint(part(tmp_path / "one", limit=19)) != found
    changed = part(tmp_path / "copy")
    path = tmp_path / "copy" / changed.source.name(int(changed.numbers[0]))
    Image.new("RGB", (4, 4), (0, 9, 0)).save(path)
    assert fingerprint(part(tmp_path / "copy")) != found
    path.write_bytes(b"no image")
    assert fingerprint(part(tmp_path / "copy")) != found


def test_arrays_are_told_apart_by_pixels_and_labels() -> None:
    pixels, labels = np.zeros((40, 4, 4, 3), np.uint8), np.arange(40) % 2
    found = fingerprint(part((pixels, labels)))
    assert fingerprint(part((pixels.copy(), labels))) == found
    assert fingerprint(part((pixels + 1, labels))) != found
    assert fingerprint(part((pixels, 1 - labels))) != found
