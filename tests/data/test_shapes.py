"""The generated set: pixels that are a pure function of the number, and a best accuracy that is the true one."""

import json
from itertools import product

import pytest
import torch

from spatially.data.shapes import ARRANGEMENTS, PALETTES, ROLES, Shapes
from spatially.errors import UserError


def exact_best_accuracy(shapes: Shapes, sees: str) -> float:
    """Bayes by enumeration: Σ over all that can be seen of the largest P(class) · P(seen | class)."""
    families, arrangements, q = shapes.families, shapes.arrangements, shapes.mixing
    classes = families * arrangements
    joint: dict[object, list[float]] = {}
    for label in range(classes):
        family, places = label // arrangements, ARRANGEMENTS[label % arrangements]
        for content in product(range(families), repeat=ROLES):  # content[role] = family of that role's part
            probability = 1.0
            for shown in content:
                probability *= (1 - q) * (shown == family) + q / families
            parts = [(role, content[role]) for role in places]  # slot by slot
            seen = frozenset(parts) if sees == "bag" else tuple(parts)
            joint.setdefault(seen, [0.0] * classes)[label] += probability / classes
    return sum(max(row) for row in joint.values())


@pytest.mark.parametrize("sees", ["bag", "ordered"])
@pytest.mark.parametrize("families", [1, 2, 3, 4])
@pytest.mark.parametrize("mixing", [0.0, 0.3, 0.75, 1.0])
def test_the_closed_form_is_the_exact_bayes_accuracy(families, mixing, sees):
    shapes = Shapes(families=families, arrangements=3, mixing=mixing)
    assert shapes.best_accuracy(sees) == pytest.approx(exact_best_accuracy(shapes, sees), abs=1e-12)


@pytest.mark.parametrize("mixing", [0.3, 0.7])
def test_the_closed_form_is_met_by_majority_on_the_images_themselves(mixing):
    """Read the tiles off noiseless images, guess the family most often seen, and compare at four standard errors."""
    shapes, count = Shapes(size=32, mixing=mixing, noise=0.0), 4000
    images, labels = shapes.images(torch.arange(count))
    shown, _ = read_parts(shapes, images)
    votes = torch.nn.functional.one_hot(shown, shapes.families).sum(1).double()
    winners = votes == votes.amax(1, keepdim=True)
    true = labels // shapes.arrangements
    accuracy = (winners[torch.arange(count), true] / winners.sum(1)).mean().item()
    expected = shapes.best_accuracy("ordered")
    assert abs(accuracy - expected) < 4 * (expected * (1 - expected) / count) ** 0.5


