"""The convolved projection against sums over neighbours written out in float64."""

import pytest
import torch
import torch.nn.functional as F

from spatially.errors import UserError
from spatially.nn.conv_projection import PARTS, ConvProjection

DOUBLE = torch.float64


def neighbours(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """The definition: for each offset, a linear map of the point there, 0 outside the map."""
    size = weight.shape[-1]
    half, height, width = size // 2, x.shape[1], x.shape[2]
    padded = F.pad(x, (0, 0, half, half, half, half))
    result = bias.expand_as(x).clone()
    for row in range(size):
        for column in range(size):
            there = padded[:, row : row + height, column : column + width]
            kernel = weight[:, :, row, column]
            result += there * kernel[:, 0] if weight.shape[1] == 1 < x.shape[-1] else there @ kernel.T
    return result


@pytest.mark.parametrize("convolved", PARTS)
@pytest.mark.parametrize("depthwise", [False, True])
@pytest.mark.parametrize(("grid", "size"), [((2, 3), 3), ((5, 7), 3), ((1, 1), 3), ((6, 5), 5)])
def test_equals_the_sum_over_neighbours(convolved: str, depthwise: bool, grid: tuple[int, int], size: int) -> None:
    torch.manual_seed(0)
    dim = 12  # grids of fewer and of more points than channels: both ways to compute it
    layer = ConvProjection(dim, convolved=convolved, depthwise=depthwise, kernel_size=size, dtype=DOUBLE)
    x = torch.randn(2, *grid, dim, dtype=DOUBLE, requires_grad=True)
    parts = dict(zip(PARTS, layer(x), strict=True))
    weights = dict(layer.named_parameters())
    expected = {convolved: neighbours(x, weights[f"{convolved}.weight"], weights[f"{convolved}.bias"])}
    others = [part for part in PARTS if part != convolved]
    linear = zip(others, layer.linear.weight.chunk(2), layer.linear.bias.chunk(2), strict=True)
    expected |= {part: x @ weight.T + bias for part, weight, bias in linear}
    for part in PARTS:
        torch.testing.assert_close(parts[part], expected[part])
    loss, truth = (sum((part**2).sum() for part in values.values()) for values in (parts, expected))
    torch.testing.assert_close(torch.autograd.grad(loss, x), torch.autograd.grad(truth, x))


@pytest.mark.parametrize("convolved", PARTS)
def test_nothing_projects_to_the_biases(convolved: str) -> None:
    layer = ConvProjection(6, convolved=convolved)
    for part, bias in zip(layer(torch.zeros(1, 4, 4, 6)), layer.of_nothing(), strict=True):
        torch.testing.assert_close(part, bias.expand_as(part))
    assert ConvProjection(6, bias=False).of_nothing() is None


def test_maps_are_read_and_written_as_they_lie() -> None:
    """Channels last in, channels last out; the linear two are views of one tensor."""
    query, key, value = ConvProjection(4, convolved="key")(torch.randn(2, 8, 8, 4))
    assert key.is_contiguous()
    assert query.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()


def test_counts() -> None:
    def count(**options: object) -> int:
        return sum(weight.numel() for weight in ConvProjection(10, **options).parameters())

    assert count() == 2 * 10 * 11 + 10 * (10 * 9 + 1)
    assert count(depthwise=True) == 2 * 10 * 11 + 10 * (9 + 1)
    assert count(bias=False) == 2 * 10 * 10 + 10 * 10 * 9


@pytest.mark.parametrize("options", [{"convolved": "keys"}, *({"kernel_size": size} for size in (4, 3.5, True, "3"))])
def test_mistakes_are_named(options: dict) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        ConvProjection(4, **options)


@pytest.mark.parametrize("shape", [(5, 6, 4), (1, 5, 6, 3), (1, 1, 5, 6, 4)])
def test_maps_that_do_not_fit_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"x must be \(batch, height, width, 4\)"):
        ConvProjection(4)(torch.zeros(shape))
