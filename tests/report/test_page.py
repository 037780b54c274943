"""The page: whole, offline, safe, and the same bytes for the same results."""

import base64
import re
from html.parser import HTMLParser
from pathlib import Path
from runpy import run_path
from types import SimpleNamespace
from xml.etree import ElementTree

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from spatially.errors import UserError
from spatially.probes import PROBES, paste_figures, sensitivity_figures
from spatially.report import files
from spatially.report.page import write_report
from spatially.report.reading import READING

Study = run_path(str(Path(__file__).parent / "synthetic.py"))["Study"]
DRAWINGS = {"sensitivity": sensitivity_figures, "paste": paste_figures}
EVIL = 'evil <script>alert(1)</script> & "q" $x_1$'
VOID = {"meta", "link", "img", "br", "hr", "input"}


class Outline(HTMLParser):
    """Tags in order, links, images and visible text; complains about tags that do not match."""

    def __init__(self):
        super().__init__()
        self.open, self.links, self.images, self.text, self.tags = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        given = dict(attrs)
        self.links += [given[key] for key in ("href", "src") if key in given]
        if tag == "img":
            self.images.append(given)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open, tag
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def parse(page):
    outline = Outline()
    outline.feed(page.read_text())
    outline.close()
    assert not outline.open
    return outline


def small(**options):
    return {"a": Study.sensitivity("a", (0.8, 0.2, 0.1), kinds=("shuffle",), blocks=(8,), images=40, **options)}


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    results = Study.results(images=60, bag_accuracy=0.42)
    results[EVIL] = Study.blind(EVIL)
    return write_report(
        tmp_path_factory.mktemp("report"),
        results={"sensitivity": results, "paste": Study.paste_results()},
        examples=Study.examples(),
        figures_for=DRAWINGS,
    )


def test_page_is_well_formed_and_complete(report):
    outline = parse(report)
    text = " ".join("".join(outline.text).split())
    for words in (
        "Does it see spatial structure, or a bag of patches?",
        "What was measured",
        "How to read it",
        "How to cite",
        "n01440764/broken.JPEG",
        "blake2b:5f0c9e77a1d24b3c",
        "spatially probe resnet50.a1_in1k --data imagenet/val --out runs/compare",
        "the best that any bag of patches can do is 42\u202f% accuracy".replace("\u202f", " "),
        "Vision Transformer with High Spatial Structure Sensitivity",
    ):
        assert words in text
    assert outline.tags.count("h1") == 1
    assert outline.tags.count("table") == outline.tags.count("caption")


def test_every_figure_has_words_and_files(report):
    outline = parse(report)
    assert len(outline.images) == 7
    for image in outline.images:
        assert len(image["alt"]) > 40
        svg = base64.b64decode(image["src"].removeprefix("data:image/svg+xml;base64,"))
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert b"prefers-color-scheme:dark" in svg
    for name in ("shuffle", "mask", "reliance", "area", "confidence", "images"):
        for form in ("svg", "pdf", "png"):
            assert (report.parent / "figures" / f"sensitivity_{name}.{form}").stat().st_size > 1000


def test_nothing_is_loaded_from_elsewhere_and_links_lead_somewhere(report):
    outline = parse(report)
    assert "script" not in outline.tags
    for link in outline.links:
        if link.startswith("data:image/svg+xml"):
            svg = base64.b64decode(link.split(",", 1)[1]).decode()
            assert all(inner.startswith(("#", "data:image/")) for inner in re.findall(r'href="([^"]*)"', svg))
        elif link.startswith("#"):
            assert f'id="{link[1:]}"' in report.read_text()
        else:
            assert (report.parent / link).exists(), link
    assert "url(" not in report.read_text().split("</style>")[0]


def test_page_stays_small(report):
    assert report.stat().st_size < 1_100_000


def test_text_is_escaped(report):
    page = report.read_text()
    assert "<script" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt; &amp;" in page
    assert EVIL in "".join(parse(report).text)


def test_no_temporary_file_is_left(report):
    assert [path for path in report.parent.rglob("*") if path.name.endswith(".part")] == []


