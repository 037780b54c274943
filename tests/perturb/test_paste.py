"""The pasted picture against its parts, and the resize against torch's own."""

import pytest
import torch
import torch.nn.functional as F

from spatially.errors import UserError
from spatially.perturb import paste, shuffle_blocks
from spatially.perturb.paste import resize_exactly


@pytest.mark.parametrize("size", [(16, 16), (11, 23), (32, 40), (5, 3), (48, 60)])
def test_resize_agrees_with_antialiased_bilinear(size: tuple[int, int]) -> None:
    images = torch.rand(2, 3, 32, 40, dtype=torch.float64)
    expected = F.interpolate(images, size=size, mode="bilinear", antialias=True)
    assert (resize_exactly(images, size) - expected).abs().max() < 5e-4


def test_resize_keeps_constants_exactly() -> None:
    assert resize_exactly(torch.full((1, 3, 31, 17), 0.75), (9, 5)).unique().tolist() == [0.75]


def test_guest_lies_in_the_centre_of_the_shuffled_host() -> None:
    host, guest = torch.rand(3, 3, 64, 48), torch.rand(3, 3, 64, 48)
    pasted = paste(host, guest, block=16, index=[4, 5, 6], seed=1)
    shuffled = shuffle_blocks(host, block=16, ratio=1.0, index=[4, 5, 6], seed=1)
    assert torch.equal(pasted[:, :, 16:48, 12:36], resize_exactly(guest, (32, 24)))
    pasted[:, :, 16:48, 12:36] = shuffled[:, :, 16:48, 12:36]
    assert torch.equal(pasted, shuffled)


def test_same_bits_for_every_batch_size() -> None:
    host, guest = torch.rand(14, 3, 64, 64), torch.rand(14, 3, 64, 64)
    whole = paste(host, guest, block=16, index=range(14))
    single = [paste(host[i : i + 1], guest[i : i + 1], block=16, index=[i]) for i in range(14)]
    assert torch.equal(torch.cat(single), whole)


@pytest.mark.cuda
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_same_bits_on_cuda() -> None:
    host, guest = torch.rand(5, 3, 224, 224), torch.rand(5, 3, 224, 224)
    there = paste(host.cuda(), guest.cuda(), block=16, index=range(5), scale=0.37)
    assert torch.equal(there.cpu(), paste(host, guest, block=16, index=range(5), scale=0.37))


@pytest.mark.parametrize("scale", [0, 1.5, -1])
def test_scale_outside_is_named(scale: float) -> None:
    with pytest.raises(UserError, match="scale must lie"):
        paste(torch.rand(1, 3, 32, 32), torch.rand(1, 3, 32, 32), block=8, index=[0], scale=scale)


def test_unequal_batches_are_named() -> None:
    with pytest.raises(UserError, match="host and guest must match"):
        paste(torch.rand(2, 3, 32, 32), torch.rand(1, 3, 32, 32), block=8, index=[0, 1])
