r"""Two models that calibrate the ruler: one that cannot see structure, and one that sees nothing else.

Both are fitted in closed form from the same statistic, the class-mean images cut into cells (`cells.py`), and differ in
one thing only: whether the cells keep their places.

* **Bag of patches**: the mean cells that tell classes apart become an unordered dictionary. Each patch of an image is
  its best-correlated word, or none when the correlation is below a threshold; with :math:`n_w` the number of patches
  that are word w, the logits are those of multinomial naive Bayes with a uniform prior and Laplace smoothing,
  :math:`\sum_w n_w \log \frac{N_{cw} + 1}{\sum_v N_{cv} + W}`, where :math:`N_{cw}` counts word w in the fitting images
  of class c and W is the number of words. Whole numbers from the pixels to the sum: permuting the patches changes no
  bit. It must read 0.
* **Rigid template**: each mean cell stays where it is. A class scores the *worst* correlation over the places that tell
  classes apart: every part must be in place. (With the mean instead, one part that a shuffle drops on its old place by
  luck would still give the class away.) A worst match below a floor is no match, the same for every class: otherwise
  the colours in a scrambled cell would hint at the class. An image that matches nothing has equal logits. It must
  read 1.

Neither is trained by gradients. Importing this module registers both with timm; ``pretrained=True`` fits them on the
generated set, in a second or two and without a download.
"""

from typing import Any, Self

import torch
from timm.models import generate_default_cfgs, register_model, resolve_pretrained_cfg
from torch import Tensor, nn

from spatially.data.shapes import Shapes
from spatially.errors import UserError
from spatially.models.cells import class_means, correlation, cut

SMALLEST_PATCH = 8  # pixels; smaller ones hold too little to be told apart
RECOGNISED = 0.8  # correlation from which a patch is a word; a part reads above 0.98, backgrounds below 0.7
SAME_WORD = 0.95  # correlation from which two mean cells are one word
_UNIT = 1 << 16  # log-likelihoods are whole multiples of 1 / _UNIT, so that their sums are exact
IN_PLACE = 0.5  # correlation below which a part is not in its place, however far below
_SHARPNESS = 20.0  # one class that matches at 0.98 while no other does has probability 0.999 among 12
_FITTING_FROM, _FITTING_IMAGES_A_CLASS = 10_000_000, 25  # far from the numbers that a test takes


