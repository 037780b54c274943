r"""Generated images whose best accuracy is known: objects built of tiles, told apart by their parts or by their places.

An object is a 2 × 2 square of *parts*, opaque tiles on the grid that cuts the image from its top left corner. Each of G
families owns four parts, one a role; within a family M classes show the same four parts in different places, and in
nothing else. So one question splits in two: *which* parts (the family), and *where* (the arrangement).

With ``mixing`` q, the part of each role is replaced, with probability q, by the part of the same role of a family drawn
evenly. Each role then shows the true family with probability π = 1 − q + q/G and each other one with probability q/G,
independently. Let n = (n₁ … n_G) say how many of the four parts come from each family. The likelihood of family g is
π^{n_g} (q/G)^{4 − n_g}, which grows with n_g because π ≥ q/G: the best guess is the family seen most often, and a tie
among t families is won with probability 1/t. With family 1 the true one, the family is therefore found with probability

.. math:: F = \sum_{n_1 + … + n_G = 4} \frac{4!}{n_1! ⋯ n_G!} \, π^{n_1} (q/G)^{4 - n_1} \,
          \frac{[n_1 = \max_g n_g]}{\#\{g : n_g = \max_g n_g\}}.

* **ordered**: the four roles are always all there, so seeing which role lies where gives the arrangement away: F.
* **bag** of part-sized patches: it holds the same four roles whatever the arrangement, and a tile is opaque and looks
  the same in every place, so nothing in a patch tells where it was; one of M arrangements must be guessed: F / M.
* **chance**: 1 / (G M).

Every image is a pure function of (seed, index), in integers from the draws to the pixels: the same bits in every batch.
Parts and arrangements do not depend on the seed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from math import comb, cos, pi, prod, sin
from typing import Any, Literal

import torch
from torch import Tensor

from spatially.errors import UserError, unknown
from spatially.randomness import below, element_bits, normal, stream

ROLES = 4
SMALLEST_PART = 8
LARGEST_NOISE = 0.08  # up to here even parts of 8 pixels are always recognised
_CHUNK = 64 * 64 * 64  # pixels drawn at once: what fits a processor's cache is fastest
_FINE = 1 << 30  # resolution of the probability ``mixing``

Colour = tuple[int, int, int]

# Per family: the dark and the light ground of its tiles, its main colour and its accents on dark and on light.
PALETTES: dict[str, tuple[Colour, Colour, Colour, Colour, Colour]] = {
    "amber": ((66, 32, 6), (255, 238, 201), (246, 156, 12), (255, 222, 130), (176, 76, 6)),
    "teal": ((4, 50, 56), (207, 246, 238), (16, 176, 164), (160, 246, 226), (4, 98, 104)),
    "violet": ((42, 18, 84), (236, 226, 255), (136, 84, 244), (212, 184, 255), (76, 30, 168)),
    "rose": ((84, 8, 42), (255, 222, 232), (240, 62, 118), (255, 176, 200), (164, 14, 70)),
    "lime": ((30, 52, 4), (238, 252, 204), (132, 196, 22), (212, 248, 120), (72, 116, 8)),
    "azure": ((8, 32, 88), (216, 234, 255), (38, 124, 246), (156, 206, 255), (14, 62, 168)),
    "coral": ((78, 20, 12), (255, 228, 218), (250, 96, 66), (255, 190, 168), (170, 42, 22)),
    "slate": ((22, 28, 38), (234, 238, 244), (112, 128, 150), (198, 210, 226), (56, 68, 88)),
}

# Background colours in pairs, muted so that the tiles stand out; one pair and one clutter colour an image.
_GROUNDS: tuple[tuple[Colour, Colour], ...] = (
    ((196, 186, 168), (174, 162, 142)),
    ((168, 180, 162), (146, 160, 142)),
    ((166, 178, 190), (142, 156, 170)),
    ((188, 172, 180), (166, 150, 160)),
    ((150, 150, 158), (130, 130, 140)),
    ((190, 176, 150), (166, 150, 128)),
    ((160, 174, 176), (136, 152, 156)),
    ((178, 170, 190), (156, 146, 170)),
)
_CLUTTER: tuple[Colour, ...] = ((206, 200, 188), (128, 134, 128), (176, 150, 138), (134, 150, 166), (198, 192, 158))


# --- parts ----------------------------------------------------------------------------------------------------------


def _polygon(*corners: tuple[float, float]) -> Callable[[Tensor, Tensor], Tensor]:
    """Inside a closed polygon: an odd number of its edges crosses the ray to the right."""

    def inside(x: Tensor, y: Tensor) -> Tensor:
        odd = torch.zeros_like(x + y, dtype=torch.bool)
        for (x0, y0), (x1, y1) in pairwise((*corners, corners[0])):
            if y0 != y1:
                odd ^= ((y0 > y) != (y1 > y)) & (x < (x1 - x0) * (y - y0) / (y1 - y0) + x0)
        return odd

    return inside


def _regular(points: int, outer: float, inner: float) -> Callable[[Tensor, Tensor], Tensor]:
    """A star, its corners rounded to six digits: a library's last bit must not move a pixel."""
    angles = [pi * step / points for step in range(2 * points)]
    radii = [outer, inner] * points
    return _polygon(*((round(r * sin(a), 6), round(0.06 - r * cos(a), 6)) for a, r in zip(angles, radii, strict=True)))


