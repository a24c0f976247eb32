"""When to save, as values that compose with `|`. A moment enters, a wish leaves.

Knows no clock, no signal handler and no rank: the caller passes the moment. Of the environment it reads one variable,
the end of the job, when a TimeLimit is made.

    save=Every(steps=500) | Every(minutes=10) | OnSignal("SIGTERM")
"""

from __future__ import annotations

import os
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import ClassVar, NamedTuple, NoReturn

from holdfast.errors import UsageError
from holdfast.ondisk.paths import as_integer, check_step
from holdfast.runs.composing import (
    TRIGGER,
    Kind,
    cannot_join,
    check_count,
    check_interval,
    distinct,
    every_text,
    nearest,
    positive,
    shown,
    with_set_fields,
)

__all__ = [
    "AnyOf",
    "At",
    "Every",
    "Moment",
    "OnLastStep",
    "OnSignal",
    "TimeLimit",
    "Trigger",
    "Wish",
    "split",
]

JOB_END_VARIABLE = "SLURM_JOB_END_TIME"

Duration = str | int | float | timedelta

_UNCATCHABLE = ("SIGKILL", "SIGSTOP")
_USUAL_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_CLOCK = re.compile(r"(?:([0-9]{1,6})[-:])?([0-9]{1,9}):([0-5][0-9]):([0-5][0-9])", re.ASCII)
_UNITS = re.compile(
    r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9}(?:\.[0-9]{1,40})?)s)?", re.ASCII
)


class Moment(NamedTuple):
    """The state of a training after a step. `epoch` is the number of completed epochs, `last_epoch` that of the step
    before; the clocks and the signals are the leader's."""

    step: int
    epoch: int | None = None
    last_epoch: int | None = None
    seconds_since_save: float = 0.0
    seconds_running: float = 0.0
    wall_seconds: float = 0.0
    signals: frozenset[str] = frozenset()


class Wish(NamedTuple):
    """What a trigger asks for at a moment: save and go on, or save and stop; and why."""

    save: bool
    stop: bool
    reasons: tuple[str, ...]


_NOTHING = Wish(False, False, ())


class Trigger(ABC):
    """When to save. `a | b` fires when one of them does."""

    __slots__ = ()
    _kind: ClassVar[Kind] = TRIGGER

    @abstractmethod
    def wish(self, moment: Moment) -> Wish:
        """Return what it asks for at a moment."""

    @property
    def by_step(self) -> bool:
        """Return whether step and epoch alone decide: then every rank decides the same without communication."""
        return False

    @property
    def needs_epoch(self) -> bool:
        """Return whether it, or a part of it, can never fire for a caller that names no epoch."""
        return False

    @property
    def signals(self) -> frozenset[str]:
        """Return the signals that must be handled for it."""
        return frozenset()

    def parts(self) -> tuple[Trigger, ...]:
        return (self,)

    def __or__(self, other: Trigger) -> Trigger:
        if not isinstance(other, Trigger):
            raise cannot_join(self, other)
        return _any_of((*self.parts(), *other.parts()))

    def __ror__(self, other: object) -> NoReturn:
        raise cannot_join(other, self)


def split(trigger: Trigger | None) -> tuple[Trigger | None, Trigger | None]:
    """Return the part that the step alone decides, on every rank alike, and the part that the leader decides."""
    parts = trigger.parts() if trigger is not None else ()
    by_step = [part for part in parts if part.by_step]
    by_leader = [part for part in parts if not part.by_step]
    return (_any_of(by_step) if by_step else None), (_any_of(by_leader) if by_leader else None)


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Every(Trigger):
    """Every so many steps, epochs or minutes; one of them. The minutes count from the last save."""

    steps: int | None = None
    epochs: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        check_interval("Every", steps=self.steps, epochs=self.epochs, minutes=self.minutes)

    def __repr__(self) -> str:
        return with_set_fields(self)

    @property
    def by_step(self) -> bool:
        return self.minutes is None

    @property
    def needs_epoch(self) -> bool:
        return self.epochs is not None

    def wish(self, moment: Moment) -> Wish:
        if self.steps is not None and moment.step > 0 and moment.step % self.steps == 0:
            return _save_for(every_text(self.steps, "step"))
        if self.epochs is not None and _passed(moment, self.epochs):
            return _save_for(every_text(self.epochs, "epoch"))
        if self.minutes is not None and moment.seconds_since_save >= self.minutes * 60:
            return _save_for(every_text(self.minutes, "minute"))
        return _NOTHING