def test_the_same_results_give_the_same_bytes(tmp_path):
    for folder in ("one", "two"):
        results = {"sensitivity": small(), "paste": {"a": Study.paste("a", 0.6, 0.2)}}
        write_report(tmp_path / folder, results=results, examples=Study.examples(1, side=64), figures_for=DRAWINGS)
    contents = [
        {path.relative_to(root).as_posix(): path.read_bytes() for path in root.rglob("*") if path.is_file()}
        for root in (tmp_path / "one", tmp_path / "two")
    ]
    assert len(contents[0]) == 1 + 3 * 6 + 5
    assert contents[0] == contents[1]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = files.write_whole(tmp_path / "a.txt", "old")

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr("os.replace", fail)
    with pytest.raises(OSError, match="disk full"):
        files.write_whole(path, "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("a.txt", "old")]


def test_tables_are_the_frames(report):
    table = pd.read_csv(report.parent / "tables" / "sensitivity_reliance.csv")
    assert list(table["model"].unique())[-1] == EVIL
    assert table["structure_reliance"].isna().sum() == 4


def test_a_probe_that_the_page_does_not_know_is_shown_too(tmp_path):
    def figures(results):
        figure = Figure()
        figure.subplots().plot([0, 1])
        return {"spectrum": figure}

    other = SimpleNamespace(
        figures=figures, tables=lambda results: {"peaks": pd.DataFrame({"model": list(results), "x": [1.5]})}
    )
    result = Study.paste("a", 0.5, 0.3).assign_attrs(probe="Fourier", definition="Log amplitude.", kept=np.float64(0.5))
    page = write_report(tmp_path, results={"fourier": {"a": result}}, figures_for={"fourier": other})
    text = "".join(parse(page).text)
    assert "Fourier" in text
    assert "Log amplitude." in text
    assert "so the question stays open" in text
    assert (tmp_path / "figures" / "fourier_spectrum.pdf").exists()
    assert (tmp_path / "tables" / "fourier_peaks.csv").read_text() == "model,x\na,1.5\n"


def test_a_probe_without_drawings_still_says_what_was_measured(tmp_path):
    page = write_report(tmp_path, results={"sensitivity": small()}, figures_for={})
    outline = parse(page)
    assert outline.images == []
    assert "when every 8×8 block is shuffled" in "".join(outline.text)


def test_paste_alone_gives_no_verdict(tmp_path):
    page = write_report(tmp_path, results={"paste": {"a": Study.paste("a", 0.6, 0.2)}}, figures_for={})
    text = "".join(parse(page).text)
    assert "no verdict is given" in text
    assert "it names the shuffled one in 60\u202f%" in text


def test_what_holds_for_all_probes_is_said_once(report):
    measured = report.read_text().split('<section id="measured">')[1].split("</section>")[0]
    text = " ".join(re.sub(r"<[^>]*>", " ", measured).split())
    assert text.count("Data fingerprint") == 1
    assert text.count("Preprocessing") == 1
    assert text.count("Definition") == 2


def test_models_that_a_probe_has_nothing_for_are_named_with_the_reason(tmp_path):
    results = {"sensitivity": small() | {"b": small()["a"]}, "paste": {"a": Study.paste("a", 0.6, 0.2)}}
    skipped = [{"model": "b", "probe": "paste", "reason": "b has no such thing"}]
    for known, words in ((skipped, "Not here: b (has no such thing)."), ([], "Not here: b (not measured).")):
        page = write_report(tmp_path, results=results, figures_for={}, skipped=known)
        assert words in "".join(parse(page).text)


def test_every_probe_says_how_to_read_it():
    assert READING.keys() == PROBES.keys()


def test_bare_results_are_enough(tmp_path):
    (result,) = small().values()
    result.attrs = {}
    page = write_report(tmp_path, results={"sensitivity": {"a": result}}, figures_for=DRAWINGS)
    assert "a" in "".join(parse(page).text)


@pytest.mark.parametrize("results", [{}, {"sensitivity": {}}])
def test_nothing_to_report_is_said(tmp_path, results):
    with pytest.raises(UserError, match="nothing to report"):
        write_report(tmp_path, results=results, figures_for=DRAWINGS)