class _Calibrator(nn.Module):
    """What the two share: names, checks, and buffers that take the shape of what is loaded into them."""

    fitted_buffer: str

    def __init__(self, *, num_classes: int, class_names: tuple[str, ...] = ()) -> None:
        super().__init__()
        if class_names and len(class_names) != num_classes:
            raise UserError(f"class_names must name {num_classes} classes: got {len(class_names)} names")
        self.num_classes = num_classes
        self.class_names = tuple(class_names)
        self.pretrained_cfg: dict[str, Any] = {}
        self.default_cfg = self.pretrained_cfg

    def _check(self, images: Tensor) -> None:
        name = type(self).__name__
        if not self.get_buffer(self.fitted_buffer).numel():
            raise UserError(
                f"{name} is not fitted: use {name}.fit(images, labels, ...), pretrained=True, or load a state_dict"
            )
        if images.ndim != 4 or images.shape[1] != 3 or not images.is_floating_point():
            raise UserError(f"images must be floats (B, 3, H, W) in 0..1: got {images.dtype} {tuple(images.shape)}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        for name, buffer in list(self.named_buffers(recurse=False)):
            stored = state_dict.get(prefix + name)
            if stored is not None and stored.shape != buffer.shape:
                setattr(self, name, torch.empty(stored.shape, dtype=buffer.dtype, device=buffer.device))
        super()._load_from_state_dict(state_dict, prefix, *rest)
        if (classes := len(self.get_buffer(self.fitted_buffer))) != self.num_classes and classes:
            self.num_classes, self.class_names = classes, ()


class BagOfPatches(_Calibrator):
    """Naive Bayes on the counts of visual words: exactly blind to where its patches are."""

    fitted_buffer = "log_likelihood"
    words: Tensor
    log_likelihood: Tensor

    def __init__(self, *, num_classes: int, patch: int, class_names: tuple[str, ...] = ()) -> None:
        super().__init__(num_classes=num_classes, class_names=class_names)
        self.register_buffer("words", torch.empty(0, 3, patch, patch, dtype=torch.uint8))
        self.register_buffer("log_likelihood", torch.empty(0, 0, dtype=torch.int32))

    @property
    def patch(self) -> int:
        """Side of a patch in pixels."""
        return self.words.shape[-1]

    @classmethod
    def fit(cls, images: Tensor, labels: Tensor, *, patch: int, class_names: tuple[str, ...] = ()) -> Self:
        """From labelled images, uint8 ``(N, 3, H, W)``: gather the words, then count them in each class.

        Fit on images with little or no mixing: means of very mixed classes are too alike to be told apart as words.
        """
        means = class_means(images, labels, cell=patch)
        model = cls(num_classes=len(means.cells), patch=patch, class_names=class_names).to(images.device)
        model.words = _distinct(means.cells[:, means.informative].flatten(0, 1))
        counts = torch.zeros(model.num_classes, len(model.words), dtype=torch.int64, device=images.device)
        for chunk, label in zip(images.split(64), labels.split(64), strict=True):
            counts.index_add_(0, label.to(images.device, torch.int64), model.count(chunk.float() / 255))
        share = (counts + 1).double() / (counts + 1).sum(1, keepdim=True)
        model.log_likelihood = (share.log() * _UNIT).round().to(torch.int32)
        return model

    def count(self, images: Tensor) -> Tensor:
        """How often each word occurs in each image: int64 ``(B, words)``."""
        levels = (images.detach().float() * 255).round().clamp(0, 255)
        patches = cut(levels, self.patch).flatten(3).flatten(1, 2).double()  # (B, patches, values)
        match, word = correlation(patches, self.words.flatten(1).double()).max(-1)
        counts = torch.zeros(len(images), len(self.words), dtype=torch.int64, device=images.device)
        return counts.scatter_add_(1, word, (match >= RECOGNISED).to(torch.int64))

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(B, classes)`` of images in 0..1; levels between multiples of 1/255 are rounded."""
        self._check(images)
        # Lower precision would lose the exactness that the invariance rests on.
        with torch.autocast(images.device.type, enabled=False):
            total = self.count(images).double() @ self.log_likelihood.double().mT
            return (total / _UNIT).to(torch.promote_types(images.dtype, torch.float32))


def _distinct(cells: Tensor) -> Tensor:
    """The cells ``(M, 3, p, p)`` without repetitions: one stays unless it resembles one that stayed before it."""
    alike = correlation(cells.flatten(1).double(), cells.flatten(1).double()) >= SAME_WORD
    kept: list[int] = []
    for candidate, row in enumerate(alike.tolist()):
        if not any(row[word] for word in kept):
            kept.append(candidate)
    return cells[kept]


class RigidTemplate(_Calibrator):
    """The worst match over the places that matter: blind to everything but parts in their places."""

    fitted_buffer = "cells"
    cells: Tensor
    informative: Tensor

    def __init__(self, *, num_classes: int, cell: int, class_names: tuple[str, ...] = ()) -> None:
        super().__init__(num_classes=num_classes, class_names=class_names)
        self.register_buffer("cells", torch.empty(0, 0, 0, 3, cell, cell, dtype=torch.uint8))
        self.register_buffer("informative", torch.empty(0, 0, dtype=torch.bool))

    @property
    def cell(self) -> int:
        """Side of a cell in pixels."""
        return self.cells.shape[-1]

    @classmethod
    def fit(cls, images: Tensor, labels: Tensor, *, cell: int, class_names: tuple[str, ...] = ()) -> Self:
        """From labelled images, uint8 ``(N, 3, H, W)``: the class means are the template."""
        means = class_means(images, labels, cell=cell)
        model = cls(num_classes=len(means.cells), cell=cell, class_names=class_names)
        model.cells, model.informative = means.cells, means.informative
        return model

    def forward(self, images: Tensor) -> Tensor:
        """Logits ``(B, classes)`` of images in 0..1 of the size fitted on."""
        self._check(images)
        grid = tuple(side // self.cell for side in images.shape[2:])
        if grid != self.informative.shape:
            rows, columns = (cells * self.cell for cells in self.informative.shape)
            raise UserError(f"images must be {rows} × {columns} as fitted: got {tuple(images.shape[2:])}")
        with torch.autocast(images.device.type, enabled=False):
            # Place by place: (places, B, values) with (places, classes, values).
            seen = cut(images.double() * 255, self.cell).flatten(3).flatten(1, 2).transpose(0, 1)
            kept = self.cells.flatten(3).flatten(1, 2).transpose(0, 1).double()
            match = correlation(seen, kept)
            worst = match.masked_fill(~self.informative.flatten()[:, None, None], torch.inf).amin(0)
            return (_SHARPNESS * worst.clamp(min=IN_PLACE)).to(torch.promote_types(images.dtype, torch.float32))


def _config(*, fixed_input_size: bool) -> dict[str, Any]:
    shapes = Shapes()
    return {
        "input_size": (3, shapes.height, shapes.width),
        "fixed_input_size": fixed_input_size,
        "mean": (0.0, 0.0, 0.0),
        "std": (1.0, 1.0, 1.0),
        "crop_pct": 1.0,
        "interpolation": "bilinear",
        "num_classes": len(shapes.classes),
        "label_names": shapes.classes,
        "first_conv": None,
        "classifier": None,
    }


default_cfgs = generate_default_cfgs(
    {
        "bag_of_patches.shapes": _config(fixed_input_size=False),
        "rigid_template.shapes": _config(fixed_input_size=True),
    }
)


def _build(
    variant: str,
    pretrained: bool,
    *,
    cell: int | None,
    img_size: int | tuple[int, int] | None = None,
    num_classes: int | None = None,
    in_chans: int = 3,
    pretrained_cfg: Any = None,
    pretrained_cfg_overlay: dict[str, Any] | None = None,
    cache_dir: Any = None,
) -> nn.Module:
    """A calibrator of the generated set, in timm's manner: fitted where timm would load weights."""
    config = resolve_pretrained_cfg(variant, pretrained_cfg, pretrained_cfg_overlay).to_dict()
    shapes = Shapes(size=tuple(config["input_size"][1:]) if img_size is None else img_size)
    classes = len(shapes.classes)
    if in_chans != 3 or (pretrained and num_classes not in (None, classes)):
        raise UserError(f"{variant} has 3 channels and {classes} classes: got {in_chans} and {num_classes}")
    names = shapes.classes if num_classes in (None, classes) else ()
    side = cell or (shapes.part if variant == "rigid_template" else max(SMALLEST_PATCH, shapes.part // 2))
    model: BagOfPatches | RigidTemplate
    if pretrained:
        numbers = torch.arange(_FITTING_FROM, _FITTING_FROM + _FITTING_IMAGES_A_CLASS * classes)
        images, labels = shapes.images(numbers)
        if variant == "bag_of_patches":
            model = BagOfPatches.fit(images, labels, patch=side, class_names=names)
        else:
            model = RigidTemplate.fit(images, labels, cell=side, class_names=names)
    elif variant == "bag_of_patches":
        model = BagOfPatches(num_classes=num_classes or classes, patch=side, class_names=names)
    else:
        model = RigidTemplate(num_classes=num_classes or classes, cell=side, class_names=names)
    config.update(input_size=(3, shapes.height, shapes.width), num_classes=model.num_classes, label_names=names)
    model.pretrained_cfg = model.default_cfg = config  # timm reads the one, older code the other
    return model


@register_model
def bag_of_patches(pretrained: bool = False, *, patch: int | None = None, **options: Any) -> nn.Module:
    """Bag of patches for the generated set of this ``img_size``; ``patch`` is half a part's side unless given."""
    return _build("bag_of_patches", pretrained, cell=patch, **options)


@register_model
def rigid_template(pretrained: bool = False, *, cell: int | None = None, **options: Any) -> nn.Module:
    """Rigid template for the generated set of this ``img_size``; ``cell`` is a part's side unless given."""
    return _build("rigid_template", pretrained, cell=cell, **options)
