"""Writing files whole or not at all, and figures as the same bytes for the same input."""

import base64
import io
import os
import re
from collections.abc import Iterable
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from spatially.report.style import DARK, figure_style

# Dates and program versions are left out: the same results give the same bytes.
_METADATA: dict[str, dict[str, str | None]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
_PICTURE = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_PATH = re.compile(r' d="[^"]*"')


def write_whole(path: Path, content: bytes | str) -> Path:
    """Write under another name in the same folder, then rename: a reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def render(figure: Figure, form: str, *, dpi: int) -> bytes:
    """A figure as ``svg``, ``pdf`` or ``png``; only the PNG has a background."""
    buffer = io.BytesIO()
    with figure_style():
        background = "white" if form == "png" else "none"
        figure.savefig(buffer, format=form, dpi=dpi, metadata=_METADATA[form], facecolor=background)
    return buffer.getvalue()


def settle(figure: Figure) -> Figure:
    """Lay the figure out once, for all formats alike."""
    with figure_style():
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
    return figure


def save_figure(figure: Figure, folder: Path, name: str, *, forms: Iterable[str] = ("svg", "pdf", "png")) -> list[Path]:
    """``folder/name.{svg,pdf,png}``."""
    paths = []
    for form in forms:
        content = render(figure, form, dpi=200)
        if form == "svg":
            content = _PICTURE.sub(lambda found: _as_jpeg(found, quality=92), content.decode()).encode()
        paths.append(write_whole(folder / f"{name}.{form}", content))
    return paths


def page_svg(figure: Figure) -> str:
    """A figure for the page: light, and with the colours of the reader's screen."""
    svg = render(figure, "svg", dpi=100).decode()
    svg = _PICTURE.sub(lambda found: _as_jpeg(found, quality=80), svg)
    svg = _PATH.sub(lambda path: _LONG_NUMBER.sub(lambda number: f"{float(number[0]):.2f}", path[0]), svg)
    return svg.replace("<defs>", f"<style>{_dark_rules()}</style><defs>", 1)


def data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _as_jpeg(found: re.Match[str], *, quality: int) -> str:
    """Photographs and noise as JPEG: a sixth of the bytes. Kept as it was where JPEG is no smaller."""
    png = base64.b64decode(found[1])
    buffer = io.BytesIO()
    picture = Image.open(io.BytesIO(png))
    if picture.mode == "RGBA" and picture.getextrema()[3] != (255, 255):
        return found[0]
    picture.convert("RGB").save(buffer, format="JPEG", quality=quality, optimize=True)
    if len(buffer.getvalue()) >= len(png):
        return found[0]
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _dark_rules() -> str:
    """matplotlib writes colours into style attributes; these rules answer to them."""
    rules = "".join(
        f'[style*="{role}: {light}"]{{{role}:{dark}!important}}'
        for light, dark in DARK.items()
        for role in ("fill", "stroke")
    )
    return f"@media screen and (prefers-color-scheme:dark){{{rules}}}"
