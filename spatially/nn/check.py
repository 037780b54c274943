"""Numbers, choices and shapes that a layer is built for or given, or an error that names what is wrong."""

import math
from numbers import Real

from torch import Tensor

from spatially.errors import UserError


def whole(name: str, value: object) -> int:
    """A positive whole number: True, 3.0 and "3" are none."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{name} must be a positive whole number: got {value!r}")
    return value


def odd(name: str, value: object) -> int:
    """The side of a square that has a middle.

    >>> odd("window", 7)
    7
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value % 2 == 0:
        raise UserError(f"{name} must be an odd positive whole number: got {value!r}")
    return value


def number(name: str, value: object) -> float:
    """A finite number.

    >>> number("sigma", 5)
    5.0
    """
    # Compared, since a compiled graph cannot ask `isfinite` of a number that it leaves free.
    if isinstance(value, bool) or not isinstance(value, Real) or not -math.inf < float(value) < math.inf:
        raise UserError(f"{name} must be a finite number: got {value!r}")
    return float(value)


def flag(name: str, value: object) -> None:
    """A choice of two."""
    if not isinstance(value, bool):
        raise UserError(f"{name} must be True or False: got {value!r}")


def shaped(name: str, tensor: Tensor, what: str, *, axis: int, size: int) -> None:
    """A tensor must have the dimensions that `what` lists, and be `size` long along `axis`."""
    if tensor.ndim != what.count(",") + 1 or tensor.shape[axis] != size:
        raise UserError(f"{name} must be ({what}): got {tuple(tensor.shape)}")
