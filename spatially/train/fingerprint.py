"""A short description of some images of a source, the same on every machine that holds the same set."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from PIL import Image

from spatially.data.parquet import Shards
from spatially.data.sources import Folder, Stream
from spatially.train.sources import Part, Pictures, labels_of

_SAMPLE = 32


def fingerprint(part: Part) -> str:
    """How many images, and a checksum of their numbers and labels and of some images' names and bytes.

    Not of the files' dates, which a copy of the set changes, and not of every file, which would take as long as an epoch.
    """
    source, numbers = part.source, part.numbers
    digest = blake2b(numbers.tobytes(), digest_size=8)
    if isinstance(source, Folder | Shards | Pictures):
        digest.update(labels_of(source)[numbers].tobytes())
    if not isinstance(source, Stream):  # which can be read only once
        for place in np.linspace(0, len(part) - 1, min(_SAMPLE, len(part))).astype(int).tolist():
            digest.update(_content(part, int(numbers[place])))
    return f"{len(part)} images {digest.hexdigest()}"


def _content(part: Part, number: int) -> bytes:
    """An image's name, label and bytes as its source holds them; its name alone where it cannot be read."""
    name = part.source.name(number).encode(errors="surrogateescape")
    try:
        image, label = part.source.read(number)
        with image:
            content = image.tobytes() if isinstance(image, Image.Image) else image.read()
    except (OSError, SyntaxError):  # whoever decodes it will say what is wrong
        return name
    return name + str(label).encode() + content
