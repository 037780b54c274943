"""Settings that check themselves: nested frozen dataclasses whose every value has the type and the range it says.

An unknown key is an error that names the nearest valid one; a wrong value, one that names the key, what is allowed and what
came. Ranges stand beside the fields: `rate: float = setting(0.1, least=0, most=1)`.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import types
from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

from spatially.errors import UserError, unknown

REQUIRED: Any = dataclasses.MISSING
_WITHIN = {"least": operator.ge, "above": operator.gt, "most": operator.le, "below": operator.lt}


def setting(
    default: Any = REQUIRED,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    below: float | None = None,
) -> Any:
    """A field of settings with its default and the range of its numbers."""
    bounds = {"least": least, "above": above, "most": most, "below": below}
    return dataclasses.field(default=default, metadata={name: end for name, end in bounds.items() if end is not None})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """Base of every group of settings; `section` is the group's name in messages."""

    section: ClassVar[str] = ""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in dataclasses.fields(self):
            key = f"{self.section}.{field.name}" if self.section else field.name
            value = _value(hints[field.name], getattr(self, field.name), key, field.metadata)
            object.__setattr__(self, field.name, value)
        self.check()

    def check(self) -> None:
        """What must hold between several values; overridden where something must."""

    @classmethod
    def read(cls, values: Any) -> Self:
        """From plain data as YAML holds it."""
        if isinstance(values, cls):
            return values
        named = cls.section or "a recipe"
        if not isinstance(values, Mapping):
            raise UserError(f"{named} must be given as key: value, but came as {values!r}")
        fields = {field.name: field for field in dataclasses.fields(cls)}
        for key in values:
            if key not in fields:
                raise unknown(f"key of {named}", str(key), fields) if cls.section else _unknown_key(cls, str(key))
        missing = [
            name
            for name, field in fields.items()
            if name not in values and field.default is REQUIRED and field.default_factory is REQUIRED
        ]
        if missing:
            raise UserError(f"{named} lacks {', '.join(missing)}")
        return cls(**{str(key): value for key, value in values.items()})

    def describe(self) -> dict[str, Any]:
        """As plain data, for YAML."""
        return {field.name: _plain(getattr(self, field.name)) for field in dataclasses.fields(self)}

    def override(self, changes: Mapping[str, Any]) -> Self:
        """With values changed by their dotted keys: `{"optimiser.lr": 0.1}`."""
        content = self.describe()
        for key, value in changes.items():
            *path, last = key.split(".")
            place: Any = content
            for step in path:
                if not isinstance(place, dict) or step not in place:
                    raise _unknown_key(type(self), key)
                if place[step] is None:
                    place[step] = {}
                place = place[step]
            if not isinstance(place, dict):
                raise _unknown_key(type(self), key)
            place[last] = value
        return type(self).read(content)


def _unknown_key(kind: type[Settings], key: str) -> UserError:
    """The error for a key that does not exist: the group is missing from it, or is wrong, or nothing is like it."""
    every, groups = _keys(kind), [field.name for field in dataclasses.fields(kind)]
    named = [one for one in every if one.rpartition(".")[2] == key]
    if named:
        return UserError(f"unknown key {key!r}: did you mean {' or '.join(map(repr, named))}?")
    near = get_close_matches(key, every, n=1, cutoff=0.5)
    return unknown("key", key, every if near and "." in key else groups)


def _keys(kind: type[Settings], prefix: str = "") -> list[str]:
    """Every dotted key below a group."""
    keys: list[str] = []
    for name, hint in get_type_hints(kind).items():
        inner = next((one for one in (hint, *get_args(hint)) if _is_settings(one)), None)
        if get_origin(hint) is ClassVar or name.startswith("_"):
            continue
        keys += _keys(inner, f"{prefix}{name}.") if inner else [prefix + name]
    return keys


def _is_settings(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Settings)


def _plain(value: Any) -> Any:
    if isinstance(value, Settings):
        return value.describe()
    if isinstance(value, Mapping):
        return {key: _plain(one) for key, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, tuple) else value


def _value(hint: Any, value: Any, key: str, bounds: Mapping[str, float]) -> Any:
    """`value` as the type that `hint` asks for, or an error that says so."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        kinds = [one for one in inner if one is not type(None)]
        assert len(kinds) == 1, f"{key}: a setting has one type, and possibly None"
        return _value(kinds[0], value, key, bounds)
    if _is_settings(hint):
        return hint.read(value)
    if origin is Literal:
        if value not in inner or isinstance(value, bool):
            raise _wrong(key, f"one of {', '.join(map(str, inner))}", value)
        return value
    if origin is tuple:
        return _values(inner, value, key, bounds)
    if origin is not None and isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise _wrong(key, "name: value", value)
        return dict(value)
    if hint is bool or hint is str:
        if not isinstance(value, hint):
            raise _wrong(key, "true or false" if hint is bool else "a word", value)
        return value
    return _number(hint, value, key, bounds)


def _values(kinds: tuple[Any, ...], value: Any, key: str, bounds: Mapping[str, float]) -> tuple[Any, ...]:
    several = len(kinds) == 2 and kinds[1] is Ellipsis
    if not isinstance(value, list | tuple) or (not several and len(value) != len(kinds)):
        raise _wrong(key, "a list" if several else f"a list of {len(kinds)}", value)
    wanted = [kinds[0]] * len(value) if several else kinds
    return tuple(_value(kind, one, key, bounds) for kind, one in zip(wanted, value, strict=True))


def _number(kind: type, value: Any, key: str, bounds: Mapping[str, float]) -> Any:
    allowed = _allowed(kind, bounds)
    if isinstance(value, str):  # YAML reads 5e-4 as a word
        try:
            value = float(value)
        except ValueError:
            raise _wrong(key, allowed, value) from None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(key, allowed, value)
    if isinstance(value, float) and not math.isfinite(value):
        raise _wrong(key, allowed, value)
    if kind is int and value != int(value):
        raise _wrong(key, allowed, value)
    if not all(_WITHIN[name](value, end) for name, end in bounds.items()):
        raise _wrong(key, allowed, value)
    try:
        return kind(value)
    except OverflowError:
        raise _wrong(key, allowed, value) from None


def _allowed(kind: type, bounds: Mapping[str, float]) -> str:
    words = {"least": "at least", "above": "above", "most": "at most", "below": "below"}
    ends = [f"{words[name]} {end if isinstance(end, int) else f'{end:g}'}" for name, end in bounds.items()]
    return " ".join(["a whole number" if kind is int else "a number", " and ".join(ends)]).strip()


def _wrong(key: str, allowed: str, value: Any) -> UserError:
    return UserError(f"{key} must be {allowed}, but came as {value!r}")
