"""Checks of folders that come in a published layout."""

from collections.abc import Sequence
from pathlib import Path

from spatially.errors import UserError


def check_folder(folder: str | Path, *, what: str) -> Path:
    """A folder that exists."""
    path = Path(folder)
    if not path.is_dir():
        raise UserError(f"{what}: there is no folder {path}")
    return path


def check_class_folders(folder: Path, expected: Sequence[str], *, what: str) -> None:
    """Exactly the expected folders, one a class; files beside them do not matter."""
    check_folder(folder, what=what)
    found = {path.name for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")}
    missing = [name for name in expected if name not in found]
    extra = sorted(found - set(expected))
    if missing or extra:
        parts = [f"lacks {_some(missing)}"] * bool(missing) + [f"has {_some(extra)} besides"] * bool(extra)
        raise UserError(
            f"{what}: {folder} must hold the {len(expected)} folders {_some(expected)}; it {' and '.join(parts)}"
        )


def _some(names: Sequence[str], most: int = 3) -> str:
    shown = ", ".join(names[:most])
    return shown if len(names) <= most else f"{shown}, … ({len(names)} in all)"