_Region = Callable[[Tensor, Tensor], Tensor]

# Outlines on −1 … 1, x to the right and y down. Four a family; the families after the fourth take them again, turned.
_OUTLINES: tuple[_Region, ...] = (
    lambda x, y: x * x + y * y < 0.68,  # disc
    lambda x, y: (torch.minimum(x.abs(), y.abs()) < 0.28) & (torch.maximum(x.abs(), y.abs()) < 0.84),  # cross
    _polygon((0, -0.86), (0.9, 0.74), (-0.9, 0.74)),  # triangle
    lambda x, y: (x * x + y * y < 0.74) & (x * x + y * y > 0.16),  # ring
    lambda x, y: x.abs() + y.abs() < 0.92,  # diamond
    lambda x, y: (x * x + y * y < 0.74) & ((x - 0.34) ** 2 + (y + 0.2) ** 2 > 0.36),  # crescent
    _polygon((-0.84, 0.2), (0, -0.8), (0.84, 0.2), (0.84, 0.84), (0, 0.04), (-0.84, 0.84)),  # chevron
    lambda x, y: torch.maximum(y.abs(), 0.866 * x.abs() + 0.5 * y.abs()) < 0.78,  # hexagon
    _regular(5, 0.98, 0.42),  # star
    lambda x, y: (y.abs() < 0.8) & (x.abs() < 0.9 * y.abs() + 0.1),  # hourglass
    lambda x, y: torch.minimum((x.abs() - 0.42) ** 2 + y * y, x * x + (y.abs() - 0.42) ** 2) < 0.19,  # clover
    lambda x, y: (torch.maximum(x.abs(), y.abs()) < 0.8) & (torch.maximum(x.abs(), y.abs()) > 0.36),  # frame
    lambda x, y: (1.5 * x * x + (1.2 * y - 0.06) ** 2 - 0.62) ** 3 + 1.7 * x * x * (1.2 * y - 0.06) ** 3 < 0,  # heart
    lambda x, y: ((x.abs() - y.abs()).abs() < 0.36) & (torch.maximum(x.abs(), y.abs()) < 0.82),  # saltire
    _polygon((-0.86, -0.28), (0, -0.28), (0, -0.8), (0.9, 0), (0, 0.8), (0, 0.28), (-0.86, 0.28)),  # arrow
    lambda x, y: (x * x + (y + 0.42) ** 2 < 0.78) & (y > -0.42),  # bowl
)


def _stripes(across: float, down: float) -> _Region:
    return lambda x, y: torch.floor(across * x + down * y) % 2 == 0


# Two-colour textures; the families take them in an order of their own.
_TEXTURES: tuple[_Region, ...] = (
    _stripes(1.9, 1.9),
    lambda x, y: ((2 * x) % 1 - 0.5) ** 2 + ((2 * y) % 1 - 0.5) ** 2 < 0.09,  # dots
    _stripes(0.0, 2.5),
    lambda x, y: (torch.floor(2 * x) + torch.floor(2 * y)) % 2 == 0,  # checks
    _stripes(1.9, -1.9),
    lambda x, y: torch.floor(3.2 * torch.sqrt(x * x + y * y)) % 2 == 0,  # rings
    _stripes(2.5, 0.0),
    lambda x, y: x * y > 0,  # quarters
)


