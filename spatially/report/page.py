"""The report: one page that works offline, and its figures and tables as files beside it."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from numbers import Integral
from pathlib import Path
from typing import Any, Protocol

import jinja2
import pandas
import xarray as xr
from markupsafe import Markup
from matplotlib.figure import Figure

from spatially.drawing.style import looks_of
from spatially.drawing.values import (
    KINDS,
    Results,
    attribute,
    blocks,
    clean_accuracy,
    covered_note,
    estimate,
    kinds,
    listing,
    percent,
    ratios,
    square,
    thousands,
    with_interval,
)
from spatially.errors import UserError
from spatially.files import write_whole
from spatially.report import answer, citation
from spatially.report.files import data_uri, save_figure, settle
from spatially.report.provenance import of_the_study
from spatially.report.reading import READING
from spatially.version import __version__

QUESTION = "Does it see spatial structure, or a bag of patches?"
LONGEST_TABLE = 120  # rows on the page; longer ones are in their file
WRITTEN = {
    "nll": "NLL",
    "r_squared": "R²",
    "sigma_x": "σ across",
    "sigma_y": "σ down",
    "log_amplitude": "Δ log amplitude",
}
SCALE = 1.62  # CSS pixels a point: 8-point type in a figure reads like the page's small type


class Drawing(Protocol):
    """What a probe's drawing module offers. `captions`, `descriptions`, `gallery` and `shown` are taken where they exist."""

    def figures(self, results: Results) -> dict[str, Figure]: ...

    def tables(self, results: Results) -> dict[str, pandas.DataFrame]: ...


@dataclass(frozen=True)
class Picture:
    """One figure on the page; ``name`` is its file's."""

    name: str
    uri: str
    width: int
    height: int
    caption: str
    description: str


@dataclass(frozen=True)
class Table:
    """One table on the page; without rows when it is too long for it."""

    name: str
    heading: str
    caption: str
    columns: list[str]
    rows: list[list[str]]
    count: int


@dataclass(frozen=True)
class Section:
    """One probe."""

    name: str
    heading: str
    definition: str
    pictures: list[Picture]
    gallery: list[Picture]
    tables: list[Table]
    question: str
    reading: str
    absent: list[str]


def write_report(
    directory: Path,
    *,
    results: Mapping[str, Results],
    examples: xr.Dataset | None = None,
    figures_for: Mapping[str, Any],
    skipped: Sequence[Mapping[str, str]] = (),
) -> Path:
    """Write ``directory/report.html``, ``figures/*.{svg,pdf,png}`` and ``tables/*.csv``; return the page's path.

    ``results`` maps a probe's name in lower case to its results by model, ``figures_for`` the same name to a `Drawing`.
    ``skipped`` says, by ``model`` and ``probe``, for which ``reason`` a study left something out.
    The page is written last, so what it links to exists. The same input gives the same bytes.
    """
    results = {probe: models for probe, models in results.items() if models}
    if not results:
        raise UserError("results: nothing to report, no probe has a result for any model")
    directory = Path(directory)
    names = _names(results)
    reasons = {(one["model"], one["probe"]): one["reason"] for one in skipped}
    with looks_of(names):
        sections = [
            _section(directory, probe, models, figures_for.get(probe), examples, _absent(probe, models, names, reasons))
            for probe, models in results.items()
        ]
    if examples is not None and "sensitivity" in results:
        _add_gallery(directory, sections, results["sensitivity"], examples, figures_for.get("sensitivity"))
    return write_whole(directory / "report.html", _page(results, sections))


def _page(results: Mapping[str, Results], sections: list[Section]) -> str:
    folder = Path(__file__).parent
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(folder),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        keep_trailing_newline=True,
    )
    sensitivity, paste = results.get("sensitivity", {}), results.get("paste", {})
    found = answer.answers(sensitivity, paste) if sensitivity else []
    general, of_probes = of_the_study(results)
    return environment.get_template("page.html.jinja").render(
        question=QUESTION,
        css=Markup((folder / "page.css").read_text(encoding="utf-8")),
        overview=_overview(results),
        answers=found,
        summary=answer.summary(found) if found else "",
        extremes=answer.extremes(found, answer.headline_block(sensitivity)) if found else "",
        general=general,
        of_probes={_file_name(probe): one for probe, one in of_probes.items()},
        others=answer.paste_only(paste) if paste and not sensitivity else {},
        block=square(answer.headline_block(sensitivity)) if sensitivity else "",
        bag_threshold=percent(answer.BAG),
        structure_threshold=percent(answer.STRUCTURE),
        bag=answer.BAG,
        structure=answer.STRUCTURE,
        bag_levels=_bag_levels(sensitivity),
        ranking=_ranking(sensitivity, found),
        sections=sections,
        citations=[citation.SOFTWARE, citation.XU],
        version=__version__,
    )


