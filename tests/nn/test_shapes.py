"""The table of the kernels' shapes: looked up by chip and problem, extended by `tune`."""

import itertools
import json
from dataclasses import replace

import pytest

from spatially.nn.regular_attention import shapes
from spatially.nn.regular_attention.field import BORDERS
from spatially.nn.regular_attention.shapes import Problem, Shape, choose, forced, row, usual, write

PROBLEM = Problem("forward", height=56, width=56, window=7, size=32, bytes=2, biased=False)
OURS = Shape(2, 8, 2, stages=4)


def test_the_nearest_grid_of_the_same_chip(tmp_path, monkeypatch):
    table = tmp_path / "shapes.json"
    other = replace(OURS, stages=1)
    write(table, [row(PROBLEM, "chip", OURS), row(replace(PROBLEM, height=14, width=14), "chip", other)])
    monkeypatch.setenv(shapes.OWN_TABLE, str(table))
    assert choose(PROBLEM, "chip") == OURS
    assert choose(replace(PROBLEM, height=40, width=60), "chip") == OURS
    assert choose(replace(PROBLEM, height=8, width=14), "chip") == other
    assert choose(PROBLEM, "another chip") == usual(PROBLEM)
    assert choose(replace(PROBLEM, window=5), "chip") == usual(replace(PROBLEM, window=5))


def test_writing_again_replaces_a_row(tmp_path):
    table = tmp_path / "shapes.json"
    for shape in (OURS, replace(OURS, stages=1)):
        write(table, [row(PROBLEM, "chip", shape)])
    (only,) = json.loads(table.read_text())
    assert Shape(**only["shape"]) == replace(OURS, stages=1)


def test_every_row_of_the_table_is_a_shape():
    for one in json.loads(shapes.TABLE.read_text()):
        assert one["kernel"] in shapes.KERNELS
        assert Shape(**one["shape"]).chunks(one["window"]) >= 1


def test_a_forced_shape_goes_first():
    with forced("forward", OURS):
        assert choose(PROBLEM, "chip") == OURS
    assert choose(PROBLEM, "chip") == usual(PROBLEM)


@pytest.mark.parametrize("border", BORDERS)
@pytest.mark.parametrize("kernel", shapes.KERNELS)
def test_a_chunk_holds_as_many_keys_in_narrow_grids(kernel, border):
    for width, window, biased in itertools.product(range(1, 17), range(1, 14, 2), (False, True)):
        problem = replace(PROBLEM, kernel=kernel, width=width, window=window, biased=biased, border=border)
        shape = usual(problem)
        assert problem.keys(shape) == 32


def test_a_narrow_grids_shape_is_not_taken_where_tiles_see_beyond_it(tmp_path, monkeypatch):
    table, narrow, tall = tmp_path / "shapes.json", replace(PROBLEM, height=4, width=4), replace(OURS, chunk=8)
    write(table, [row(narrow, "chip", tall)])
    monkeypatch.setenv(shapes.OWN_TABLE, str(table))
    beyond = replace(narrow, border="zero")
    assert (choose(narrow, "chip"), narrow.keys(tall)) == (tall, 32)
    assert (choose(beyond, "chip"), beyond.keys(tall)) == (usual(beyond), 128)


def test_a_shape_is_not_taken_where_its_chunks_hold_too_much_or_too_little(tmp_path, monkeypatch):
    table = tmp_path / "shapes.json"
    large = replace(PROBLEM, height=7, width=7, size=128, bytes=4)
    small = replace(PROBLEM, height=4, width=4, window=3)
    deep, flat = Shape(4, 8, 4, stages=4), Shape(4, 4, 1)
    write(table, [row(large, "chip", deep), row(small, "chip", flat)])
    monkeypatch.setenv(shapes.OWN_TABLE, str(table))
    assert choose(large, "chip") == deep
    beyond = replace(large, border="zero")  # twice as many keys: 256 KiB on their way
    assert choose(beyond, "chip") == usual(beyond)
    assert usual(beyond).stages == 1
    assert choose(replace(large, size=128, bytes=4, border="shift"), "chip") == deep
    assert choose(small, "chip") == flat
    wide = replace(small, height=14, width=14)  # 8 keys, fewer than a matrix unit takes
    assert choose(wide, "chip") == usual(wide)