@dataclass(frozen=True, slots=True, repr=False, init=False)
class At(Trigger):
    """At these steps: `At(100, 1000)` or `At([100, 1000])`."""

    steps: frozenset[int]

    def __init__(self, *steps: int | Iterable[int]) -> None:
        given: Iterable[object] = steps
        one = steps[0] if len(steps) == 1 else None
        # A tensor of one integer is a step, though torch calls every tensor iterable.
        if isinstance(one, Iterable) and not isinstance(one, str | bytes) and as_integer(one) is None:
            given = one
        _set(self, steps=frozenset(check_step(step) for step in given))
        if not self.steps:
            raise UsageError("At() names no step", advice="give it steps, such as At(100, 1000)")

    def __repr__(self) -> str:
        return f"At({', '.join(map(str, sorted(self.steps)))})"

    @property
    def by_step(self) -> bool:
        return True

    def wish(self, moment: Moment) -> Wish:
        return _save_for(f"at step {moment.step}") if moment.step in self.steps else _NOTHING


@dataclass(frozen=True, slots=True)
class OnLastStep(Trigger):
    """After the last of `total` steps, which is number `total - 1`."""

    total: int

    def __post_init__(self) -> None:
        check_count("OnLastStep(total)", self.total)

    @property
    def by_step(self) -> bool:
        return True

    def wish(self, moment: Moment) -> Wish:
        return _save_for("the last step") if moment.step == self.total - 1 else _NOTHING


@dataclass(frozen=True, slots=True, repr=False, init=False)
class OnSignal(Trigger):
    """When one of these signals has come: save, and stop. `OnSignal("SIGTERM", "USR1", signal.SIGINT)`.

    One that came to another rank than 0 is acted on no later than at the first `step` that rank 0 begins more than
    0.1 s after that rank's own.
    """

    names: tuple[str, ...]

    def __init__(self, *names: str | signal.Signals) -> None:
        if not names:
            raise UsageError("OnSignal() names no signal", advice='give it one, such as OnSignal("SIGTERM")')
        _set(self, names=distinct(_signal_name(name) for name in names))

    def __repr__(self) -> str:
        return f"OnSignal({', '.join(map(repr, self.names))})"

    @property
    def signals(self) -> frozenset[str]:
        return frozenset(self.names)

    def wish(self, moment: Moment) -> Wish:
        return _stop_for([name for name in self.names if name in moment.signals])


@dataclass(frozen=True, slots=True, repr=False, init=False)
class TimeLimit(Trigger):
    """When the run has taken `limit`, or when the job's end is `before_end` away: save, and stop.

    The job's end is SLURM_JOB_END_TIME as it was when the trigger was made. Without a limit there must be one.
    """

    limit_seconds: float | None
    before_end_seconds: float
    end_seconds: float | None

    def __init__(self, limit: Duration | None = None, *, before_end: Duration = "00:05:00") -> None:
        _set(
            self,
            limit_seconds=None if limit is None else _seconds("limit", limit),
            before_end_seconds=_seconds("before_end", before_end),
            end_seconds=_job_end(os.environ.get(JOB_END_VARIABLE, "")),
        )
        if self.limit_seconds is None and self.end_seconds is None:
            raise UsageError(
                f"TimeLimit() has no limit, and {JOB_END_VARIABLE} is not set",
                advice='give it one, such as TimeLimit("03:50:00")',
            )

    def __repr__(self) -> str:
        limit = "" if self.limit_seconds is None else f"{_duration(self.limit_seconds)!r}, "
        return f"TimeLimit({limit}before_end={_duration(self.before_end_seconds)!r})"

    def wish(self, moment: Moment) -> Wish:
        reasons = []
        if self.limit_seconds is not None and moment.seconds_running >= self.limit_seconds:
            reasons.append(f"time limit of {_duration(self.limit_seconds)}")
        if self.end_seconds is not None and moment.wall_seconds >= self.end_seconds - self.before_end_seconds:
            reasons.append(f"the job ends within {_duration(self.before_end_seconds)}")
        return _stop_for(reasons)