def read_parts(shapes: Shapes, images: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Family and role of the tile in each of the four slots, by exact comparison; fails where no tile fits."""
    part, (row, column) = shapes.part, shapes.origin
    tiles = shapes.parts().flatten(0, 1).flatten(1)
    found = []
    for slot in range(ROLES):
        top, left = (row + slot // 2) * part, (column + slot % 2) * part
        same = (images[:, :, top : top + part, left : left + part].flatten(1)[:, None] == tiles).all(-1)
        assert same.sum(1).eq(1).all()
        found.append(same.int().argmax(1))
    tile = torch.stack(found, dim=1)
    return tile // ROLES, tile % ROLES


@pytest.mark.parametrize("size", [32, 64, 96, (64, 96), 70])
def test_parts_lie_on_the_grid_in_the_class_s_arrangement(size):
    shapes = Shapes(size=size, noise=0.0)
    images, labels = shapes.images(torch.arange(24))
    family, role = read_parts(shapes, images)
    assert images.shape == (24, 3, shapes.height, shapes.width)
    assert torch.equal(labels, torch.arange(24) % 12)
    assert torch.equal(family, (labels // 3)[:, None].expand(-1, 4))
    assert torch.equal(role, torch.tensor(ARRANGEMENTS)[labels % 3])


def test_arrangements_are_different_and_latin_squares_in_fours():
    assert len(set(ARRANGEMENTS)) == len(ARRANGEMENTS) == 24
    for block in range(0, 24, 4):
        assert all(len(set(slot)) == 4 for slot in zip(*ARRANGEMENTS[block : block + 4], strict=True))
    mirrored = {(row[1], row[0], row[3], row[2]) for row in ARRANGEMENTS[:12]}
    assert not mirrored & set(ARRANGEMENTS[:12])


@pytest.mark.parametrize("part", [8, 16, 56])
def test_parts_are_distinct(part):
    tiles = Shapes(size=4 * part, families=len(PALETTES)).parts()
    assert tiles.shape == (8, 4, 3, part, part)
    assert tiles.dtype == torch.uint8
    correlation = torch.corrcoef(tiles.flatten(0, 1).flatten(1).double()).fill_diagonal_(0)
    assert correlation.max() < 0.9


@pytest.mark.parametrize("batch", [1, 7, 64])
def test_images_do_not_depend_on_the_batch(batch):
    shapes = Shapes(mixing=0.4, jitter=1, seed=3)
    index = torch.arange(1000, 1070)
    whole, labels = shapes.images(index)
    pieces = [shapes.images(chunk) for chunk in index.flip(0).split(batch)]
    assert torch.equal(torch.cat([images for images, _ in pieces]).flip(0), whole)
    assert torch.equal(torch.cat([label for _, label in pieces]).flip(0), labels)


def test_images_stay_what_they_were():
    """The bits that published figures were made from; change them only on purpose."""
    images, _ = Shapes(mixing=0.2, jitter=1).images(torch.arange(8))
    weights = torch.arange(images.numel()) % 8191
    assert int((images.flatten().long() * weights).sum()) == 64186568333


def test_seed_changes_images_but_not_parts():
    first, second = Shapes(seed=0), Shapes(seed=1)
    assert torch.equal(first.parts(), second.parts())
    assert not torch.equal(first.images(torch.arange(4))[0], second.images(torch.arange(4))[0])


def test_the_background_knows_no_class():
    """Other classes, same numbers: every pixel outside the object is the same."""
    index, outside = torch.arange(24), torch.ones(64, 64, dtype=torch.bool)
    outside[16:48, 16:48] = False
    one, other = (shapes.images(index)[0] for shapes in (Shapes(families=2), Shapes(families=8, arrangements=24)))
    assert torch.equal(one[..., outside], other[..., outside])


def test_jitter_moves_whole_cells_and_stays_inside():
    shapes = Shapes(noise=0.0, jitter=1)
    images, _ = shapes.images(12 * torch.arange(90))  # all of the first class, whose upper left part is of role 0
    cells = images.unfold(2, 16, 16).unfold(3, 16, 16).permute(0, 2, 3, 1, 4, 5)
    places = (cells == shapes.parts()[0, 0]).all(-1).all(-1).all(-1).nonzero()
    assert torch.equal(places[:, 0], torch.arange(90))  # once in every image
    assert {tuple(place) for place in places[:, 1:].tolist()} == set(product(range(3), repeat=2))


def test_mixing_replaces_parts_as_often_as_it_says():
    shapes = Shapes(size=32, mixing=0.4, noise=0.0)
    images, labels = shapes.images(torch.arange(3000))
    family, role = read_parts(shapes, images)
    kept = (family == (labels // 3)[:, None]).double().mean().item()
    expected = 1 - 0.4 + 0.4 / 4
    assert abs(kept - expected) < 4 * (expected * (1 - expected) / family.numel()) ** 0.5
    assert torch.equal(role, torch.tensor(ARRANGEMENTS)[labels % 3])


def test_the_description_is_plain():
    shapes = Shapes(size=(64, 96), families=2, mixing=0.25)
    described = json.loads(json.dumps(shapes.describe()))
    assert described["size"] == [64, 96]
    assert (
        described["classes"] == list(shapes.classes) == [f"{name}-{n}" for name in ("amber", "teal") for n in (1, 2, 3)]
    )
    assert described["chance"] == pytest.approx(1 / 6)
    assert Shapes() == Shapes(part=16)
    assert Shapes(size=(64, 64)) == Shapes()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": 20}, "size must be .* 32 or more"),
        ({"size": (64, 8)}, "size must be"),
        ({"size": (64, 64, 3)}, "height, width"),
        ({"part": 40}, "part must be .* 8 to 32"),
        ({"part": 4}, "part must be"),
        ({"families": 9}, "families must be .* 1 to 8"),
        ({"families": 0}, "families"),
        ({"arrangements": 25}, "arrangements must be .* 1 to 24: got 25"),
        ({"mixing": 1.5}, "mixing must be .* 0 to 1: got 1.5"),
        ({"mixing": float("nan")}, "mixing"),
        ({"jitter": 2}, "jitter must be .* 0 to 1 "),
        ({"noise": 0.5}, "noise must be"),
        ({"seed": -1}, "seed"),
    ],
)
def test_impossible_options_say_what_is_possible(options, message):
    with pytest.raises(UserError, match=message):
        Shapes(**options)


def test_wrong_questions_are_refused():
    with pytest.raises(UserError, match="did you mean 'ordered'"):
        Shapes().best_accuracy("order")
    with pytest.raises(UserError, match="index must be"):
        Shapes().images(torch.tensor([-1]))
    assert Shapes().images(torch.empty(0, dtype=torch.int64))[0].shape == (0, 3, 64, 64)
