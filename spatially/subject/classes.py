"""In which classes a model answers, and how its answers become answers in the classes of the data.

A data class that stands for several classes of the model (dog for 118 breeds) gets the probability of their union. With
p = softmax(z), that is a sum of exp(z), so its logit is logsumexp over its members:

    z_class = log Σ_{i in members(class)} exp(z_i)

A class with one member keeps its logit, and when every class of the model is in exactly one data class the softmax of the
new logits is the sum of the old probabilities. An alignment that averages takes the mean over the members instead,
z_class − log(number of members), so that classes with many members have no head start.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from spatially.errors import UserError

Members = tuple[tuple[int, ...], ...]

ADVICE = (
    "say which of the model's classes each data class means with class_map=FILE (--class-map FILE), "
    'a JSON file such as {"dog": [151, 152], "cat": "tabby"}: class of the data to index, indices or name in the model'
)


@dataclass(frozen=True)
class ClassNames:
    """The names of a model's classes, in its order: as words, and as WordNet synsets when it knows ImageNet."""

    names: tuple[str, ...] | None = None
    synsets: tuple[str, ...] | None = None

    def schemes(self) -> list[tuple[str, tuple[str, ...]]]:
        """Each way the classes are called, best known first."""
        found = []
        if self.names is not None:
            found.append(("names", self.names))
        if self.synsets is not None:
            found.append(("synsets", self.synsets))
        return found