# The top of the page


def _overview(results: Mapping[str, Results]) -> list[str]:
    """How many models, which data, how many images: what the answer rests on."""
    datasets = [dataset for models in results.values() for dataset in models.values()]
    names = _names(results)
    facts = [f"{len(names)} model{'s' if len(names) > 1 else ''}"]
    facts += list(dict.fromkeys(str(dataset.attrs["data"]) for dataset in datasets if dataset.attrs.get("data")))
    images = {attribute(dataset, "images") for dataset in datasets}
    counts = sorted(count for count in images if isfinite(count))
    if counts:
        span = dict.fromkeys(thousands(count) for count in (counts[0], counts[-1]))
        facts.append(f"{' to '.join(span)} images")
    return facts


def _names(results: Mapping[str, Results]) -> list[str]:
    """Every model of the study, in its order."""
    return list(dict.fromkeys(name for models in results.values() for name in models))


def _bag_levels(sensitivity: Results) -> list[str]:
    levels = {attribute(dataset, "bag_accuracy") for dataset in sensitivity.values()}
    return [percent(level) for level in sorted(level for level in levels if isfinite(level))]


def _ranking(sensitivity: Results, found: list[answer.Answer]) -> Table | None:
    """The answers as numbers, in the same order."""
    if not found:
        return None
    sizes = blocks(sensitivity)
    rows = []
    for place, one in enumerate(found, start=1):
        dataset = sensitivity[one.model]
        reliances = [estimate(dataset, "structure_reliance", block=block) for block in sizes]
        rows.append(
            [
                str(place) if one.reliance.defined else "–",
                one.model,
                thousands(attribute(dataset, "parameters")),
                one.word,
                with_interval(clean_accuracy(dataset)),
                *(with_interval(reliance) if reliance.defined else "undefined" for reliance in reliances),
            ]
        )
    columns = [
        "",
        "Model",
        "Parameters",
        "Reading",
        "Clean accuracy",
        *(f"Reliance {square(block)}" for block in sizes),
    ]
    caption = (
        f"Ranked by structure reliance with {square(answer.headline_block(sensitivity))} pixel blocks, in per cent,"
        " 95 % intervals in brackets: 0 is a bag of patches, 100 a rigid template."
        f" {covered_note(sensitivity)}"
    ).strip()
    return Table("sensitivity_reliance", "Ranking", caption, columns, rows, len(rows))


# One probe


def _section(
    directory: Path,
    probe: str,
    models: Results,
    drawing: Drawing | None,
    examples: xr.Dataset | None,
    absent: list[str],
) -> Section:
    """Draw, save and describe one probe. A probe that nobody draws still says what was measured.

    A drawing's ``shown(results, examples)`` gives the figures, by name, of what the models were shown.
    """
    captions, descriptions = _texts(drawing, "captions", models), _texts(drawing, "descriptions", models)
    drawn = drawing.figures(models) if drawing else {}
    listed = drawing.tables(models) if drawing else {}
    show = getattr(drawing, "shown", None)
    seen = show(models, examples) if callable(show) and examples is not None and examples.sizes.get("example") else {}
    heading = _words(probe)

    def pictures(drawn: Mapping[str, Figure]) -> list[Picture]:
        return [
            _picture(directory, _joined(probe, name), figure, captions.get(name, ""), descriptions.get(name, ""))
            for name, figure in drawn.items()
        ]

    return Section(
        name=_file_name(probe),
        heading=heading,
        definition=_definition(models),
        pictures=pictures(drawn),
        gallery=pictures(seen),
        tables=[_table(directory, _joined(probe, name), name, frame, captions) for name, frame in listed.items()],
        question=READING.get(probe, ("", ""))[0],
        reading=READING.get(probe, ("", ""))[1],
        absent=absent,
    )


