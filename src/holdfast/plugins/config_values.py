"""Check the values of a configuration. A value and what its key takes enter; an error leaves that names the key, what
it takes and what it got."""

from __future__ import annotations

import datetime
import difflib
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

from msgspec import Meta

from holdfast.errors import UsageError
from holdfast.ondisk.decoding import is_of_type

__all__ = [
    "BOOLEAN",
    "COUNT",
    "DURATION",
    "MINUTES",
    "SECONDS",
    "SIGNALS",
    "STEPS",
    "TEXT",
    "TIME_LIMIT",
    "Wanted",
    "check_keys",
    "check_value",
    "is_dotted_name",
    "nearest",
    "of_type",
    "one_of",
    "shown",
]

# A few lines of YAML can stand for a list that fills all memory when it is written out.
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxother, _SHORT.maxstring = 2, 80, 80


class Wanted(NamedTuple):
    """What a key takes, in words and as a test."""

    words: str
    fits: Callable[[Any], bool]


def check_value(key: str, value: Any, wanted: Wanted) -> None:
    """Refuse a value that is not what its key takes."""
    if wanted.fits(value):
        return
    advice = ""
    if value is False and "'off'" in wanted.words:
        advice = 'YAML reads off as False; write "off", in quotes'
    if wanted in (DURATION, TIME_LIMIT) and _is_number(value):
        advice = "write seconds as '90s', and a time in quotes: YAML reads 3:50 as the number 230"
    raise UsageError(f"'{key}' takes {wanted.words}, not {shown(value)}", advice=advice)


def check_keys(path: str, data: Mapping[Any, Any], valid: Iterable[str], places: Mapping[str, Iterable[str]]) -> None:
    """Refuse a key that is none of these. The error names the nearest one, or the one of that name in `places`."""
    names = list(valid)
    for key in data:
        if not isinstance(key, str) or key not in names:
            raise _unknown(f"{path}." if path else "", key, names, places)


def _unknown(front: str, key: Any, names: Sequence[str], places: Mapping[str, Iterable[str]]) -> UsageError:
    problem = f"'{front}{key!s:.80}' is no key of a checkpoint config"
    near = nearest(str(key), names)
    if near is not None:
        return UsageError(problem, advice=f"did you mean '{front}{near}'?")
    elsewhere = [f"{place}.{key}" for place, keys in places.items() if key in keys]
    if elsewhere:
        return UsageError(problem, advice=f"did you mean '{elsewhere[0]}'?")
    return UsageError(problem, advice=f"use one of {', '.join(front + name for name in names)}")


def nearest(name: str, names: Iterable[str]) -> str | None:
    """Return the name that was most likely meant, if any is near."""
    return next(iter(difflib.get_close_matches(name, list(names), n=1)), None)


def shown(value: Any) -> str:
    """Return a value and its type, for a message. Short whatever the value is: a config may hold anything."""
    return f"{_SHORT.repr(value)} ({type(value).__name__})"


def is_dotted_name(text: Any) -> bool:
    """Return whether a value is a name such as `package.module`."""
    return isinstance(text, str) and all(part.isidentifier() for part in text.split("."))


def of_type(words: str, wanted: Any) -> Wanted:
    """Return what takes the values of a type as msgspec knows it, such as `Annotated[int, Meta(gt=0)]`."""
    return Wanted(words, lambda value: is_of_type(value, wanted))


def one_of(choices: tuple[str, ...]) -> Wanted:
    """Return what takes one of these texts."""
    return of_type(f"one of {', '.join(map(repr, choices))}", Literal[choices])


def _is_number(value: Any) -> bool:
    # Not by msgspec: a float of numpy is a float, too.
    return isinstance(value, int | float) and not isinstance(value, bool)


_Text = Annotated[str, Meta(min_length=1)]

TEXT = of_type("a text", _Text)
COUNT = of_type("a whole number above 0", Annotated[int, Meta(gt=0)])
BOOLEAN = of_type("true or false", bool)
MINUTES = Wanted("a positive number of minutes", lambda value: _is_number(value) and value > 0)
SECONDS = Wanted("a positive number of seconds", MINUTES.fits)
STEPS = of_type("a list of steps", list[Annotated[int, Meta(ge=0)]])
SIGNALS = of_type("the name of a signal, or a list of names", _Text | Annotated[list[_Text], Meta(min_length=1)])
# No number: many readers of YAML take 3:50 for a number of the base 60, and a run would end after 230 seconds.
DURATION = Wanted(
    "a text such as '03:50:00', '3h50m' or '90s'", lambda value: isinstance(value, datetime.time) or TEXT.fits(value)
)
TIME_LIMIT = Wanted(
    f"{DURATION.words}, {{limit, before_end}}, or true for the job's own end",
    lambda value: isinstance(value, bool | Mapping) or DURATION.fits(value),
)
