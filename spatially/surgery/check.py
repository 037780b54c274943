"""Arguments of the operations, checked before anything changes."""

import math
from numbers import Integral, Real

from spatially.errors import UserError


def odd(name: str, value: object) -> int:
    """The side of a square or a kernel.

    >>> odd("window", 7)
    7
    """
    if isinstance(value, bool) or not isinstance(value, Integral) or value < 1 or value % 2 == 0:
        raise UserError(f"{name} must be odd and positive, a whole number: got {value!r}")
    return int(value)


def number(name: str, value: object) -> float:
    """A finite number.

    >>> number("sigma", 5)
    5.0
    """
    if isinstance(value, bool) or not isinstance(value, Real) or not math.isfinite(value):
        raise UserError(f"{name} must be a finite number: got {value!r}")
    return float(value)


def flag(name: str, value: object) -> None:
    """A choice of two."""
    if not isinstance(value, bool):
        raise UserError(f"{name} must be True or False: got {value!r}")
