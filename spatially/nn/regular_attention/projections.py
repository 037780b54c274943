"""The forms in which query, key and value come: one packed tensor, two of them packed and the key apart, or three."""

from collections.abc import Sequence

from torch import Tensor


def unpack(projections: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value (B, H, W, heads, D) as views."""
    if len(projections) == 1:
        query, key, value = projections[0].unbind(3)
    elif len(projections) == 2:
        query, value = projections[0].unbind(3)
        key = projections[1]
    else:
        query, key, value = projections
    return query, key, value
