"""Bytes to an RGB picture, whatever the camera or the scanner made of it."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from spatially.errors import UserError


class BrokenImage(ValueError):
    """A picture that cannot be decoded; the message says why."""


def decode(source: str | Path | IO[bytes] | Image.Image) -> Image.Image:
    """Decode to RGB: turned as its EXIF tag says, 16-bit greys scaled to 8, transparency dropped as timm does.

    Pictures with more pixels than Pillow holds safe are refused before they are decoded.
    """
    try:
        image = source if isinstance(source, Image.Image) else Image.open(source)
        limit = Image.MAX_IMAGE_PIXELS
        if limit is not None and image.width * image.height > limit:
            raise BrokenImage(f"{image.width}×{image.height} pixels are more than the safe limit of {limit:,}")
        return _rgb(ImageOps.exif_transpose(image))
    except UnidentifiedImageError:
        raise BrokenImage("not an image") from None
    except Image.DecompressionBombError:
        raise BrokenImage(f"more pixels than the safe limit of {Image.MAX_IMAGE_PIXELS:,}") from None
    except FileNotFoundError:
        raise UserError(f"there is no image {source}; check the path") from None
    except (OSError, SyntaxError, ValueError, EOFError) as error:
        # Pillow's decoders answer damaged files with any of these.
        raise BrokenImage(str(error) or type(error).__name__) from error


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode.startswith("I"):
        levels = np.asarray(image).astype(np.int64)
        if levels.size and (levels.min() < 0 or levels.max() > 65535):
            raise BrokenImage(f"grey levels {levels.min()}..{levels.max()} are outside 16 bits")
        return Image.fromarray((levels // 257).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise BrokenImage("a floating-point image has no agreed white; save it with 8 or 16 bits")
    if image.mode == "P" and "transparency" in image.info:
        image = image.convert("RGBA")
    return image.convert("RGB")
