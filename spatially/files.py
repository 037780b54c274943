"""Files that are written whole or not at all."""

import errno
import os
from pathlib import Path


class WriteError(OSError):
    """The disk would not take a file; the message says what to do. What was finished before is kept."""


def write_whole(path: Path, content: bytes | str) -> Path:
    """Write under another name in the same folder, and rename once all of it is on the disk."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(draft, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise write_error(error, path) from error
    return path


def write_error(error: OSError, path: Path) -> WriteError:
    """The same error as a line for the user."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    reason = os.strerror(error.errno) if error.errno else str(error)
    advice = "free some space there" if full else "see that it can be written"
    again = "run the same command again"
    return WriteError(error.errno, f"could not write {path}: {reason}; {advice} and {again}")
