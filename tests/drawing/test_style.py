"""A model looks the same in every figure, and no two models look alike."""

import xarray as xr

from spatially.drawing.style import looks_of, series
from spatially.report.page import write_report

TWELVE = [f"model {number}" for number in range(12)]


def test_twelve_models_differ_also_without_lines():
    looks = series(TWELVE).values()
    assert len({(look.colour, look.marker) for look in looks}) == 12


def test_a_model_keeps_its_look_where_others_are_missing():
    every = series(TWELVE)
    with looks_of(TWELVE):
        assert series(TWELVE[4:6]) == {name: every[name] for name in TWELVE[4:6]}
        stranger = series(["another"])["another"]
    assert stranger not in every.values()
    assert series(["another"])["another"] == every["model 0"]


def test_the_page_gives_all_probes_the_same_looks(tmp_path):
    seen = {}

    class Drawing:
        def __init__(self, probe):
            self.probe = probe

        def figures(self, results):
            seen[self.probe] = series(results)
            return {}

        def tables(self, results):
            return {}

    models = {name: xr.Dataset(attrs={"model": name}) for name in "abc"}
    results = {"wide": models, "narrow": {name: models[name] for name in "bc"}}
    write_report(tmp_path, results=results, figures_for={probe: Drawing(probe) for probe in results})
    assert seen["narrow"] == {name: seen["wide"][name] for name in "bc"}