@dataclass(frozen=True, slots=True, repr=False)
class AnyOf(Trigger):
    """Triggers joined by `|`, which makes it: flat, and none of them twice."""

    triggers: tuple[Trigger, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.triggers))

    @property
    def by_step(self) -> bool:
        return all(trigger.by_step for trigger in self.triggers)

    @property
    def needs_epoch(self) -> bool:
        return any(trigger.needs_epoch for trigger in self.triggers)

    @property
    def signals(self) -> frozenset[str]:
        return frozenset().union(*(trigger.signals for trigger in self.triggers))

    def parts(self) -> tuple[Trigger, ...]:
        return self.triggers

    def wish(self, moment: Moment) -> Wish:
        wishes = [trigger.wish(moment) for trigger in self.triggers]
        reasons = distinct(reason for wish in wishes for reason in wish.reasons)
        return Wish(any(wish.save for wish in wishes), any(wish.stop for wish in wishes), reasons)


def _save_for(reason: str) -> Wish:
    return Wish(True, False, (reason,))


def _stop_for(reasons: Sequence[str]) -> Wish:
    return Wish(False, True, tuple(reasons)) if reasons else _NOTHING


def _passed(moment: Moment, epochs: int) -> bool:
    if moment.epoch is None or moment.last_epoch is None:
        return False
    return moment.epoch // epochs > moment.last_epoch // epochs


def _any_of(parts: Sequence[Trigger]) -> Trigger:
    triggers = distinct(parts)
    return triggers[0] if len(triggers) == 1 else AnyOf(triggers)


def _signal_name(given: object) -> str:
    name = given.name if isinstance(given, signal.Signals) else _known_signal(given)
    if name in _UNCATCHABLE:
        raise UsageError(f"{name} ends or stops a process without asking it", advice="use a signal such as SIGTERM")
    return name


def _known_signal(given: object) -> str:
    short = given.upper().removeprefix("SIG") if isinstance(given, str) else ""
    if f"SIG{short}" in signal.Signals.__members__:
        # An alias has the name of the signal that it stands for.
        return signal.Signals[f"SIG{short}"].name
    # Without the prefix that all names share: with it, every name is similar to every other.
    others = [name.removeprefix("SIG") for name in signal.Signals.__members__ if name not in _UNCATCHABLE]
    similar = [f"SIG{other}" for other in nearest(short, others, count=3)] or _USUAL_SIGNALS
    raise UsageError(f"{shown(given)} is no signal", advice=f"use a name such as {', '.join(similar)}")


def _seconds(what: str, duration: object) -> float:
    """Return a duration in seconds; a UsageError that shows how one is written where it is none."""
    value = duration
    if isinstance(duration, timedelta):
        value = duration.total_seconds()
    elif isinstance(duration, str):
        value = _spelled_seconds(duration)
    seconds = positive(value)
    if seconds is None:
        raise UsageError(
            f"TimeLimit({what}={shown(duration)}) is no time that passes",
            advice="write '03:50:00', '1-12:00:00' or, as DD:HH:MM:SS, '1:12:00:00' with days in front, '3h50m', '90m' "
            "or '45s'; or give a positive number of seconds, or a timedelta",
        )
    return seconds


def _spelled_seconds(text: str) -> float | None:
    clock = _CLOCK.fullmatch(text)
    # With days in front the hours are those of a day.
    if clock is not None and (clock[1] is None or int(clock[2]) < 24):
        return _add_up(clock.groups())
    units = _UNITS.fullmatch(text)
    return None if units is None else _add_up(units.groups())


def _add_up(parts: Sequence[str | None]) -> float:
    days, hours, minutes = (int(part or 0) for part in parts[:-1])
    seconds = parts[-1] or "0"
    return ((days * 24 + hours) * 60 + minutes) * 60 + (float(seconds) if "." in seconds else int(seconds))


def _duration(seconds: float) -> str | float:
    """Return a duration as a person writes it; a number where that is not exact."""
    whole = int(seconds)
    if whole != seconds or whole >= 10**9:
        return seconds
    clock = f"{whole // 3600 % 24:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    return clock if whole < 86400 else f"{whole // 86400}-{clock}"


def _job_end(text: str) -> float | None:
    """Return the end of the job in seconds since 1970. An empty variable counts as unset."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) > 0):
        raise UsageError(
            f"{JOB_END_VARIABLE} is {shown(text)}, not a number of seconds since 1970",
            advice="correct it, or take it out of the environment and give TimeLimit a limit",
        )
    return float(text)


def _set(value: object, **given: object) -> None:
    """Set fields of a frozen value while it is made."""
    for name, content in given.items():
        object.__setattr__(value, name, content)
