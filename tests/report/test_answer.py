"""The words follow from the numbers, and say so where there are none."""

from math import nan
from pathlib import Path
from runpy import run_path

import pytest

from spatially.drawing.values import Estimate, covered_note, percent, with_interval
from spatially.report.answer import answers, extremes, headline_block, summary, verdict

Study = run_path(str(Path(__file__).parent / "synthetic.py"))["Study"]


def with_reliance(value, low, high, *, block=8):
    dataset = Study.sensitivity("model", (0.8, 0.2, 0.1), images=60)
    for end, number in (("", value), ("_low", low), ("_high", high)):
        dataset["structure_reliance" + end].loc[{"block": block}] = number
    return dataset


@pytest.mark.parametrize(
    ("reliance", "expected"),
    [
        ((0.96, 0.94, 0.98), "structure"),
        ((0.75, 0.75, 0.80), "structure"),
        ((0.10, 0.00, 0.25), "bag"),
        ((0.50, 0.40, 0.60), "both"),
        ((0.76, 0.70, 0.80), "open"),
        ((0.50, 0.20, 0.80), "open"),
        ((0.96, nan, nan), "structure"),
        ((nan, nan, nan), "undefined"),
    ],
)
def test_verdict(reliance, expected):
    assert verdict(Estimate(*reliance)) == expected


@pytest.mark.parametrize(
    ("reliance", "sentence"),
    [
        (
            (0.96, 0.94, 0.98),
            "loses 96\u202f% [94, 98] of its above-chance accuracy when every 8×8 block is shuffled: it sees structure.",
        ),
        (
            (0.07, 0.04, 0.10),
            "keeps 93\u202f% [90, 96] of its above-chance accuracy when every 8×8 block is shuffled: a bag of patches.",
        ),
        (
            (0.50, 0.20, 0.80),
            "loses 50\u202f% [20, 80] of its above-chance accuracy when every 8×8 block is shuffled: the interval"
            " reaches across 25\u202f% and 75\u202f%, so it is not settled.",
        ),
    ],
)
def test_sentence(reliance, sentence):
    (answer,) = answers({"model": with_reliance(*reliance)}, {})
    assert answer.sentence == sentence


def test_undefined_says_why():
    (answer,) = answers({"blind": Study.blind("blind")}, {})
    assert answer.verdict == "undefined"
    assert answer.sentence.startswith("cannot be judged: its accuracy on clean images (0.8\u202f%) is not above chance")


def test_order_and_summary():
    results = {
        "blind": Study.blind("blind"),
        "bag": with_reliance(0.1, 0.05, 0.15),
        "template": with_reliance(0.97, 0.95, 0.99),
    }
    found = answers(results, {})
    assert [answer.model for answer in found] == ["template", "bag", "blind"]
    assert summary(found) == "Of 3 models, 1 sees structure, 1 is a bag of patches and 1 cannot be judged."


def test_an_interval_across_one_line_still_says_what_is_known():
    results = {
        "a": with_reliance(0.73, 0.69, 0.78),
        "b": with_reliance(0.2, 0.1, 0.3),
        "c": with_reliance(0.5, 0.2, 0.8),
    }
    found = {answer.model: answer for answer in answers(results, {})}
    assert [found[name].word for name in "abc"] == ["structure, or both", "patches, or both", "not settled"]
    assert "it is no bag of patches; the interval reaches across 75\u202f%" in found["a"].sentence
    assert summary(list(found.values())) == (
        "Of 3 models, 1 uses structure, alone or beside patches, 1 uses patches, alone or beside structure and 1 is not"
        " settled by this many images."
    )


def test_most_and_least_come_with_their_intervals():
    results = {"bag": with_reliance(0.1, 0.05, 0.15), "template": with_reliance(0.97, 0.95, 0.99)}
    assert extremes(answers(results, {}), 8) == (
        "When every 8×8 block is shuffled, template loses the largest share of its above-chance accuracy, 97\u202f%"
        " [95, 99], and bag the smallest, 10\u202f% [5, 15]."
    )
    assert extremes(answers({"bag": results["bag"]}, {}), 8) == ""


