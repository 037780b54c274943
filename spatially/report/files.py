"""Figures as files, the same bytes for the same input."""

import base64
import io
import re
from pathlib import Path

from matplotlib.figure import Figure
from PIL import Image

from spatially.drawing.style import DARK, figure_style
from spatially.files import write_whole

# Dates and program versions are left out: the same results give the same bytes.
_METADATA: dict[str, dict[str, str | None]] = {
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "png": {"Software": None},
}
_PICTURE = re.compile(r"data:image/png;base64,([A-Za-z0-9+/=\s]+)")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_PATH = re.compile(r' d="[^"]*"')
_GLYPH = re.compile(r'<use xlink:href="#g(\d+)" transform="translate\(([-\d.]+) 0\)"/>')
_LENGTHS = re.compile(r' (?:d|x|y)="[^"]*"|translate\([^)]*\)')


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


def save_figure(figure: Figure, folder: Path, name: str) -> str:
    """Write ``folder/name.{svg,pdf,png}``; return the same figure as SVG for the page."""
    svg = render(figure, "svg", dpi=200).decode()
    write_whole(folder / f"{name}.svg", _PICTURE.sub(lambda found: _as_jpeg(found, quality=92), svg))
    for form in ("pdf", "png"):
        write_whole(folder / f"{name}.{form}", render(figure, form, dpi=200))
    if _PICTURE.search(svg):  # pictures inside come at the size of a screen
        svg = render(figure, "svg", dpi=96).decode()
        svg = _PICTURE.sub(lambda found: _as_jpeg(found, quality=74), svg)
    return slim(svg).replace("<defs>", f"<style>{_dark_rules(svg)}</style><defs>", 1)


def slim(svg: str) -> str:
    """The same picture in about half the bytes: what only editors need is left out, and lengths end at 1/100 point."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'<g id="[^"]*"/?>', lambda group: "" if group[0].endswith("/>") else "<g>", svg)
    svg = _PATH.sub(lambda path: re.sub(r"\s*([A-Za-z])\s+(?=[-\d])", r"\1", path[0][4:-1]).join((' d="', '"')), svg)
    svg = _LENGTHS.sub(lambda part: _LONG_NUMBER.sub(_rounded, part[0]), svg)
    for number, name in enumerate(dict.fromkeys(re.findall(r'<path id="([A-Za-z]\w*-[0-9a-f]+)"', svg))):
        svg = svg.replace(f'"{name}"', f'"g{number}"').replace(f'"#{name}"', f'"#g{number}"')
    svg = _GLYPH.sub(lambda glyph: f'<use xlink:href="#g{glyph[1]}" x="{float(glyph[2]):.0f}"/>', svg)
    svg = svg.replace("xlink:href", "href").replace("; ", ";")
    return re.sub(r"\s*\n\s*", " ", svg).replace("> <", "><")


def _rounded(number: re.Match[str]) -> str:
    return f"{float(number[0]):.2f}".rstrip("0").rstrip(".")


def data_uri(svg: str) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _as_jpeg(found: re.Match[str], *, quality: int) -> str:
    """Photographs and noise as JPEG: a sixth of the bytes. Kept as it was where JPEG is no smaller."""
    png = base64.b64decode(found[1])
    buffer = io.BytesIO()
    picture = Image.open(io.BytesIO(png))
    if picture.mode == "RGBA" and picture.getchannel("A").getextrema() != (255, 255):
        return found[0]
    picture.convert("RGB").save(buffer, format="JPEG", quality=quality, optimize=True)
    if len(buffer.getvalue()) >= len(png):
        return found[0]
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


def _dark_rules(svg: str) -> str:
    """matplotlib writes colours into style attributes; these rules answer to those that occur."""
    rules = "".join(
        f'[style*="{role}: {light}"]{{{role}:{dark}!important}}'
        for light, dark in DARK.items()
        for role in ("fill", "stroke")
        if f"{role}: {light}" in svg
    )
    return f"@media screen and (prefers-color-scheme:dark){{{rules}}}"
