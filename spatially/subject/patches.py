"""The patches that a model cuts its image into, where it does."""

from torch import nn


def patch_side(model: nn.Module) -> int | None:
    """The side in pixels of the squares that a model reads its image in; None where they overlap or nothing says so.

    Patches that do not overlap are a first convolution that moves by as much as it sees, and pads nothing. A model without
    one may say it itself, as ``patch``.

    >>> patch_side(nn.Conv2d(3, 64, 16, stride=16)), patch_side(nn.Conv2d(3, 64, 7, stride=2, padding=3))
    (16, None)
    """
    own = getattr(model, "patch", None)
    if isinstance(own, int):
        return own
    first = next((module for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if first is None or first.in_channels != 3 or first.padding not in ((0, 0), "valid", 0):
        return None
    sides = {*first.kernel_size, *first.stride}
    return sides.pop() if len(sides) == 1 else None
