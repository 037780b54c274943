"""Cue-conflict images (Geirhos et al. 2019) in the layout in which they are published.

``FOLDER/cat/cat1-elephant2.png`` has the shape of a cat and the texture of an elephant: one folder for each of the sixteen
shapes, and in a file's name the shape, then the texture, each with a number. Where both are the same there is no conflict.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from spatially.errors import NotApplicable, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from spatially.data.images import Images

_NAME = re.compile(r"([a-z]+)\d+-([a-z]+)\d+", re.IGNORECASE)
LAYOUT = "a folder for each of {classes} with files such as cat1-elephant2.png (shape, then texture)"


def textures(images: Images, classes: Sequence[str]) -> NDArray[np.int64]:
    """The texture of every image, as a number among ``classes``; shapes are the labels.

    ``NotApplicable`` for images that are something else, a ``UserError`` for a layout that is broken.
    """
    names = images.names(np.arange(len(images)))
    parsed = [_NAME.fullmatch(PurePath(name).stem) for name in names or ()]
    expected = LAYOUT.format(classes=", ".join(classes))
    if not names or not any(parsed) or not set(images.classes or ()) & set(classes):
        raise NotApplicable(f"{images.description} holds no cue-conflict images: {expected}")
    missing = [name for name in classes if name not in (images.classes or ())]
    extra = [name for name in images.classes or () if name not in classes]
    if missing or extra:
        said = [f"lacks {', '.join(missing)}"] * bool(missing) + [f"has {', '.join(extra)} besides"] * bool(extra)
        raise UserError(f"{images.description} {' and '.join(said)}; expected is {expected}")
    number = {name: position for position, name in enumerate(classes)}
    found = []
    for name, match in zip(names, parsed, strict=True):
        shape, texture = (match[1].lower(), match[2].lower()) if match else ("", "")
        if shape != PurePath(name).parts[0] or texture not in number:
            raise UserError(
                f"{name} in {images.description} does not name its folder's shape and a texture: {expected}"
            )
        found.append(number[texture])
    return np.array(found, np.int64)