def _share(mask: Tensor, part: int) -> Tensor:
    """Of 8 × 8 samples a pixel, how many lie inside: int64 ``(part, part)``, 0 … 64."""
    return mask.view(part, 8, part, 8).sum((1, 3))


def _blend(under: Tensor, over: Tensor, share: Tensor) -> Tensor:
    return under + (((over - under) * share + 32) >> 6)


@cache
def _parts(part: int) -> Tensor:
    """Every family's four tiles, int16 ``(families, 4, 3, part, part)``, in turn light on dark and dark on light."""
    axis = (2 * torch.arange(8 * part, dtype=torch.float64) + 1) / (8 * part) - 1
    x, y = axis[None, :].expand(8 * part, -1), axis[:, None].expand(-1, 8 * part)
    tiles = torch.empty(len(PALETTES), ROLES, 3, part, part, dtype=torch.int16)
    for family, palette in enumerate(PALETTES.values()):
        dark, light, main, bright, deep = (torch.tensor(colour)[:, None, None] for colour in palette)
        for role in range(ROLES):
            again = family >= len(_OUTLINES) // ROLES
            across, down = (-y, x) if again else (x, y)
            outline = _OUTLINES[(family * ROLES + role) % len(_OUTLINES)](across, down)
            texture = _TEXTURES[(3 * family + 2 * role + role // 2 + again) % len(_TEXTURES)](across, down)
            ground, accent = (dark, bright) if (role % 2 == 0) != again else (light, deep)
            inside = _share(outline, part)
            # The texture's share of the inside, so that a border pixel mixes the ground with the colour it borders on.
            accented = _share(texture & outline, part) * 64 // inside.clamp(min=1)
            fill = _blend(main, accent, accented)
            tiles[family, role] = _blend(ground, fill, inside).to(torch.int16)
    return tiles


def _arrangements() -> tuple[tuple[int, ...], ...]:
    """Which role lies in which slot (slots in reading order), for up to 24 arrangements.

    Four quarter turns of one circular order, then of the next: within each block of four no part keeps its slot (a
    Latin square). The three orders that are mirror images of the first three come last, so that up to 12 arrangements
    no class has its parts where another one seen in a mirror has them, and flipping images does no harm.
    """
    clockwise = (0, 1, 3, 2)
    orders = ((0, 1, 2, 3), (0, 2, 3, 1), (0, 3, 1, 2), (0, 3, 2, 1), (0, 1, 3, 2), (0, 2, 1, 3))
    rows = []
    for order in orders:
        for turn in range(ROLES):
            slots = [0] * ROLES
            for step, slot in enumerate(clockwise):
                slots[slot] = order[(step - turn) % ROLES]
            rows.append(tuple(slots))
    return tuple(rows)


ARRANGEMENTS = _arrangements()


# --- background -----------------------------------------------------------------------------------------------------


def _smooth(side: int, nodes: int, purpose: str) -> Tensor:
    """Value noise on a torus, int64 ``(side, side)``, 0 … 255: random nodes, joined by 3t² − 2t³ in integers."""
    values = below(element_bits(stream(0, "shapes", purpose), torch.zeros(1, dtype=torch.int64), nodes**2), 256)
    values = values.view(nodes, nodes)
    position = torch.arange(side) * nodes * 64 // side
    node, t = position // 64, position % 64
    weight = t * t * (192 - 2 * t) // 1024  # 0 … 255
    following = (node + 1) % nodes
    rows = values[node] * (256 - weight[:, None]) + values[following] * weight[:, None]
    return (rows[:, node] * (256 - weight) + rows[:, following] * weight) >> 16


def _wave(phase: Tensor) -> Tensor:
    """A triangle wave of period 512, 0 … 256."""
    return (phase % 512 - 256).abs()


@cache
def _grounds(part: int) -> Tensor:
    """Six background textures on a torus of 8 parts, int16 ``(6, side, side)``, 0 … 64."""
    side = 8 * part
    row, column = torch.arange(side)[:, None], torch.arange(side)[None, :]
    turns = 512 * 16  # sixteen periods a side: two a part
    low, middle, high = (_smooth(side, nodes, f"noise {nodes}") for nodes in (4, 8, 24))
    textures = (
        (2 * middle + high) // 3,  # clouds
        _wave(middle * 10 + low * 4),  # contour lines
        _wave(row * turns // side + low * 6),  # ripples
        (_wave(row * 2 * turns // side) + _wave(column * 2 * turns // side) + middle) // 3,  # linen
        _wave((row + column) * turns // side + low * 4),  # slanted ripples
        (_wave(low * 16 + high) + high) // 2,  # marble
    )
    return torch.stack([texture.clamp(0, 255) // 4 for texture in textures]).to(torch.int16)


@cache
def _clutter(part: int) -> Tensor:
    """Scattered pebbles, rings and dashes on the same torus, int16 ``(4, side, side)``, 0 … 64; much smaller than parts."""
    side, pieces = 8 * part, 56
    axis = torch.arange(side, dtype=torch.float64)
    fields = []
    for field in range(4):
        drawn = torch.zeros(side, side, dtype=torch.float64)
        bits = element_bits(stream(0, "shapes", "clutter"), torch.tensor([field]), 4 * pieces)
        places = below(bits, 1 << 16).view(pieces, 4).tolist()
        for down, across, size, kind in places:
            y, x = ((axis - place * side / 65536 + side / 2) % side - side / 2 for place in (down, across))
            radius = part * (0.09 + 0.07 * size / 65536)
            if kind % 3 == 2:  # a dash lies along one of four directions
                a, b = ((1, 0), (0, 1), (0.7071, 0.7071), (0.7071, -0.7071))[kind % 4]
                along, aside = a * x + b * y[:, None], a * y[:, None] - b * x
                distance = torch.maximum(along.abs() - 1.5 * radius, aside.abs() - 0.4 * radius)
            else:
                distance = torch.sqrt(x * x + y[:, None] ** 2) - radius
                if kind % 3 == 1:  # a ring
                    distance = (distance + 0.2 * radius).abs() - 0.3 * radius
            drawn = torch.maximum(drawn, (0.5 - distance).clamp(0, 1))
        fields.append((drawn * 64).round())
    return torch.stack(fields).to(torch.int16)


def _crop(bank: Tensor, bits: Tensor, height: int, width: int) -> Tensor:
    """One texture an image, from a place and in a direction of its own: ``(B, height, width)`` from bits ``(B, 5)``."""
    kinds, side, _ = bank.shape
    kind = below(bits[:, 0], kinds)
    top, left = below(bits[:, 1], side), below(bits[:, 2], side)
    down, right = 1 - 2 * below(bits[:, 3], 2), 1 - 2 * below(bits[:, 4], 2)
    rows = (top[:, None] + down[:, None] * torch.arange(height)) % side + side * kind[:, None]
    columns = (left[:, None] + right[:, None] * torch.arange(width)) % side
    return bank.reshape(-1).take(rows[:, :, None] * side + columns[:, None, :])


# --- the set --------------------------------------------------------------------------------------------------------


def _compositions(total: int, places: int) -> Iterator[tuple[int, ...]]:
    """Every way to write ``total`` as an ordered sum of ``places`` numbers."""
    if places == 1:
        yield (total,)
        return
    for first in range(total + 1):
        for rest in _compositions(total - first, places - 1):
            yield (first, *rest)


def _whole(name: str, value: object, low: int, high: int | None = None, *, why: str = "") -> None:
    """Check that a whole number lies in its range."""
    if not isinstance(value, int) or isinstance(value, bool) or value < low or (high is not None and value > high):
        allowed = f"{low} or more" if high is None else f"{low} to {high}"
        raise UserError(f"{name} must be a whole number, {allowed}{why}: got {value!r}")


@dataclass(frozen=True, kw_only=True)
class Shapes:
    """An endless, labelled set of generated images; see the module's text for what is in them.

    Args:
        size: side of the images in pixels, or (height, width).
        part: side of a part in pixels; by default a quarter of the shorter side.
        families: number of families G, each with its own four parts.
        arrangements: number of classes M in a family.
        mixing: probability q that a part is replaced by the part of its role of a family drawn evenly.
        jitter: the object lies up to so many whole cells off its place, each way.
        noise: standard deviation of the pixel noise, on the scale 0..1; contrast changes by up to 4 and brightness by
            up to 2 times as much, per image.
        seed: another seed gives other images of the same classes.

    >>> shapes = Shapes(families=2, arrangements=3)
    >>> shapes.classes
    ('amber-1', 'amber-2', 'amber-3', 'teal-1', 'teal-2', 'teal-3')
    >>> images, labels = shapes.images(torch.arange(8))
    >>> images.shape, labels.tolist()
    (torch.Size([8, 3, 64, 64]), [0, 1, 2, 3, 4, 5, 0, 1])
    >>> round(shapes.best_accuracy("bag"), 4), shapes.best_accuracy("ordered")
    (0.3333, 1.0)
    """

    size: int | tuple[int, int] = 64
    part: int = None  # type: ignore[assignment]  # an int once made: the default depends on the size
    families: int = 4
    arrangements: int = 3
    mixing: float = 0.0
    jitter: int = 0
    noise: float = 0.03
    seed: int = 0

    def __post_init__(self) -> None:
        size = (self.size, self.size) if isinstance(self.size, int) else tuple(self.size)
        if len(size) != 2:
            raise UserError(f"size must be a whole number or (height, width): got {self.size!r}")
        for side in size:
            _whole("size", side, 2 * SMALLEST_PART)
        if self.part is None:
            _whole(
                "size", min(size), 4 * SMALLEST_PART, why=f" (four parts of {SMALLEST_PART} pixels, unless part says)"
            )
            object.__setattr__(self, "part", min(size) // 4)
        object.__setattr__(self, "size", size[0] if size[0] == size[1] else size)
        _whole("part", self.part, SMALLEST_PART, min(size) // 2, why=f" (two must fit into size {self.size})")
        _whole("families", self.families, 1, len(PALETTES))
        _whole("arrangements", self.arrangements, 1, len(ARRANGEMENTS))
        room = min((side // self.part - 2) // 2 for side in size)
        _whole("jitter", self.jitter, 0, room, why=f" (the room around the object, size {self.size}, part {self.part})")
        _whole("seed", self.seed, 0)
        for name, high in (("mixing", 1.0), ("noise", LARGEST_NOISE)):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 <= value <= high:
                raise UserError(f"{name} must be a number from 0 to {high:g}: got {value!r}")

    @property
    def height(self) -> int:
        return self.size if isinstance(self.size, int) else self.size[0]

    @property
    def width(self) -> int:
        return self.size if isinstance(self.size, int) else self.size[1]

    @property
    def origin(self) -> tuple[int, int]:
        """Row and column, in cells, of the object's upper left part when nothing moves it."""
        return (self.height // self.part - 2) // 2, (self.width // self.part - 2) // 2

    @property
    def family_names(self) -> tuple[str, ...]:
        return tuple(PALETTES)[: self.families]

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes' names: the family and the number of its arrangement."""
        return tuple(f"{name}-{place + 1}" for name in self.family_names for place in range(self.arrangements))

    @property
    def chance(self) -> float:
        """Accuracy of guessing: 1 / (G M)."""
        return 1 / (self.families * self.arrangements)

    def best_accuracy(self, sees: Literal["bag", "ordered"]) -> float:
        """The highest accuracy any model can reach that sees a bag of parts, or the parts in their places."""
        if sees not in ("bag", "ordered"):
            raise unknown("sees", str(sees), ("bag", "ordered"))
        other = self.mixing / self.families
        true = 1 - self.mixing + other
        found = 0.0
        for counts in _compositions(ROLES, self.families):
            if counts[0] == max(counts):
                ways = prod(comb(sum(counts[: place + 1]), count) for place, count in enumerate(counts))
                found += ways * true ** counts[0] * other ** (ROLES - counts[0]) / counts.count(max(counts))
        return found / self.arrangements if sees == "bag" else found

    def parts(self) -> Tensor:
        """The tiles, without noise: uint8 ``(families, 4, 3, part, part)``."""
        return _parts(self.part)[: self.families].to(torch.uint8)

    def images(self, index: Tensor) -> tuple[Tensor, Tensor]:
        """The images of these numbers, uint8 ``(B, 3, H, W)``, and their labels, int64 ``(B,)``."""
        if index.ndim != 1 or index.is_floating_point() or bool((index < 0).any()):
            raise UserError(f"index must be a vector of whole numbers, 0 or more: got {index!r}")
        index = index.to("cpu", torch.int64)
        step = max(1, _CHUNK // (self.height * self.width))
        chunks = [self._draw(chunk) for chunk in index.split(step)] if len(index) else []
        empty = torch.empty(0, 3, self.height, self.width, dtype=torch.uint8)
        return torch.cat(chunks) if chunks else empty, index % (self.families * self.arrangements)

    def describe(self) -> dict[str, Any]:
        """The set in plain numbers and words, for a result's record."""
        return {
            "name": "shapes",
            "size": [self.height, self.width],
            "part": self.part,
            "families": list(self.family_names),
            "arrangements": [list(row) for row in ARRANGEMENTS[: self.arrangements]],
            "classes": list(self.classes),
            "mixing": float(self.mixing),
            "jitter": self.jitter,
            "noise": float(self.noise),
            "seed": self.seed,
            "chance": self.chance,
            "best_accuracy": {"bag": self.best_accuracy("bag"), "ordered": self.best_accuracy("ordered")},
        }

    def _bits(self, purpose: str, index: Tensor, count: int) -> Tensor:
        return element_bits(stream(self.seed, "shapes", purpose), index, count)

    def _draw(self, index: Tensor) -> Tensor:
        canvas = self._background(index)
        self._place_object(canvas, index)
        return self._nuisance(canvas, index)

    def _background(self, index: Tensor) -> Tensor:
        """Two muted colours blended by a texture, with clutter on top; int16 ``(B, 3, H, W)``. It knows no class."""
        bits = self._bits("background", index, 15)
        pair = torch.tensor(_GROUNDS)[below(bits[:, 0], len(_GROUNDS))]
        tint = below(bits[:, 1:4], 25) - 12
        first, second = ((pair[:, end] + tint).to(torch.int16)[:, :, None, None] for end in (0, 1))
        small = torch.tensor(_CLUTTER)[below(bits[:, 4], len(_CLUTTER))].to(torch.int16)[:, :, None, None]
        ground = _crop(_grounds(self.part), bits[:, 5:10], self.height, self.width)[:, None]
        clutter = _crop(_clutter(self.part), bits[:, 10:15], self.height, self.width)[:, None]
        canvas = ((second - first) * ground >> 6) + first
        return canvas + ((small - canvas) * clutter >> 6)

    def _place_object(self, canvas: Tensor, index: Tensor) -> None:
        part, batch = self.part, torch.arange(len(index))
        label = index % (self.families * self.arrangements)
        roles = torch.tensor(ARRANGEMENTS)[label % self.arrangements]  # (B, slots)
        bits = self._bits("mixing", index, 2 * ROLES)
        mixed = below(bits[:, :ROLES], _FINE) < round(self.mixing * _FINE)
        family = torch.where(mixed, below(bits[:, ROLES:], self.families), label[:, None] // self.arrangements)
        moved = below(self._bits("jitter", index, 2), 2 * self.jitter + 1) - self.jitter
        rows, columns = self.height // part, self.width // part
        covered = canvas[:, :, : rows * part, : columns * part]
        cells = covered.unflatten(3, (columns, part)).unflatten(
            2, (rows, part)
        )  # a view: (B, 3, rows, part, columns, part)
        tiles = _parts(part)
        for slot in range(ROLES):
            role = roles[:, slot]
            row, column = self.origin[0] + moved[:, 0] + slot // 2, self.origin[1] + moved[:, 1] + slot % 2
            cells[batch, :, row, :, column, :] = tiles[family[batch, role], role]

    def _nuisance(self, canvas: Tensor, index: Tensor) -> Tensor:
        if self.noise:
            bits = self._bits("nuisance", index, 2)
            contrast, brightness = (round(self.noise * scale) for scale in (4 * 128, 2 * 256))
            factor = below(bits[:, 0], 2 * contrast + 1) + (128 - contrast)
            shift = below(bits[:, 1], 2 * brightness + 1) - brightness
            noise = normal(stream(self.seed, "shapes", "noise"), index, (3, self.height, self.width))
            noise = noise.mul_(self.noise * 255).round_().to(torch.int16)
            canvas = (canvas - 128).mul_(factor.to(torch.int16)[:, None, None, None]) >> 7
            canvas += noise.add_((shift + 128).to(torch.int16)[:, None, None, None])
        return canvas.clamp_(0, 255).to(torch.uint8)
