"""The pool against timm's, a plain loop, and its own dense form."""

import pytest
import torch
from timm.models.pit import Pooling
from torch import Tensor

from spatially.errors import UserError
from spatially.nn.token_pool import TokenPool, pool_steps, token_map


def tokens(prefix: int, grid: tuple[int, int], width: int = 3) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randn(2, prefix + grid[0] * grid[1], width, dtype=torch.float64, generator=generator)


@pytest.mark.parametrize("prefix", [1, 2])
@pytest.mark.parametrize("grid", [(6, 6), (7, 4), (1, 1)])
def test_equals_timm(prefix: int, grid: tuple[int, int]) -> None:
    ours, theirs = TokenPool(3, 6, dtype=torch.float64), Pooling(3, 6, stride=2, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    given = tokens(prefix, grid)
    pooled, new_grid = ours(given, grid)
    spatial, classes = theirs(given[:, prefix:].mT.reshape(2, 3, *grid), given[:, :prefix])
    assert new_grid == tuple(spatial.shape[-2:]) == (-(-grid[0] // 2), -(-grid[1] // 2))
    torch.testing.assert_close(pooled, torch.cat((classes, spatial.flatten(2).mT), dim=1))


@pytest.mark.parametrize(("stride", "dilation"), [(2, 1), (1, 1), (1, 2), (2, 2)])
def test_formula(stride: int, dilation: int) -> None:
    pool, grid = TokenPool(3, 6, stride=stride, dilation=dilation, dtype=torch.float64), (5, 7)
    given = token_map(tokens(0, grid), grid)
    pooled = token_map(*pool(tokens(0, grid), grid))
    for out in range(6):
        for row in range(pooled.shape[2]):
            for column in range(pooled.shape[3]):
                value = pool.conv.bias[out].expand(2)
                for u in (-1, 0, 1):
                    for v in (-1, 0, 1):
                        y, x = stride * row + dilation * u, stride * column + dilation * v
                        if 0 <= y < grid[0] and 0 <= x < grid[1]:
                            value = value + pool.conv.weight[out, 0, u + 1, v + 1] * given[:, out // 2, y, x]
                torch.testing.assert_close(pooled[:, out, row, column], value)


@pytest.mark.parametrize("grid", [(9, 8), (11, 13), (2, 3)])
@pytest.mark.parametrize("output_stride", [8, 16])
def test_dense_pools_hold_the_strided_values(grid: tuple[int, int], output_stride: int) -> None:
    def chain(target: int) -> Tensor:
        values, size = tokens(1, grid), grid
        for (width, weights), (stride, dilation) in zip(
            trained.items(), pool_steps(2, first=8, output_stride=target), strict=True
        ):
            pool = TokenPool(width, 2 * width, stride=stride, dilation=dilation, dtype=torch.float64)
            pool.load_state_dict(weights)
            values, size = pool(values, size)
        return token_map(values, size)

    trained = {width: TokenPool(width, 2 * width, dtype=torch.float64).state_dict() for width in (3, 6)}
    every = 32 // output_stride
    torch.testing.assert_close(chain(output_stride)[..., ::every, ::every], chain(32))


def test_steps() -> None:
    assert pool_steps(2, first=7) == [(2, 1), (2, 1)]
    assert pool_steps(3, first=4, output_stride=4) == [(1, 1), (1, 2), (1, 4)]
    assert pool_steps(3, first=4, output_stride=4, own=True) == [(1, 2), (1, 4), (1, 8)]
    assert pool_steps(0, first=16, output_stride=16) == []


def test_mistakes() -> None:
    with pytest.raises(UserError, match="8, 16, 32: got 4"):
        pool_steps(2, first=8, output_stride=4)
    with pytest.raises(UserError, match="multiple of in_dim, 4: got 6"):
        TokenPool(4, 6)
    with pytest.raises(UserError, match="stride and dilation"):
        TokenPool(4, 8, stride=0)
    with pytest.raises(UserError, match="grid must not have more places than there are tokens, 5"):
        TokenPool(4, 8)(torch.zeros(1, 5, 4), (2, 3))


def test_map_is_a_view() -> None:
    given = tokens(1, (2, 3))
    assert token_map(given, (2, 3)).untyped_storage().data_ptr() == given.untyped_storage().data_ptr()


@pytest.mark.parametrize("shape", [(7, 4), (1, 7, 3), (1, 1, 7, 4)])
def test_tokens_that_do_not_fit_are_named(shape: tuple[int, ...]) -> None:
    with pytest.raises(UserError, match="tokens must be"):
        TokenPool(4, 8)(torch.zeros(shape), (2, 3))
