"""A folder holds one training at a time: its main process keeps a lock on OUT/.training.lock while it writes there.

The lock belongs to the process, not to the file: it is gone with a process that was killed, and the workers of a loader, which
may outlive it for seconds, do not have it. Where a file system or an operating system has no locks, nothing is held.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from spatially.errors import UserError
from spatially.files import write_error

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".training.lock"
_HELD = {errno.EACCES, errno.EAGAIN}


@contextmanager
def alone(out: Path, *, main: bool) -> Iterator[None]:
    """Hold `out` in the main process; a `UserError` where another one does."""
    if not main or fcntl is None:
        yield
        return
    path = out / NAME
    descriptor = _opened(path)
    try:
        while not _locked(descriptor, out):
            os.close(descriptor)
            descriptor = _opened(path)
        try:
            yield
        finally:
            if _is(descriptor, path):
                path.unlink(missing_ok=True)
    finally:
        os.close(descriptor)  # which gives the lock back


def _opened(path: Path) -> int:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    except OSError as error:
        raise write_error(error, path) from error


def _locked(descriptor: int, out: Path) -> bool:
    """Take the lock; False where the file was removed meanwhile by the one who had it."""
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in _HELD:
            raise UserError(
                f"out: another training is writing to {out}; wait until it has ended, stop it, or give another --out"
            ) from error
        return True  # there are no locks here
    return _is(descriptor, out / NAME)


def _is(descriptor: int, path: Path) -> bool:
    """Whether an open file is still the one of this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False