@dataclass(frozen=True)
class Alignment:
    """The data's classes, and the model's classes that each of them means. `rule` says how they were found."""

    rule: str
    names: tuple[str, ...] | None
    members: Members | None = None  # None: the model's classes as they are
    average: bool = False  # a class has the mean probability of its members, not the sum
    _index: dict[torch.device, tuple[Tensor, Tensor]] = field(default_factory=dict, compare=False, repr=False)

    def __call__(self, logits: Tensor) -> Tensor:
        """Logits in the data's classes: (batch, model classes) to (batch, data classes)."""
        if self.members is None:
            return logits
        index, absent = self._padded(logits.device)
        if index.shape[1] == 1:
            return logits[:, index[:, 0]]
        united = logits[:, index].masked_fill(absent, -torch.inf).logsumexp(dim=-1)
        return united - (~absent).sum(dim=-1).log() if self.average else united

    def describe(self) -> dict[str, Any]:
        facts: dict[str, Any] = {"class_mapping": self.rule}
        if self.average:
            facts["class_aggregation"] = "mean"
        if self.members is not None and self.names is not None:
            facts["class_members"] = json.dumps(dict(zip(self.names, self.members, strict=True)), ensure_ascii=False)
        return facts

    def _padded(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Members as one rectangle (classes, longest), and where it is only padding."""
        if device not in self._index:
            members = self.members or ()
            longest = max(len(indices) for indices in members)
            rows = [[*indices, *[indices[0]] * (longest - len(indices))] for indices in members]
            absent = [[position >= len(indices) for position in range(longest)] for indices in members]
            # kept for later calls, which may want gradients even if this one does not
            with torch.inference_mode(False):
                self._index[device] = (torch.tensor(rows, device=device), torch.tensor(absent, device=device))
        return self._index[device]


def imagenet(number: int) -> ClassNames:
    """Names and synsets of the ImageNet with this many classes (1k, 12k, 21k, 22k), if there is one."""
    from timm.data import ImageNetInfo, infer_imagenet_subset

    subset = infer_imagenet_subset({"num_classes": number})
    if subset is None:
        return ClassNames()
    information = ImageNetInfo(subset)
    # a description lists synonyms ("tench, Tinca tinca"); the first is the usual one
    words = tuple(description.split(",")[0] for description in information.label_descriptions())
    return ClassNames(words, tuple(information.label_names()))


def read_class_map(given: str | Path | Mapping[str, Any]) -> dict[str, Any]:
    """A class map from a JSON file or a dictionary, its shape checked but not yet its names."""
    content: Any = given
    if isinstance(given, str | Path):
        try:
            content = json.loads(Path(given).read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"class_map: {given} cannot be read ({error.strerror or error})") from error
        except ValueError as error:
            raise UserError(f"class_map: {given} is not JSON ({error})") from error
    if not isinstance(content, Mapping) or not content:
        raise UserError(
            f"class_map: must map class names to indices or names, got {type(content).__name__} {content!r}"
        )
    wrong = [name for name, value in content.items() if not _is_member_list(value)]
    if wrong:
        raise UserError(
            f"class_map: each value must be an index, a list of indices or a name of a class of the model; "
            f"not so for {_listed(wrong)}"
        )
    return {str(name): value for name, value in content.items()}


def align(
    model: str,
    known: ClassNames,
    answers: int,
    classes: Sequence[str] | None,
    labels: Tensor | np.ndarray | Sequence[int],
    class_map: Mapping[str, Any] | None = None,
) -> Alignment:
    """How a model that answers in `answers` classes answers about data with these classes and labels.

    In this order: the user's class map; data without class names, whose labels are the model's indices; data whose class
    names are all among the model's names or ImageNet's synsets; numbered folders ("0" to "999") of a model whose classes
    have names, as indices; names the model does not know at all but as many as it has, in its order.
    """
    if answers == 0:
        raise UserError(f"{model} has no classifier: give num_classes=NUMBER and checkpoint=FILE with trained weights")
    if class_map is not None:
        found = _by_class_map(known, answers, classes, class_map)
    elif classes is None:
        found = Alignment("identity", known.names)
    else:
        found = _by_names(model, known, answers, tuple(str(name) for name in classes))
    _check_labels(labels, answers if found.members is None else len(found.members), model)
    return found


def _by_class_map(
    known: ClassNames, answers: int, classes: Sequence[str] | None, class_map: Mapping[str, Any]
) -> Alignment:
    names = [str(number) for number in range(len(class_map))] if classes is None else [str(name) for name in classes]
    missing = [name for name in names if name not in class_map]
    extra = [name for name in class_map if name not in set(names)]
    if missing or extra:
        whose = "the data (whose classes have no names: use 0, 1, 2, …)" if classes is None else "the data"
        parts = [f"no entry for {_listed(missing)}"] * bool(missing)
        parts += [f"{_listed(extra)} not among the classes of {whose}"] * bool(extra)
        raise UserError(f"class_map: {'; '.join(parts)}")
    members = []
    wrong = []
    for name in names:
        value = class_map[name]
        indices = [_find(known, item) for item in (value if isinstance(value, list | tuple) else [value])]
        if any(index is None or not 0 <= index < answers for index in indices):
            wrong.append(f"{name}: {value}")
        members.append(tuple(dict.fromkeys(index for index in indices if index is not None)))
    if wrong:
        raise UserError(
            f"class_map: {_listed(wrong)} — must be indices from 0 to {answers - 1} or names of the model's classes"
            + ("" if known.schemes() else ", and this model's classes have no names")
        )
    return Alignment("class_map", tuple(names), tuple(members))


def _by_names(model: str, known: ClassNames, answers: int, classes: tuple[str, ...]) -> Alignment:
    identity = Alignment("identity", classes)
    best: list[str] = list(classes)
    for rule, names in known.schemes():
        if classes == names:
            return identity
        index = _unambiguous(names)
        missing = [name for name in classes if _key(name) not in index]
        if not missing:
            chosen = [index[_key(name)] for name in classes]
            if chosen == list(range(answers)):
                return identity
            if len(set(chosen)) == len(chosen):
                return Alignment(rule, classes, tuple((position,) for position in chosen))
        best = min(best, missing, key=len)
    if known.schemes() and all(name.isascii() and name.isdigit() and int(name) < answers for name in classes):
        numbers = [int(name) for name in classes]
        if numbers == list(range(answers)):
            return identity
        if len(set(numbers)) == len(numbers):
            return Alignment("indices", classes, tuple((number,) for number in numbers))
    if len(classes) == answers and len(best) == len(classes):
        return Alignment("order", classes) if known.schemes() else identity
    if len(classes) > answers:
        raise UserError(
            f"the data has {len(classes)} classes, {model} answers in {answers}: it cannot be measured on them"
        )
    unknown = "no class" if not known.schemes() else f"no one class called {_listed(best)}"
    raise UserError(f"the data has {len(classes)} classes, {model} answers in {answers} and has {unknown}: {ADVICE}")


def _check_labels(labels: Tensor | np.ndarray | Sequence[int], answers: int, model: str) -> None:
    values = np.asarray(labels.detach().cpu() if isinstance(labels, Tensor) else labels)
    if values.size and (values.min() < 0 or values.max() >= answers):
        raise UserError(
            f"labels: must be from 0 to {answers - 1}, the classes {model} answers in, "
            f"got {values.min()} to {values.max()}"
        )


def _find(known: ClassNames, item: Any) -> int | None:
    if isinstance(item, int):
        return item
    for _, names in known.schemes():
        index = _unambiguous(names)
        if _key(item) in index:
            return index[_key(item)]
    return None


def _unambiguous(names: tuple[str, ...]) -> dict[str, int]:
    """Index of each name that only one class bears (ImageNet has a crane that flies and a crane that lifts)."""
    index: dict[str, int] = {}
    twice = set()
    for position, name in enumerate(names):
        if _key(name) in index:
            twice.add(_key(name))
        index[_key(name)] = position
    return {key: position for key, position in index.items() if key not in twice}


def _key(name: str) -> str:
    """Folder names write spaces as underscores and differ in capitals."""
    return str(name).strip().casefold().replace("_", " ")


def _is_member_list(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and all(_is_member_list(item) and not isinstance(item, list | tuple) for item in value)
    return isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool))


def _listed(names: Sequence[str], most: int = 8) -> str:
    shown = ", ".join(repr(name) for name in names[:most])
    return shown + (f" and {len(names) - most} more" if len(names) > most else "")
