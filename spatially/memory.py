"""Freed memory that goes back to the system.

The C library keeps what is freed for later; between large batches and the small results that stay, its heap tears into
holes that are never filled again, and a sweep over many images grows as if it kept them. Asked to, it lets the holes go.
"""

import ctypes
from collections.abc import Callable
from functools import cache


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None  # not the GNU C library


def trim() -> None:
    """Let go of freed memory, where the C library can."""
    release = _malloc_trim()
    if release is not None:
        release(0)
