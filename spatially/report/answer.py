"""The answer in plain words, computed from the results: does this model see structure, or a bag of patches?"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite

import xarray as xr

from spatially.drawing.values import (
    Estimate,
    Results,
    attribute,
    blocks,
    clean_accuracy,
    estimate,
    listing,
    percent,
    square,
    undefined_because,
    with_interval,
)

# Where the words change. Stated on the page; a verdict is given only if the whole interval lies on one side.
BAG, STRUCTURE = 0.25, 0.75

WORDS = {
    "structure": "sees structure",
    "both": "uses both",
    "bag": "a bag of patches",
    "open": "not settled",
    "undefined": "undefined",
}


@dataclass(frozen=True)
class Answer:
    """What the page says about one model, and where its dot stands on the ruler."""

    model: str
    verdict: str  # a key of WORDS
    sentence: str
    more: tuple[str, ...]
    reliance: Estimate

    @property
    def word(self) -> str:
        return WORDS[self.verdict]


def headline_block(results: Results) -> int:
    """The paper speaks of 8×8 blocks first; smaller ones cut through the patches themselves."""
    common = set.intersection(*(set(blocks({name: dataset})) for name, dataset in results.items()))
    sizes = sorted(common) or blocks(results)
    return next((block for block in sizes if block >= 8), sizes[-1])


def verdict(reliance: Estimate) -> str:
    """By the interval where there is one, by the value alone where there is none.

    >>> verdict(Estimate(0.96, 0.94, 0.98)), verdict(Estimate(0.76, 0.7, 0.8)), verdict(Estimate(0.1, 0.0, 0.2))
    ('structure', 'open', 'bag')
    """
    if not reliance.defined:
        return "undefined"
    low, high = (reliance.low, reliance.high) if reliance.bounded else (reliance.value, reliance.value)
    if low >= STRUCTURE:
        return "structure"
    if high <= BAG:
        return "bag"
    return "both" if low > BAG and high < STRUCTURE else "open"


def answers(sensitivity: Results, paste: Results) -> list[Answer]:
    """One a model, the most reliant on structure first, undefined ones last."""
    block = headline_block(sensitivity)
    found = [_answer(name, dataset, block, paste.get(name)) for name, dataset in sensitivity.items()]
    return sorted(found, key=lambda answer: -answer.reliance.value if answer.reliance.defined else 1)


def summary(found: list[Answer]) -> str:
    """All models in one sentence."""
    if len(found) == 1:
        return ""
    phrases = {
        "structure": ("sees structure", "see structure"),
        "both": ("uses structure and patches alike", "use structure and patches alike"),
        "bag": ("is a bag of patches", "are bags of patches"),
        "open": ("is not settled by this many images", "are not settled by this many images"),
        "undefined": ("cannot be judged", "cannot be judged"),
    }
    counts = {key: sum(answer.verdict == key for answer in found) for key in phrases}
    parts = [f"{count} {phrases[key][count > 1]}" for key, count in counts.items() if count]
    return f"Of {len(found)} models, {listing(parts)}."


def _answer(name: str, dataset: xr.Dataset, block: int, paste: xr.Dataset | None) -> Answer:
    reliance = estimate(dataset, "structure_reliance", block=block)
    decided = verdict(reliance)
    more = [*_other_block(dataset, block), *_clean(dataset), *_paste(paste)]
    return Answer(name, decided, _sentence(dataset, reliance, decided, block), tuple(more), reliance)


def _sentence(dataset: xr.Dataset, reliance: Estimate, decided: str, block: int) -> str:
    if decided == "undefined":
        return f"cannot be judged: {undefined_because(dataset, kind='shuffle', block=block)}."
    kept = Estimate(1 - reliance.value, 1 - reliance.high, 1 - reliance.low)
    when = f"of its above-chance accuracy when every {square(block)} block is shuffled"
    if decided == "bag":
        return f"keeps {with_interval(kept)} {when}: a bag of patches."
    if decided == "open":
        lines = listing(percent(line) for line in (BAG, STRUCTURE) if reliance.low <= line <= reliance.high)
        return f"loses {with_interval(reliance)} {when}: the interval reaches across {lines}, so it is not settled."
    ending = {
        "structure": "it sees structure.",
        "both": "it uses structure, but patches alone still take it part of the way.",
    }[decided]
    return f"loses {with_interval(reliance)} {when}: {ending}"


def _other_block(dataset: xr.Dataset, block: int) -> list[str]:
    largest = max(blocks({"": dataset}))
    found = estimate(dataset, "structure_reliance", block=largest)
    if largest == block or not found.defined:
        return []
    return [f"With {square(largest)} blocks it loses {with_interval(found)}."]


def _clean(dataset: xr.Dataset) -> list[str]:
    found, chance = clean_accuracy(dataset), attribute(dataset, "chance")
    if not found.defined:
        return []
    beside = f" (chance {percent(chance)})" if isfinite(chance) else ""
    return [f"Clean images: {with_interval(found)} right{beside}."]


def _paste(dataset: xr.Dataset | None) -> list[str]:
    if dataset is None:
        return []
    host, guest = estimate(dataset, "host_rate"), estimate(dataset, "guest_rate")
    if not (host.defined and guest.defined):
        return []
    return [
        f"Shown a clean image pasted into a shuffled one, it names the shuffled one in {with_interval(host)} of cases"
        f" and the clean one in {with_interval(guest)}."
    ]


def paste_only(paste: Results) -> Mapping[str, str]:
    """For a study without the sensitivity probe."""
    return {name: " ".join(_paste(dataset)) for name, dataset in paste.items()}
