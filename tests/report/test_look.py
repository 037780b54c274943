"""The one-image picture shows every answer, and the followed class even where it has dropped out of the best."""

import numpy as np
import pytest

from spatially.errors import UserError
from spatially.report.look import LookRow, LookView, draw_look

VIEWS = [LookView(np.zeros((16, 16, 3), "uint8"), caption) for caption in ("clean", "shuffled")]
ROW = LookRow("model <b> $x$", [[("bird", 0.9), ("cat", 0.1)], [("rug", 0.7), ("cat", 0.2)]], "bird", [0.9, 0.0016])


def bars(axes):
    return [
        (group.get_label(), group[0].get_width())
        for group in axes.containers
        if group.get_label() in {"bird", "cat", "rug"}
    ]


def test_bars_are_the_probabilities_and_the_reference_is_followed():
    figure = draw_look([ROW], views=VIEWS, heading="What is it?")
    _, _, clean, shuffled = figure.axes
    assert bars(clean) == [("bird", 0.9), ("cat", 0.1)]
    assert bars(shuffled) == [("rug", 0.7), ("cat", 0.2), ("bird", 0.0016)]
    bold = [text.get_text() for text in shuffled.texts if text.get_fontweight() == "bold"]
    assert bold == ["bird", "0.16\u202f%"]
    assert [axes.get_title(loc="left") for axes in figure.axes[:3]] == ["clean", "shuffled", "model <b> $x$"]
    figure.draw_without_rendering()


def test_without_its_probability_the_reference_is_not_made_up():
    row = LookRow(ROW.model, ROW.answers, "bird")
    assert bars(draw_look([row], views=VIEWS).axes[3]) == [("rug", 0.7), ("cat", 0.2)]


def test_every_view_needs_answers():
    with pytest.raises(UserError, match="one entry for each of the 1 views"):
        draw_look([ROW], views=VIEWS[:1])
    with pytest.raises(UserError, match="0 rows and 2 views"):
        draw_look([], views=VIEWS)
