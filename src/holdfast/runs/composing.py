"""What triggers and policies share: values that users compose with `|`, checked when they are made.

Values enter; checked values, texts and errors leave.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

from holdfast.errors import UsageError
from holdfast.ondisk.paths import MAX_STEP

__all__ = [
    "NUMBER",
    "POLICY",
    "TRIGGER",
    "Kind",
    "cannot_join",
    "check_count",
    "check_interval",
    "distinct",
    "every_text",
    "nearest",
    "positive",
    "shown",
    "with_set_fields",
]

NUMBER = (int, float)

_Part = TypeVar("_Part")


class Kind(NamedTuple):
    """A family of values that compose with each other, and with no other. A class of it states it as `_kind`."""

    noun: str
    example: str


TRIGGER = Kind("trigger", "OnSignal('SIGTERM')")
POLICY = Kind("policy", "KeepLast(3)")


def cannot_join(left: object, right: object) -> UsageError:
    """Return the error for `left | right`, of which at least one is a trigger or a policy."""
    joined = f"{shown(left)} | {shown(right)}"
    kinds = [kind for kind in (_kind_of(left), _kind_of(right)) if kind is not None]
    if len(kinds) == 2:
        return UsageError(
            f"{joined} joins when to save with what to keep", advice="give the one to save= and the other to keep="
        )
    return UsageError(
        f"{joined} joins a {kinds[0].noun} with something else",
        advice=f"join it with another, such as {kinds[0].example}",
    )


def _kind_of(value: object) -> Kind | None:
    kind = getattr(type(value), "_kind", None)
    return kind if isinstance(kind, Kind) else None


def distinct(values: Iterable[_Part]) -> tuple[_Part, ...]:
    """Return the values in order, each once."""
    return tuple(dict.fromkeys(values))


def check_interval(kind: str, **given: object) -> None:
    """Raise unless exactly one of these is set, to a number that can be an interval."""
    names = [name for name, value in given.items() if value is not None]
    if len(names) != 1:
        choices = ", ".join(f"{name}=" for name in given)
        raise UsageError(
            f"{kind} takes one of {choices}, and was given {' and '.join(names) or 'none'}",
            advice=f"join several with |, such as {kind}(steps=500) | {kind}(minutes=10)",
        )
    (name,) = names
    if name == "minutes":
        _check_minutes(f"{kind}(minutes=...)", given[name])
    else:
        check_count(f"{kind}({name}=...)", given[name])


def check_count(what: str, value: object) -> None:
    """Raise unless a value is a whole number from 1 on."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_STEP:
        raise UsageError(f"{what} takes a whole number from 1 on, not {shown(value)}")


def _check_minutes(what: str, value: object) -> None:
    if positive(value) is None:
        raise UsageError(f"{what} takes a positive number, not {shown(value)}")


def positive(value: object) -> float | None:
    """Return the value as a float if it is a positive number that can be a time."""
    if isinstance(value, bool) or not isinstance(value, NUMBER) or not 0 < value <= MAX_STEP:
        return None
    return float(value)


def every_text(count: float, unit: str) -> str:
    """Return an interval in words, such as "every 10 minutes"."""
    whole = int(count) if count == int(count) else count
    return f"every {unit}" if whole == 1 else f"every {whole} {unit}s"


def nearest(given: object, names: Sequence[str], *, count: int) -> list[str]:
    """Return the names that are spelled like what was given."""
    return difflib.get_close_matches(given, names, n=count) if isinstance(given, str) else []


def shown(value: object) -> str:
    """Return a value as a message shows it."""
    # Python refuses to write a number of thousands of digits.
    if isinstance(value, int) and value.bit_length() > 512:
        return f"a number of {value.bit_length()} bits"
    return f"{value!r:.100}"


def with_set_fields(value: Any) -> str:
    """Return the `repr` of a dataclass without the fields that are None."""
    given = {field.name: getattr(value, field.name) for field in fields(value)}
    spelled = ", ".join(f"{name}={set_to!r}" for name, set_to in given.items() if set_to is not None)
    return f"{type(value).__name__}({spelled})"
