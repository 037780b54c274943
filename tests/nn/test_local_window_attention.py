"""Attention in windows against loops over every window, head and pair, in float64."""

import pytest
import torch
from torch import Tensor

from spatially.errors import UserError
from spatially.nn.local_window_attention import LocalWindowAttention


def by_loops(layer: LocalWindowAttention, maps: Tensor) -> Tensor:
    """The formula, one query at a time; keys are the positions of the map in the query's window and no others."""
    height, width = maps.shape[-2:]
    window, heads, size = layer.window, layer.heads, layer.head_dim
    projected = torch.einsum("oc,bchw->bohw", layer.qkv.weight, maps)
    queries, keys, values = projected.unflatten(1, (3, heads, size)).unbind(1)
    mixed = torch.zeros_like(queries)
    for y in range(height):
        for x in range(width):
            top, left = y // window * window, x // window * window
            seen = [
                (row, column)
                for row in range(top, min(top + window, height))
                for column in range(left, min(left + window, width))
            ]
            for head in range(heads):
                logits = torch.stack(
                    [
                        (queries[:, head, :, y, x] * keys[:, head, :, row, column]).sum(-1) / size**0.5
                        + layer.position_table[row - y + window - 1, column - x + window - 1]
                        for row, column in seen
                    ],
                    dim=-1,
                )
                weights = logits.exp() / logits.exp().sum(-1, keepdim=True)
                for number, (row, column) in enumerate(seen):
                    mixed[:, head, :, y, x] += weights[:, number, None] * values[:, head, :, row, column]
    return torch.einsum("oc,bchw->bohw", layer.proj.weight, mixed.flatten(1, 2)) + layer.proj.bias[:, None, None]


def layer_of(window: int) -> LocalWindowAttention:
    torch.manual_seed(0)
    layer = LocalWindowAttention(6, 5, heads=2, head_dim=4, window=window, dtype=torch.float64)
    torch.nn.init.normal_(layer.position_table)
    return layer.requires_grad_(False)


@pytest.mark.parametrize(
    ("window", "grid"),
    [(7, (7, 14)), (3, (6, 6)), (3, (7, 5)), (4, (9, 3)), (7, (3, 4)), (7, (1, 8)), (1, (2, 3)), (5, (10, 6))],
)
def test_equals_the_loops(window: int, grid: tuple[int, int]) -> None:
    layer = layer_of(window)
    maps = torch.randn(2, 6, *grid, dtype=torch.float64)
    torch.testing.assert_close(layer(maps), by_loops(layer, maps), rtol=1e-10, atol=1e-12)


def test_a_partial_window_equals_a_map_that_ends_there() -> None:
    layer = layer_of(4)
    maps = torch.randn(1, 6, 7, 6, dtype=torch.float64)
    whole = layer(maps)
    torch.testing.assert_close(whole[..., 4:, 4:], layer(maps[..., 4:, 4:]))
    torch.testing.assert_close(whole[..., :4, :4], layer(maps[..., :4, :4]))


def test_gradients_reach_the_table_and_stay_in_the_window() -> None:
    layer = layer_of(3).requires_grad_()
    maps = torch.randn(1, 6, 5, 5, dtype=torch.float64, requires_grad=True)
    layer(maps)[0, :, 4, 4].sum().backward()
    assert maps.grad is not None
    assert layer.position_table.grad is not None
    assert maps.grad.abs().sum((0, 1)).nonzero().tolist() == [[3, 3], [3, 4], [4, 3], [4, 4]]
    # The query (4, 4) sees keys at offsets -1 and 0: entries 1 and 2 of 0 … 4.
    assert layer.position_table.grad.nonzero().tolist() == [[1, 1], [1, 2], [2, 1], [2, 2]]


def test_second_derivatives() -> None:
    layer = LocalWindowAttention(3, heads=1, head_dim=2, window=2, dtype=torch.float64)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert torch.autograd.gradgradcheck(layer, torch.randn(1, 3, 3, 2, dtype=torch.float64, requires_grad=True))


@pytest.mark.parametrize("options", [{"window": 0}, {"heads": 0}, {"head_dim": 1.5}])
def test_mistakes_are_named(options: dict[str, int]) -> None:
    with pytest.raises(UserError, match=next(iter(options))):
        LocalWindowAttention(4, **options)


@pytest.mark.parametrize("shape", [(4, 5, 6), (1, 3, 5, 6)])
def test_maps_that_do_not_fit_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match=r"maps must be \(batch, 4, height, width\)"):
        LocalWindowAttention(4)(torch.zeros(shape))


def test_no_maps() -> None:
    assert LocalWindowAttention(4, window=3)(torch.zeros(0, 4, 5, 6)).shape == (0, 4, 5, 6)
