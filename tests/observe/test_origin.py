"""Where the numbers of a tensor come from, after everything that vision models do to them, against index arithmetic."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spatially.observe.attention_trace import Follower
from spatially.observe.origin import IMAGE, Points

WEIGHT = torch.randn(6, 3, 3, 3)


def origin(compute: Callable[[Tensor], Tensor], size: tuple[int, int] = (8, 12)) -> Points:
    """Of a function of two images."""
    images = torch.rand(2, 3, *size)
    with Follower(nn.Identity(), images, []) as follower:
        result = compute(images)
        found = follower.find(result)
    assert found is not None
    assert found.shape == result.shape
    return found.points


def merge(x: Tensor) -> Tensor:
    x = x.permute(0, 2, 3, 1)
    return torch.cat([x[:, 0::2, 0::2], x[:, 1::2, 0::2], x[:, 0::2, 1::2], x[:, 1::2, 1::2]], -1)


def windows(x: Tensor) -> Tensor:
    x = torch.roll(x, (-1, -2), (2, 3))
    return x.view(2, 3, 2, 4, 3, 4).permute(0, 2, 4, 3, 5, 1).reshape(-1, 16, 3)


@pytest.mark.parametrize(
    ("compute", "row", "column"),
    [  # where the first image's last element comes from
        (lambda x: x, 7.5, 11.5),
        (lambda x: F.conv2d(x, WEIGHT, padding=1), 7.5, 11.5),
        (lambda x: F.conv2d(x, WEIGHT, padding=1, stride=2), 6.5, 10.5),
        (lambda x: F.conv2d(x, torch.randn(5, 3, 4, 4), stride=4), 6.0, 10.0),
        (lambda x: F.max_pool2d(x, 3, stride=2, padding=1), 6.5, 10.5),
        (lambda x: F.avg_pool2d(x, 2), 7.0, 11.0),
        (lambda x: F.adaptive_avg_pool2d(x, (4, 4)), 7.0, 10.5),
        (lambda x: F.conv2d(F.pad(x, (0, 1, 0, 1)), WEIGHT, stride=2), 7.5, 11.5),
        (lambda x: F.linear(merge(x), torch.randn(4, 12)), 7.0, 11.0),
        (lambda x: F.linear(x.flatten(2).transpose(1, 2), torch.randn(4, 3)), 7.5, 11.5),
        (lambda x: F.layer_norm(x + torch.ones(12), (12,)) * 2 + F.gelu(x).mean((2, 3), keepdim=True), 7.5, 11.5),
        (lambda x: torch.stack([x, -x]).unbind(0)[1].float().clone(), 7.5, 11.5),
        (lambda x: windows(x)[: windows(x).shape[0] // 2], 0.5, 1.5),
        (lambda x: torch.einsum("bchw,dc->bdhw", x, torch.randn(7, 3)), 7.5, 11.5),
        (lambda x: F.fold(F.unfold(x, 2, stride=2), (8, 12), 2, stride=2), 7.5, 11.5),
        (lambda x: F.linear(F.unfold(x, 3, padding=1).unflatten(1, (3, 9)).transpose(2, 3), torch.eye(9)), 7.0, 11.0),
        (lambda x: x.unflatten(2, (2, 4)).max(dim=2).values, 5.5, 11.5),
    ],
)
def test_where_things_come_from(compute, row, column):
    points = origin(compute)
    last = (0 if points.shape[0] == 2 else -1, *[-1] * (len(points.shape) - 1))
    assert float(points.row[last]) == pytest.approx(row)
    assert float(points.column[last]) == pytest.approx(column)
    assert float(points.row[0].flatten()[0] // IMAGE) == 0


def by_matrices(x: Tensor) -> Tensor:
    """A matrix of each place's own times the place's vector, as in lambda layers."""
    matrices = F.conv2d(x, torch.randn(12, 3, 1, 1)).flatten(2).mT.unflatten(2, (3, 4))
    return (x.flatten(2).mT.unsqueeze(-2) @ matrices).squeeze(-2)


def mixed_along_both_axes(x: Tensor) -> Tensor:
    """By matrices that were made of summaries of the image, as in bilinear attention, and added to the map."""
    down, across = (x.amax((2, 3), keepdim=True).expand(-1, -1, side, side) for side in x.shape[2:])
    return x + down.sigmoid() @ x @ across.sigmoid()


@pytest.mark.parametrize("compute", [by_matrices, mixed_along_both_axes])
def test_products_that_are_maps_are_no_weights(compute):
    images = torch.rand(2, 3, 8, 12)
    with Follower(nn.Identity(), images, []) as follower:
        found = follower.find(compute(images))
    assert found is not None
    assert found.key is None
    assert float(found.points.row.flatten(1)[0, -1]) == 7.5
    assert float(found.points.column.flatten(1)[0, -1]) == 11.5


def test_images_stay_apart():
    points = origin(windows)
    assert torch.equal(
        points.row // IMAGE, torch.arange(2.0).repeat_interleave(6)[:, None, None].expand(12, 16, 3).double()
    )


def test_tokens_and_padding_come_from_nowhere():
    token = nn.Parameter(torch.zeros(1, 1, 3))
    points = origin(lambda x: torch.cat([token.expand(2, -1, -1), x.flatten(2).mT], 1))
    assert points.row[:, 0].isnan().all()
    assert (points.column[:, 0] == 0).all()
    assert not points.row[:, 1:].isnan().any()
    points = origin(lambda x: F.pad(x, (0, 2, 0, 1)))
    assert points.row[:, :, 8:].isnan().all()
    assert points.column[:, :, :, 12:].isnan().all()
    assert not points.row[:, :, :8, :12].isnan().any()
    points = origin(lambda x: x.mean((2, 3)))  # of the whole image
    assert points.row.isnan().all()


def test_assignment():
    def put(x: Tensor) -> Tensor:
        whole = torch.zeros(2, 3, 10, 12)
        whole[:, :, 1:9] = x
        return whole

    points = origin(put)
    assert points.row[:, :, [0, 9]].isnan().all()
    assert points.row[0, 0, 1:9, 0].tolist() == [row + 0.5 for row in range(8)]


def test_axes_that_hold_one_number_take_no_memory():
    points = origin(lambda x: F.linear(x.flatten(2).mT, torch.randn(1000, 3)).unflatten(2, (2, 10, 50)))
    assert points.row.untyped_storage().nbytes() < 10_000
