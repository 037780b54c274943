"""What a user did that cannot work, said so that they know what to do next."""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """A mistake the user can mend. The command line prints it as one line and exits with code 2."""


class NotApplicable(UserError):
    """A measurement that this model has nothing for, such as attention in a network of convolutions."""


def first_line(error: BaseException) -> str:
    r"""An error's message in one line; its type where it has none.

    >>> first_line(AssertionError()), first_line(ValueError("this\nthat"))
    ('AssertionError', 'this')
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def unknown(what: str, given: str, allowed: Iterable[str], *, hint: str = "") -> UserError:
    """The error for a name that does not exist, naming the nearest ones that do.

    >>> str(unknown("probe", "sensitvity", ["paste", "sensitivity"]))
    "unknown probe 'sensitvity': did you mean 'sensitivity'?"
    >>> str(unknown("recipe", "x", ["deit", "swin"], hint="One of your own is a file."))
    "unknown recipe 'x': choose from deit, swin. One of your own is a file."
    """
    allowed = list(allowed)
    lowered = {name.lower(): name for name in allowed}
    nearest = [lowered[name] for name in get_close_matches(given.lower(), list(lowered), n=3, cutoff=0.5)]
    if nearest:
        advice = f"did you mean {' or '.join(repr(name) for name in nearest)}?"
    elif len(allowed) <= 16:
        advice = f"choose from {', '.join(allowed)}"
    else:
        advice = f"{len(allowed)} are known"
    if hint[:1].isupper() and not advice.endswith("?"):
        advice += "."
    return UserError(f"unknown {what} {given!r}: {advice}" + (f" {hint}" if hint else ""))
