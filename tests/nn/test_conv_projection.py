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


@pytest.mark.parametrize("convolved", PARTS)
def test_normalised_queries_and_keys_have_a_mean_square_of_one_in_each_head(convolved: str) -> None:
    torch.manual_seed(0)
    plain = ConvProjection(12, convolved=convolved, dtype=DOUBLE)
    normed = ConvProjection(12, convolved=convolved, normalised_heads=3, dtype=DOUBLE)
    normed.load_state_dict(plain.state_dict(), strict=False)  # the form is all that differs
    x = 100 * torch.randn(2, 4, 5, 12, dtype=DOUBLE)
    for part, raw, found in zip(PARTS, plain(x), normed(x), strict=True):
        heads = raw.view(2, 4, 5, 3, 4)
        expected = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        torch.testing.assert_close(found, raw if part == "value" else expected.flatten(-2), rtol=1e-12, atol=1e-12)
    query, key, _ = (part.unflatten(-1, (3, 4)) for part in normed(x))
    logits = torch.einsum("bijhd,bklhd->bhijkl", query, key) / 2
    assert logits.abs().max() <= 2  # the root of a head's size, however large the map is


@pytest.mark.parametrize("convolved", PARTS)
def test_what_is_no_point_of_the_map_is_not_normalised(convolved: str) -> None:
    """Its bias would have a gradient of up to 1 / √ε while it is 0."""
    normed = ConvProjection(12, convolved=convolved, normalised_heads=3, dtype=DOUBLE)
    plain = ConvProjection(12, convolved=convolved, dtype=DOUBLE)
    plain.load_state_dict(normed.state_dict(), strict=False)
    zeros = plain(torch.zeros(1, 1, 1, 12, dtype=DOUBLE))
    for part, alone in zip(zeros, normed.of_nothing(), strict=True):
        torch.testing.assert_close(part.flatten(), alone)


def test_weights_of_one_form_are_refused_by_the_other() -> None:
    plain, normed = ConvProjection(12), ConvProjection(12, normalised_heads=3)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*normalised_heads"):
        plain.load_state_dict(normed.state_dict())
    with pytest.raises(RuntimeError, match=r"Missing key.*normalised_heads"):
        normed.load_state_dict(plain.state_dict())
    assert sum(one.numel() for one in plain.parameters()) == sum(one.numel() for one in normed.parameters())


def test_normalised_keys_keep_their_precision_under_autocast() -> None:
    layer = ConvProjection(16, normalised_heads=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        packed, key = layer.packed(torch.randn(1, 4, 4, 16))
    assert packed.dtype == key.dtype == torch.bfloat16


def test_heads_that_do_not_divide_the_channels() -> None:
    with pytest.raises(UserError, match="normalised_heads must divide dim, 12: got 5"):
        ConvProjection(12, normalised_heads=5)