@pytest.mark.parametrize(
    ("reliance", "words"),
    [
        ((0.73, 0.69, 0.78), "It does, within its interval"),
        ((0.90, 0.86, 0.94), "It loses more"),
        ((0.50, 0.40, 0.60), "It loses less"),
    ],
)
def test_what_falling_back_on_the_parts_would_look_like(reliance, words):
    dataset = with_reliance(*reliance)
    for end, number in (("", 1.0), ("_low", 0.99), ("_high", 1.0)):
        dataset["accuracy" + end].loc[{"ratio": 0.0}] = number
    dataset.attrs |= {"chance": 1 / 12, "bag_accuracy": 1 / 3}
    (answer,) = answers({"model": dataset}, {})
    assert answer.more[0].startswith("Left with the parts alone it would lose 73\u202f%. " + words)


def test_paste_is_told_where_it_was_measured():
    (answer,) = answers({"model": with_reliance(0.5, 0.4, 0.6)}, {"model": Study.paste("model", 0.62, 0.14)})
    assert (
        "it names the shuffled one in 62\u202f% [58, 66] of cases and the clean one in 14\u202f% [10, 18]."
        in answer.more[-1]
    )


@pytest.mark.parametrize(("sizes", "block"), [((1, 2, 8, 16), 8), ((16, 32), 16), ((2, 4), 4)])
def test_headline_block(sizes, block):
    assert headline_block({"a": Study.sensitivity("a", (0.8, 0.2, 0.1), blocks=sizes, images=20)}) == block


@pytest.mark.parametrize(
    ("patches", "block"), [((4,), 8), ((16,), 16), ((4, 32), 32), ((14,), 16), ((14, 16), 16), ((64,), 32)]
)
def test_headline_blocks_leave_patches_whole_where_they_can(patches, block):
    results = {f"m{side}": Study.sensitivity("m", (0.8, 0.2, 0.1), images=20, patch=side) for side in patches}
    assert headline_block(results) == block


def test_nothing_is_concluded_from_blocks_that_cut_through_patches():
    cut, bag = with_reliance(0.96, 0.94, 0.98), with_reliance(0.1, 0.05, 0.15)
    for dataset in (cut, bag):
        dataset.attrs["patch"] = 14
        for end in ("", "_low", "_high"):
            name = "structure_reliance" + end
            dataset[name].loc[{"block": 16}] = dataset[name].sel(block=8)
    found = answers({"cut": cut, "bag": bag}, {})
    assert [answer.word for answer in found] == ["cannot be told", "a bag of patches"]
    assert found[0].sentence.endswith(
        "but such blocks cut through its 14×14 patches, which costs a bag of patches accuracy too: measure it with blocks"
        " of 14 pixels or a multiple."
    )
    assert summary(found) == "Of 2 models, 1 is a bag of patches and 1 cannot be told with these blocks."
    assert extremes(found, 16) == ""


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.961, "96"),
        (0.0016, "0.16"),
        (0.004, "0.4"),
        (0.0, "0"),
        (1.0, "100"),
        (0.997, "99.7"),
        (0.5, "50"),
        (nan, "–"),
    ],
)
def test_percent_never_rounds_to_none_or_all(value, text):
    assert percent(value, unit=False) == text


def test_an_interval_that_is_not_there_is_not_shown():
    assert with_interval(Estimate(0.5, nan, nan)) == "50\u202f%"


def test_blocks_that_leave_a_strip_are_told():
    results = {"a": Study.sensitivity("a", (0.8, 0.2, 0.1), blocks=(8, 24, 48), images=20)}
    assert covered_note(results) == (
        "24×24 blocks cover 93\u202f% and 48×48 blocks cover 74\u202f% of the image; the rest stays as it is."
    )
    assert covered_note({"a": Study.sensitivity("a", (0.8, 0.2, 0.1), blocks=(8, 16), images=20)}) == ""
