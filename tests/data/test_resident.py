"""Crops that go to a GPU are those of the rows that were asked for, whichever way they go."""

import numpy as np
import pytest
import torch

from spatially.data import Images
from spatially.data.resident import gather


def images(count: int = 20) -> Images:
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, 6, 5), dtype=np.uint8)
    numbers = np.arange(count)
    return Images(pixels=pixels, labels=numbers % 3, index=numbers + 7, description="noise", fingerprint="noise")


@pytest.mark.parametrize("rows", [[3], [19, 0, 7, 7], []])
def test_gathering(rows, tmp_path):
    data = images()
    path = tmp_path / "pixels.npy"
    np.save(path, data.pixels)
    for pixels in (data.pixels, np.load(path, mmap_mode="r")):
        found = gather(pixels, np.array(rows, dtype=np.int64), locked=False)
        assert np.array_equal(found.numpy(), data.pixels[rows])


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_the_first_round_and_the_next():
    data = images()
    for _ in range(3):
        for rows in (np.arange(12), np.array([19, 12, 13, 14, 15, 16, 17, 18])):
            pixels, labels, index = data.batch(rows, "cuda")
            assert np.array_equal(pixels.cpu().numpy(), data.pixels[rows])
            assert labels.tolist() == (rows % 3).tolist()
            assert index.tolist() == (rows + 7).tolist()
