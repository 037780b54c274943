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
    "cut": "cannot be told",
    "undefined": "undefined",
}
# What is known all the same where an interval reaches across one line only.
HALF_SETTLED = {"above": "structure, or both", "below": "patches, or both"}


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
        return HALF_SETTLED.get(half_settled(self.reliance), WORDS["open"]) if self._open else WORDS[self.verdict]

    @property
    def kind(self) -> str:
        """By what models are counted: the verdict, or on which side of one line an open one lies."""
        return (half_settled(self.reliance) if self._open else "") or self.verdict

    @property
    def _open(self) -> bool:
        return self.verdict == "open"


def headline_block(results: Results) -> int:
    """The smallest that all have and that leaves the patches of all whole, from 8×8 on, of which the paper speaks first;
    where none does, one that is no smaller than any patch."""
    common = set.intersection(*(set(blocks({name: dataset})) for name, dataset in results.items()))
    sizes = sorted(common) or blocks(results)
    sizes = [block for block in sizes if block >= 8] or sizes[-1:]
    patches = [int(side) for side in (attribute(one, "patch") for one in results.values()) if isfinite(side)]
    whole = [block for block in sizes if not any(block % side for side in patches)]
    large = [block for block in sizes if block >= max(patches, default=0)]
    return (whole or large or sizes[-1:])[0]


def cut_patch(dataset: xr.Dataset, block: int) -> int | None:
    """The side of the model's patches if blocks of this size cut through them."""
    side = attribute(dataset, "patch")
    return int(side) if isfinite(side) and block % side else None


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


def half_settled(reliance: Estimate) -> str:
    """What an interval that reaches across one line leaves: "above" the lower or "below" the upper one, or nothing.

    >>> half_settled(Estimate(0.73, 0.69, 0.78)), half_settled(Estimate(0.5, 0.2, 0.8))
    ('above', '')
    """
    return "above" if reliance.low > BAG else "below" if reliance.high < STRUCTURE else ""


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
        "above": ("uses structure, alone or beside patches", "use structure, alone or beside patches"),
        "both": ("uses structure and patches alike", "use structure and patches alike"),
        "below": ("uses patches, alone or beside structure", "use patches, alone or beside structure"),
        "bag": ("is a bag of patches", "are bags of patches"),
        "open": ("is not settled by this many images", "are not settled by this many images"),
        "cut": ("cannot be told with these blocks", "cannot be told with these blocks"),
        "undefined": ("cannot be judged", "cannot be judged"),
    }
    counts = {key: sum(answer.kind == key for answer in found) for key in phrases}
    parts = [f"{count} {phrases[key][count > 1]}" for key, count in counts.items() if count]
    return f"Of {len(found)} models, {listing(parts)}."


def extremes(found: list[Answer], block: int) -> str:
    """Who relies most and who least, each with its interval."""
    defined = [answer for answer in found if answer.reliance.defined and answer.verdict != "cut"]
    if len(defined) < 2:
        return ""
    most, least = defined[0], defined[-1]
    return (
        f"When every {square(block)} block is shuffled, {most.model} loses the largest share of its above-chance"
        f" accuracy, {with_interval(most.reliance)}, and {least.model} the smallest, {with_interval(least.reliance)}."
    )


def _answer(name: str, dataset: xr.Dataset, block: int, paste: xr.Dataset | None) -> Answer:
    reliance = estimate(dataset, "structure_reliance", block=block)
    decided = verdict(reliance)
    if decided not in ("undefined", "bag") and cut_patch(dataset, block):
        decided = "cut"
    parts = [] if decided == "cut" else _parts_alone(dataset, reliance)
    more = [*parts, *_other_block(dataset, block), *_clean(dataset), *_paste(paste)]
    return Answer(name, decided, _sentence(dataset, reliance, decided, block), tuple(more), reliance)


def _sentence(dataset: xr.Dataset, reliance: Estimate, decided: str, block: int) -> str:
    if decided == "undefined":
        return f"cannot be judged: {undefined_because(dataset, kind='shuffle', block=block)}."
    kept = Estimate(1 - reliance.value, 1 - reliance.high, 1 - reliance.low)
    when = f"of its above-chance accuracy when every {square(block)} block is shuffled"
    if decided == "bag":
        return f"keeps {with_interval(kept)} {when}: a bag of patches."
    patch = cut_patch(dataset, block)
    if patch and decided == "cut":
        return (
            f"loses {with_interval(reliance)} {when}, but such blocks cut through its {square(patch)} patches, which costs"
            f" a bag of patches accuracy too: measure it with blocks of {patch} pixels or a multiple."
        )
    if decided == "open":
        if side := half_settled(reliance):
            known = {"above": "no bag of patches", "below": "no rigid template"}[side]
            alone = {"above": "structure", "below": "patches"}[side]
            line = percent(STRUCTURE if side == "above" else BAG)
            return (
                f"loses {with_interval(reliance)} {when}: it is {known}; the interval reaches across {line}, so it uses"
                f" {alone} alone or both."
            )
        lines = listing(percent(line) for line in (BAG, STRUCTURE) if reliance.low <= line <= reliance.high)
        return f"loses {with_interval(reliance)} {when}: the interval reaches across {lines}, so it is not settled."
    ending = {
        "structure": "it sees structure.",
        "both": "it uses structure, but patches alone still take it part of the way.",
    }[decided]
    return f"loses {with_interval(reliance)} {when}: {ending}"


def _parts_alone(dataset: xr.Dataset, reliance: Estimate) -> list[str]:
    """Where the best bag of patches is known: what falling back on the parts would look like, and whether it does."""
    clean, chance, bag = clean_accuracy(dataset), attribute(dataset, "chance"), attribute(dataset, "bag_accuracy")
    if not (reliance.bounded and clean.low > bag > chance):
        return []
    level = (clean.value - bag) / (clean.value - chance)
    if reliance.low > level:
        found = "It loses more, so once they are displaced it cannot use all of its parts either"
    elif reliance.high < level:
        found = "It loses less, so what is whole inside a block still helps it"
    else:
        found = "It does, within its interval"
    return [f"Left with the parts alone it would lose {percent(level)}. {found}."]


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
