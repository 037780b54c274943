"""A study's folder made into its page."""

from pathlib import Path

from spatially.probes import PROBES
from spatially.report.page import write_report
from spatially.study.store import Store


def report_study(folder: str | Path) -> Path:
    """Write the page, the figures and the tables of the results in ``folder``; return the page's path."""
    store = Store(folder)
    drawings = {name: probe.drawing() for name, probe in PROBES.items()}
    found = store.results()  # by the first model that has one; the page keeps to one order
    results = {name: found.pop(name) for name in PROBES if name in found} | found
    return write_report(
        store.folder, results=results, examples=store.examples(), figures_for=drawings, skipped=store.skipped()
    )
