"""Freed memory that goes back to the system.

The C library keeps what is freed for later; between large batches and the small results that stay, its heap tears into
holes that are never filled again, and a sweep over many images grows as if it kept them. Asked to, it lets the holes go.
"""

import ctypes
import time
from collections.abc import Callable
from functools import cache

_EVERY = 1.0  # seconds; what is let go has to be fetched again
_last = float("-inf")


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        return None  # not the GNU C library


def trim() -> None:
    """Let go of freed memory, where the C library can, once a second at most."""
    global _last
    release, now = _malloc_trim(), time.monotonic()
    if release is not None and now - _last >= _EVERY:
        release(0)
        _last = now
