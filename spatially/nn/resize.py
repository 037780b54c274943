"""Tables of positions for another grid, bicubic."""

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]


def resize(table: Tensor, grid: Grid, *, antialias: bool = False) -> Tensor:
    """A table (…, height, width) for another grid; at its own nothing is computed.

    >>> resize(torch.ones(2, 3, 3), (5, 4)).shape
    torch.Size([2, 5, 4])
    """
    if tuple(table.shape[-2:]) == tuple(grid):
        return table
    precise = table.to(torch.promote_types(table.dtype, torch.float32))  # half precision has no kernel everywhere
    rows, columns = (
        _matrix(old, new, precise, antialias=antialias) for old, new in zip(table.shape[-2:], grid, strict=True)
    )
    return (rows @ precise @ columns.mT).to(table.dtype)


@torch.no_grad()
def _matrix(old: int, new: int, like: Tensor, *, antialias: bool) -> Tensor:
    """The matrix (new, old) that resizes one side. A product with it, unlike `interpolate`, compiles for changing sizes."""
    identity = torch.eye(old, device=like.device, dtype=like.dtype)[None, None]
    return F.interpolate(identity, size=(new, old), mode="bicubic", antialias=antialias)[0, 0]
