"""Every kind of picture that people have, and every kind of broken one."""

import io
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from spatially.data.decode import BrokenImage, decode
from spatially.errors import UserError

RAMP = np.tile(np.arange(0, 256, 4, dtype=np.uint8), (48, 1))


def saved(image: Image.Image, **options: object) -> io.BytesIO:
    buffer = io.BytesIO()
    image.save(buffer, **options)
    buffer.seek(0)
    return buffer


def test_rgb_is_kept() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    assert np.array_equal(np.asarray(decode(saved(Image.fromarray(pixels), format="PNG"))), pixels)


def test_greyscale_becomes_three_equal_channels() -> None:
    pixels = np.asarray(decode(saved(Image.fromarray(RAMP), format="PNG")))
    assert np.array_equal(pixels, np.repeat(RAMP[:, :, None], 3, axis=2))


def test_sixteen_bits_are_scaled_not_cut() -> None:
    deep = Image.fromarray(RAMP.astype(np.uint16) * 257)
    pixels = np.asarray(decode(saved(deep, format="PNG")))
    assert np.array_equal(pixels, np.repeat(RAMP[:, :, None], 3, axis=2))


def test_cmyk_becomes_rgb() -> None:
    picture = decode(saved(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), format="JPEG", quality=100))
    assert picture.mode == "RGB"
    red, green, blue = np.asarray(picture).reshape(-1, 3).mean(0)
    assert red > 240
    assert max(green, blue) < 15


def test_alpha_is_dropped_and_colour_kept() -> None:
    picture = decode(saved(Image.new("RGBA", (8, 8), (200, 100, 50, 10)), format="PNG"))
    assert np.asarray(picture)[0, 0].tolist() == [200, 100, 50]
    palette = Image.new("P", (8, 8), 3)
    palette.putpalette([0, 0, 0] * 3 + [10, 20, 30] + [0] * 756)
    assert np.asarray(decode(saved(palette, format="PNG", transparency=0)))[0, 0].tolist() == [10, 20, 30]


def test_exif_orientation_is_followed() -> None:
    pixels = np.random.default_rng(1).integers(0, 256, (20, 30, 3), dtype=np.uint8)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be shown turned a quarter clockwise
    turned = decode(saved(Image.fromarray(pixels), format="PNG", exif=exif))
    assert np.array_equal(np.asarray(turned), np.rot90(pixels, -1))


def test_truncated_jpeg_is_broken() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    whole = saved(Image.fromarray(pixels), format="JPEG").getvalue()
    with pytest.raises(BrokenImage, match=r"(?i)truncated"):
        decode(io.BytesIO(whole[: len(whole) // 2]))


def test_text_named_png_is_broken(tmp_path: Path) -> None:
    path = tmp_path / "note.png"
    path.write_text("not a picture at all")
    with pytest.raises(BrokenImage, match="not an image"):
        decode(path)


def test_decompression_bomb_is_refused_before_it_goes_off() -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return len(body).to_bytes(4, "big") + kind + body + zlib.crc32(kind + body).to_bytes(4, "big")

    for side in (12_000, 60_000):  # Pillow warns of the first and refuses the second
        header = side.to_bytes(4, "big") * 2 + bytes([8, 0, 0, 0, 0])
        bomb = (
            b"\x89PNG\r\n\x1a\n"
            + chunk(b"IHDR", header)
            + chunk(b"IDAT", zlib.compress(b"\0" * 100))
            + chunk(b"IEND", b"")
        )
        with pytest.raises(BrokenImage, match="safe limit"):
            decode(io.BytesIO(bomb))


def test_floating_point_is_refused_with_advice() -> None:
    with pytest.raises(BrokenImage, match="8 or 16 bits"):
        decode(saved(Image.fromarray(np.ones((4, 4), np.float32)), format="TIFF"))


def test_missing_file_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no image"):
        decode(tmp_path / "none.jpg")