def _absent(probe: str, models: Results, names: Sequence[str], reasons: Mapping[tuple[str, str], str]) -> list[str]:
    """The study's models that this probe has no result of, by the reason where it is known."""
    of: dict[str, list[str]] = {}
    for name in names:
        if name not in models:
            of.setdefault(reasons.get((name, probe), "not measured").removeprefix(f"{name} "), []).append(name)
    return [f"{listing(found)} ({reason})" for reason, found in of.items()]


def _definition(models: Results) -> str:
    return str(next(iter(models.values())).attrs.get("definition", ""))


def _texts(drawing: Any, name: str, models: Results) -> dict[str, str]:
    """`captions` or `descriptions` of a drawing module, where it has them."""
    function = getattr(drawing, name, None)
    return dict(function(models)) if callable(function) else {}


def _picture(directory: Path, name: str, figure: Figure, caption: str, description: str) -> Picture:
    settle(figure)
    svg = save_figure(figure, directory / "figures", name)
    width, height = (round(72 * SCALE * side) for side in figure.get_size_inches())
    heading = figure.get_suptitle() or _words(name)
    return Picture(name, data_uri(svg), width, height, caption or heading, description or caption or heading)


def _table(directory: Path, file: str, name: str, frame: pandas.DataFrame, captions: Mapping[str, str]) -> Table:
    write_whole(directory / "tables" / f"{file}.csv", frame.to_csv(index=False, lineterminator="\n"))
    rows = (
        [[_cell(value) for value in row] for row in frame.itertuples(index=False)]
        if len(frame) <= LONGEST_TABLE
        else []
    )
    heading = _words(name)
    return Table(file, heading, captions.get(name, heading), [_words(str(c)) for c in frame.columns], rows, len(frame))


def _cell(value: Any) -> str:
    """Numbers to three digits, whole ones entire: the file has them all.

    >>> [_cell(value) for value in (3837.254, -0.00392156, 0.5, 395460, float("nan"))]
    ['3,837', '−0.00392', '0.5', '395,460', '–']
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        shown = f"{int(value):,}" if abs(int(value)) >= 10_000 else str(int(value))
    elif isinstance(value, float):
        shown = "–" if not isfinite(value) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    else:
        return str(value) if value is not None and value != "" else "–"
    return shown.replace("-", "−")


def _add_gallery(
    directory: Path, sections: list[Section], models: Results, examples: xr.Dataset, drawing: Drawing | None
) -> None:
    """What the models were shown, with the blocks and ratios that were measured."""
    gallery = getattr(drawing, "gallery", None)
    present = [kind for kind in KINDS if any(kind in kinds(dataset) for dataset in models.values())]
    if not callable(gallery) or not present or not examples.sizes.get("example"):
        return
    sizes, shares = _spread(blocks(models), 4), _spread(ratios(models), 6)
    figure = gallery(examples, kinds=present, blocks=sizes, ratios=shares)
    number, kind_of = int(examples["index"].values[0]), ""
    if "class_name" in examples.coords:
        kind_of = f" ({examples['class_name'].values[0]})"
    caption = (
        f"Image {number}{kind_of} as the models saw it: the same blocks, in the same places. Noise outside the range of"
        " colours is cut for display only. Corresponds to figures 3 and 6 of Xu."
    )
    next(section for section in sections if section.name == "sensitivity").gallery.append(
        _picture(directory, "sensitivity_images", figure, caption, f"One image with its blocks perturbed. {caption}")
    )


def _spread(values: list[Any], most: int) -> list[Any]:
    """At most so many, evenly over the whole range, ends included."""
    if len(values) <= most:
        return values
    return [values[round(i * (len(values) - 1) / (most - 1))] for i in range(most)]


def _words(name: str) -> str:
    if name in WRITTEN:
        return WRITTEN[name]
    text = name.replace("_", " ")
    return text[:1].upper() + text[1:]


def _file_name(name: str) -> str:
    """A name that is safe as a file, a link and an anchor."""
    return re.sub(r"[^a-z0-9_-]+", "-", name.lower()).strip("-") or "figure"


def _joined(probe: str, name: str) -> str:
    """Two probes may use one name for a figure: the file says which."""
    return _file_name(name if name == probe else f"{probe}_{name}")
