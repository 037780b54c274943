"""The Backgrounds Challenge (Xiao et al. 2020, "Noise or Signal") in the layout in which it is published.

.. code-block:: text

    FOLDER/original/val/00_dog/NAME.JPEG     photographs of nine classes, 00_dog … 08_fish
    FOLDER/fg_mask/val/00_dog/NAME.npy       where the foreground of each is: an array (height, width) of 0 and 1
    FOLDER/only_bg_t/val/00_dog/….JPEG       backgrounds, tiled over where the foreground was
    FOLDER/in_to_in9.json                    from the authors' repository: ImageNet class → 0 … 8, or −1 for none of them

The pictures are cropped already: they are shown whole, scaled only where a model takes another size.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from spatially.data.images import Images
from spatially.data.open import open_images
from spatially.data.published import check_class_folders, check_folder
from spatially.errors import UserError

if TYPE_CHECKING:
    from spatially.subject import Subject

NINE = (
    "00_dog",
    "01_bird",
    "02_wheeled vehicle",
    "03_reptile",
    "04_carnivore",
    "05_insect",
    "06_musical instrument",
    "07_primate",
    "08_fish",
)
PARTS = ("original", "fg_mask", "only_bg_t")
MAP = "in_to_in9.json"
_WHAT = "backgrounds"


@dataclass(frozen=True, eq=False)
class Challenge:
    """Photographs, their masks, and backgrounds."""

    originals: Images
    backgrounds: Images
    masks: tuple[Path, ...]
    rows: dict[str, int]  # from "class/name" to the row of the photograph

    def readable(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """Those of the foregrounds with these numbers whose photograph could be read."""
        return np.array([number for number in numbers if _key(self.masks[number]) in self.rows], np.int64)

    def foregrounds(
        self, numbers: NDArray[np.int64], subject: Subject
    ) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int64]]:
        """Photographs (B, 3, H, W), masks (B, 1, H, W) of 0 … 255, and classes of readable foregrounds."""
        crop = whole(subject).preprocessing.crop
        files = [self.masks[number] for number in numbers]
        masks = [crop(_read_mask(file))[:1] for file in files]
        empty = np.zeros((0, 1, *self.originals.size), np.uint8)
        photographs = self.originals.pixels[np.array([self.rows[_key(file)] for file in files], np.int64)]
        return photographs, np.stack(masks) if masks else empty, self.classes(numbers)

    def classes(self, numbers: NDArray[np.int64]) -> NDArray[np.int64]:
        """The class, 0 … 8, of each foreground, by the folder it lies in."""
        return np.array([NINE.index(self.masks[number].parent.name) for number in numbers], np.int64)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of photographs, backgrounds and masks."""
        digest = blake2b(digest_size=16)
        digest.update(f"{self.originals.fingerprint} {self.backgrounds.fingerprint}".encode())
        for mask in self.masks:
            digest.update(_key(mask).encode() + mask.read_bytes())
        return digest.hexdigest()


def find_masks(folder: str | Path) -> tuple[Path, ...]:
    """The foregrounds, by the files of their masks, class by class; the layout is checked."""
    root = check_folder(folder, what=_WHAT)
    missing = [part for part in PARTS if not (root / part / "val").is_dir()]
    if missing:
        raise UserError(
            f"{_WHAT}: {root} lacks {', '.join(f'{part}/val' for part in missing)}; give the folder that holds "
            f"{', '.join(f'{part}/val' for part in PARTS)} of the Backgrounds Challenge"
        )
    for part in PARTS:
        check_class_folders(root / part / "val", NINE, what=_WHAT)
    masks = tuple(mask for name in NINE for mask in sorted((root / "fg_mask" / "val" / name).glob("*.npy")))
    if not masks:
        raise UserError(f"{_WHAT}: {root}/fg_mask/val holds no masks (CLASS/NAME.npy)")
    return masks


def open_challenge(folder: str | Path, subject: Subject) -> Challenge:
    """Decode photographs and backgrounds; a mask without a photograph is an error."""
    root, masks = Path(folder), find_masks(folder)
    view = whole(subject)
    originals, backgrounds = (
        open_images(root / part / "val", view, answers=False) for part in ("original", "only_bg_t")
    )
    names = originals.names(np.arange(len(originals))) or []
    known = {_key(Path(name)): row for row, name in enumerate(names)}
    unreadable = {_key(Path(one.name)) for one in originals.skipped}
    lost = [mask for mask in masks if _key(mask) not in known and _key(mask) not in unreadable]
    if lost:
        raise UserError(f"{_WHAT}: {len(lost)} masks have no photograph in {root}/original/val, the first {lost[0]}")
    return Challenge(originals, backgrounds, masks, known)


def whole(subject: Subject) -> Subject:
    """The subject with pictures shown whole, scaled to its input size."""
    before = subject.preprocessing
    return subject.cropping(replace(before, resize=before.input_size, crop_mode="squash"))


def find_map(folder: str | Path, given: str | Path | None) -> Path:
    """The file that maps ImageNet's classes to the nine: the given one, or the one in or beside the folder."""
    root = Path(folder)
    places = [Path(given)] if given is not None else [root / MAP, root.parent / MAP]
    for place in places:
        if place.is_file():
            return place
    raise UserError(
        f"{_WHAT}: a model of ImageNet's 1000 classes needs {MAP} of the authors' repository "
        f"(MadryLab/backgrounds_challenge); put it into {root}, or say backgrounds_map=FILE"
        + (f"; there is no file {given}" if given is not None else "")
    )


def read_map(path: Path) -> NDArray[np.int64]:
    """For each of ImageNet's 1000 classes one of the nine, or −1."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        values = [content[str(number)] for number in range(1000)]
        whole_numbers = all(isinstance(value, int) and -1 <= value < len(NINE) for value in values)
    except (OSError, ValueError, KeyError, TypeError):
        whole_numbers = False
    if not whole_numbers or set(values) - {-1} != set(range(len(NINE))):
        raise UserError(f'{_WHAT}: {path} must map each of "0" … "999" to one of 0 … 8, or to −1, and use all nine')
    return np.array(values, np.int64)


def _key(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def _read_mask(path: Path) -> Image.Image:
    try:
        mask = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{_WHAT}: the mask {path} is not a whole .npy file of numbers") from error
    if mask.ndim != 2 or not np.isin(mask, (0, 1)).all():
        raise UserError(
            f"{_WHAT}: the mask {path} must be (height, width) of 0 and 1, but is {mask.dtype} {mask.shape}"
        )
    return Image.fromarray(mask.astype(np.uint8) * 255).convert("RGB")
