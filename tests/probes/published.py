"""Small generated stand-ins of published layouts, and models whose answers can be read off the pixels.

A picture's class is its colour: a third of its rows at the top, middle and bottom are free for other things, and a model
that reads a colour at one place names what is there.
"""

import json
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

import spatially
from spatially.data.backgrounds import NINE
from spatially.subject import Preprocessing, Subject
from spatially.subject.classes import imagenet
from spatially.subject.imagenet_classes import IMAGENET_A, SIXTEEN, imagenet_synsets

SIDE = 16
CLASSES = tuple(SIXTEEN)


def colour(number: int) -> tuple[int, int, int]:
    """A number below 1000 as a colour: one decimal digit in each channel."""
    return 20 + 24 * (number // 100), 20 + 24 * (number // 10 % 10), 20 + 24 * (number % 10)


def paint(path: Path, number: int, *, centre: int | None = None) -> None:
    """A picture of one number's colour, another's in its centre quarter."""
    pixels = np.full((SIDE, SIDE, 3), colour(number), np.uint8)
    if centre is not None:
        pixels[SIDE // 4 : 3 * SIDE // 4, SIDE // 4 : 3 * SIDE // 4] = colour(centre)
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


class Reader(nn.Module):
    """Names the number whose colour stands at a pixel; differentiable, since logits are minus squared distances."""

    def __init__(self, place: tuple[int, int], classes: int = 1000, confusion: dict[int, int] | None = None) -> None:
        super().__init__()
        self.num_classes, self.place = classes, place
        table = torch.tensor([colour(number) for number in range(classes)], dtype=torch.float32) / 255
        for right, wrong in (confusion or {}).items():
            table[[right, wrong]] = table[[wrong, right]]
        self.register_buffer("table", table)

    def forward(self, images: Tensor) -> Tensor:
        seen = images[:, :, self.place[0], self.place[1]]
        return -1000 * (seen[:, None] - self.table).square().sum(dim=2)


CORNER, MIDDLE = (0, 0), (SIDE // 2, SIDE // 2)


def reader(
    place: tuple[int, int] = CORNER, *, name: str = "reader", confusion: dict[int, int] | None = None
) -> Subject:
    """A model of ImageNet's classes that reads one pixel."""
    return Subject(
        Reader(place, confusion=confusion),
        Preprocessing((SIDE, SIDE), resize=(SIDE, SIDE)),
        name=name,
        answers=1000,
        device=torch.device("cpu"),
        classes=imagenet(1000),
    )


def main_images(subject: Subject, count: int = 12) -> spatially.data.Images:
    """Plain pictures of the first classes; class 0, which black looks like, is not among them."""
    labels = np.arange(1, count + 1)
    pixels = np.array([colour(label) for label in labels], np.uint8)[:, None, None].repeat(SIDE, 1).repeat(SIDE, 2)
    return spatially.open_images(pixels, subject, labels=labels)


def make_imagenet_a(root: Path, *, each: int = 1) -> Path:
    """200 folders by synset, every picture in its class's colour."""
    for number in IMAGENET_A:
        for copy in range(each):
            paint(root / imagenet_synsets()[number] / f"{copy}.png", number)
    return root


def make_backgrounds(root: Path, *, each: int = 2) -> Path:
    """Nine classes; ImageNet's classes 0…8 belong to the nine, 100…108 too, the others to none.

    Foregrounds are the centre quarter, in the colour of class c; the rest of the picture and backgrounds in that of 100 + c.
    """
    for number, name in enumerate(NINE):
        for copy in range(each):
            paint(root / "original" / "val" / name / f"n{copy}.png", 100 + number, centre=number)
            paint(root / "only_bg_t" / "val" / name / f"bg_n{copy}.png", 100 + number)
            mask = np.zeros((SIDE, SIDE), bool)
            mask[SIDE // 4 : 3 * SIDE // 4, SIDE // 4 : 3 * SIDE // 4] = True
            (root / "fg_mask" / "val" / name).mkdir(parents=True, exist_ok=True)
            np.save(root / "fg_mask" / "val" / name / f"n{copy}.npy", mask)
    belongs = {
        str(number): number % 100 if number in range(9) or number in range(100, 109) else -1 for number in range(1000)
    }
    (root / "in_to_in9.json").write_text(json.dumps(belongs))
    return root


def make_cue_conflict(root: Path, *, each: int = 1) -> Path:
    """Every pair of shape and texture: the border in the colour of a member of the shape, the centre of the texture."""
    for shape in CLASSES:
        for texture in CLASSES:
            for copy in range(each):
                file = root / shape / f"{shape}{copy + 1}-{texture}{copy + 2}.png"
                paint(file, SIXTEEN[shape][0], centre=SIXTEEN[texture][-1])
    return root
