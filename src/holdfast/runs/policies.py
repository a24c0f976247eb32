"""When to save and what to keep, as values that compose with `|`. A moment or the records of checkpoints enter, a wish
or reasons leave. Knows no clock, no signal handler, no file and no rank: whoever asks says how things stand. Of the
environment it knows one variable, the end of the job, when a TimeLimit is made.

    save=Every(steps=500) | Every(minutes=10) | OnSignal("SIGTERM")
    keep=KeepLast(3) | KeepBest("val_loss", 2) | KeepEvery(steps=10_000)
"""

from __future__ import annotations

import difflib
import heapq
import os
import re
import signal
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from operator import attrgetter
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

from holdfast.errors import UsageError
from holdfast.ondisk.paths import MAX_STEP, as_integer, check_step

__all__ = [
    "AnyOf",
    "At",
    "Every",
    "KeepAll",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPolicy",
    "KeepTagged",
    "Moment",
    "OnLastStep",
    "OnSignal",
    "Record",
    "TimeLimit",
    "Trigger",
    "Wish",
    "newest_first",
    "split",
]

JOB_END_VARIABLE = "SLURM_JOB_END_TIME"

Duration = str | int | float | timedelta
_Part = TypeVar("_Part")

_NUMBER = (int, float)
_CAUGHT_BY_NOBODY = ("SIGKILL", "SIGSTOP")
_USUAL_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2")
_CLOCK = re.compile(r"(?:([0-9]{1,6})[-:])?([0-9]{1,9}):([0-5][0-9]):([0-5][0-9])", re.ASCII)
_UNITS = re.compile(
    r"(?:([0-9]{1,9})d)?(?:([0-9]{1,9})h)?(?:([0-9]{1,9})m)?(?:([0-9]{1,9}(?:\.[0-9]{1,40})?)s)?", re.ASCII
)


# When to save


class Moment(NamedTuple):
    """How things stand after a step. `epoch` is the number of epochs that are done, `last_epoch` what it was before;
    the clocks and the signals are the leader's."""

    step: int
    epoch: int | None = None
    last_epoch: int | None = None
    seconds_since_save: float = 0.0
    seconds_running: float = 0.0
    wall_seconds: float = 0.0
    signals: frozenset[str] = frozenset()


class Wish(NamedTuple):
    """What a trigger says of a moment: save and go on, or save and stop; and why."""

    save: bool
    stop: bool
    reasons: tuple[str, ...]


_NOTHING = Wish(False, False, ())


class Trigger(ABC):
    """When to save. `a | b` fires when one of them does."""

    __slots__ = ()

    @abstractmethod
    def wish(self, moment: Moment) -> Wish:
        """What it says of a moment."""

    @property
    def by_step(self) -> bool:
        """Whether step and epoch alone decide: then every rank finds the same without asking anybody."""
        return False

    @property
    def needs_epoch(self) -> bool:
        """Whether it, or a part of it, can never fire for a caller that names no epoch."""
        return False

    @property
    def signals(self) -> frozenset[str]:
        """The signals that somebody must listen to on its behalf."""
        return frozenset()

    def parts(self) -> tuple[Trigger, ...]:
        return (self,)

    def __or__(self, other: Trigger) -> Trigger:
        if not isinstance(other, Trigger):
            raise _cannot_join(self, other)
        return _any_of((*self.parts(), *other.parts()))

    def __ror__(self, other: object) -> NoReturn:
        raise _cannot_join(other, self)


def split(trigger: Trigger | None) -> tuple[Trigger | None, Trigger | None]:
    """The part that the step alone decides, on every rank alike, and the part that is the leader's word."""
    parts = trigger.parts() if trigger is not None else ()
    ours = [part for part in parts if part.by_step]
    leaders = [part for part in parts if not part.by_step]
    return (_any_of(ours) if ours else None), (_any_of(leaders) if leaders else None)


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Every(Trigger):
    """Every so many steps, epochs or minutes; one of them. The minutes count from the last save."""

    steps: int | None = None
    epochs: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        _check_interval("Every", steps=self.steps, epochs=self.epochs, minutes=self.minutes)

    def __repr__(self) -> str:
        return _with_what_is_set(self)

    @property
    def by_step(self) -> bool:
        return self.minutes is None

    @property
    def needs_epoch(self) -> bool:
        return self.epochs is not None

    def wish(self, moment: Moment) -> Wish:
        if self.steps is not None and moment.step > 0 and moment.step % self.steps == 0:
            return _save_for(_every(self.steps, "step"))
        if self.epochs is not None and _passed(moment, self.epochs):
            return _save_for(_every(self.epochs, "epoch"))
        if self.minutes is not None and moment.seconds_since_save >= self.minutes * 60:
            return _save_for(_every(self.minutes, "minute"))
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
        _check_count("OnLastStep(total)", self.total)

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
        _set(self, names=_distinct(_signal_name(name) for name in names))

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
        reasons = _distinct(reason for wish in wishes for reason in wish.reasons)
        return Wish(any(wish.save for wish in wishes), any(wish.stop for wish in wishes), reasons)


# What to keep


class Record(NamedTuple):
    """One committed checkpoint as retention sees it.

    on_line: the line of the run that goes on has it; after a rollback the abandoned line has not.
    shield: why it may not be deleted whatever the policy says, such as "being read"; empty when nothing shields it.
    counts: whether it may take a place in a policy; a damaged one may not.
    """

    folder: str
    step: int
    sequence: int
    created_seconds: float
    metrics: Mapping[str, float | int]
    tags: tuple[str, ...] = ()
    on_line: bool = True
    shield: str = ""
    counts: bool = True


class KeepPolicy(ABC):
    """What to keep. `a | b` keeps what one of them keeps."""

    __slots__ = ()

    @abstractmethod
    def choose(self, records: Sequence[Record]) -> dict[str, str]:
        """The folders that it keeps, each with the reason. The order of the records means nothing."""

    @property
    def metrics(self) -> tuple[tuple[str, Literal["min", "max"]], ...]:
        """The metrics that it ranks by, each with its mode."""
        return ()

    def parts(self) -> tuple[KeepPolicy, ...]:
        return (self,)

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        if not isinstance(other, KeepPolicy):
            raise _cannot_join(self, other)
        parts = _distinct((*self.parts(), *other.parts()))
        return parts[0] if len(parts) == 1 else KeepAny(parts)

    def __ror__(self, other: object) -> NoReturn:
        raise _cannot_join(other, self)


def newest_first(records: Iterable[Record]) -> list[Record]:
    """What was committed later is newer, whatever its step and its clock."""
    # Two sorts by one number each are several times faster than one by pairs, and the second leaves ties in order.
    by_clock = sorted(records, key=attrgetter("created_seconds"), reverse=True)
    return sorted(by_clock, key=attrgetter("sequence"), reverse=True)


@dataclass(frozen=True, slots=True)
class KeepLast(KeepPolicy):
    """The newest n of the line that goes on."""

    n: int

    def __post_init__(self) -> None:
        _check_places("KeepLast", self.n)

    def choose(self, records: Sequence[Record]) -> dict[str, str]:
        reason = f"among the last {self.n}"
        return {record.folder: reason for record in newest_first(_on_line(records))[: self.n]}


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """The best n by a metric, of all lines. NaN ranks worst but for a metric that is missing; ties go to the newer."""

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise UsageError(f"KeepBest has no metric {_shown(self.metric)}", advice="name one, such as 'val_loss'")
        _check_places("KeepBest", self.n)
        if self.mode not in ("min", "max"):
            close = _nearest(self.mode, ("min", "max"), count=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"KeepBest(mode={_shown(self.mode)})", advice=f"use 'min' or 'max'{hint}")

    @property
    def metrics(self) -> tuple[tuple[str, Literal["min", "max"]], ...]:
        return ((self.metric, self.mode),)

    def choose(self, records: Sequence[Record]) -> dict[str, str]:
        ranked, nans, unknown = [], [], []
        for record in newest_first(record for record in records if record.counts):
            value = record.metrics.get(self.metric)
            if not isinstance(value, _NUMBER):
                unknown.append(record)
            elif value != value:
                nans.append(record)
            else:
                ranked.append(record)
        # By the numbers as they are: an int beyond 2**53 is not the float next to it. Both leave ties in order.
        pick = heapq.nsmallest if self.mode == "min" else heapq.nlargest
        best = pick(self.n, ranked, key=lambda record: record.metrics[self.metric])
        return {record.folder: self._reason(record) for record in [*best, *nans, *unknown][: self.n]}

    def _reason(self, record: Record) -> str:
        value = record.metrics.get(self.metric)
        if not isinstance(value, _NUMBER):
            return f"{self.metric} is not known yet"
        return f"best {self.n} of {self.metric} ({self.mode}): {_shown(value)}"


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class KeepEvery(KeepPolicy):
    """One in so many steps or minutes of the line that goes on; one of them. What it keeps once, it keeps."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        _check_interval("KeepEvery", steps=self.steps, minutes=self.minutes)

    def __repr__(self) -> str:
        return _with_what_is_set(self)

    def choose(self, records: Sequence[Record]) -> dict[str, str]:
        if self.minutes is not None:
            return _spaced_by(_on_line(records), self.minutes)
        return _first_of_each(_on_line(records), self.steps) if self.steps is not None else {}


@dataclass(frozen=True, slots=True)
class KeepTagged(KeepPolicy):
    """Whatever has a tag, on every line, and whether it counts or not."""

    def choose(self, records: Sequence[Record]) -> dict[str, str]:
        return {record.folder: f"tagged {', '.join(map(repr, record.tags))}" for record in records if record.tags}


@dataclass(frozen=True, slots=True)
class KeepAll(KeepPolicy):
    """Everything, whether it counts or not."""

    def choose(self, records: Sequence[Record]) -> dict[str, str]:
        return {record.folder: "everything is kept" for record in records}


@dataclass(frozen=True, slots=True, repr=False)
class KeepAny(KeepPolicy):
    """Policies joined by `|`, which makes it: flat, and none of them twice."""

    policies: tuple[KeepPolicy, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))

    @property
    def metrics(self) -> tuple[tuple[str, Literal["min", "max"]], ...]:
        return _distinct(pair for policy in self.policies for pair in policy.metrics)

    def parts(self) -> tuple[KeepPolicy, ...]:
        return self.policies

    def choose(self, records: Sequence[Record]) -> dict[str, str]:
        kept: dict[str, str] = {}
        for policy in self.policies:
            for folder, reason in policy.choose(records).items():
                kept[folder] = f"{kept[folder]}; {reason}" if folder in kept else reason
        return kept


# How a trigger comes to its wish


def _save_for(reason: str) -> Wish:
    return Wish(True, False, (reason,))


def _stop_for(reasons: Sequence[str]) -> Wish:
    return Wish(False, True, tuple(reasons)) if reasons else _NOTHING


def _passed(moment: Moment, epochs: int) -> bool:
    if moment.epoch is None or moment.last_epoch is None:
        return False
    return moment.epoch // epochs > moment.last_epoch // epochs


def _every(count: float, unit: str) -> str:
    whole = int(count) if count == int(count) else count
    return f"every {unit}" if whole == 1 else f"every {whole} {unit}s"


def _any_of(parts: Sequence[Trigger]) -> Trigger:
    distinct = _distinct(parts)
    return distinct[0] if len(distinct) == 1 else AnyOf(distinct)


# How a policy comes to its choice


def _on_line(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.on_line and record.counts]


def _first_of_each(records: Sequence[Record], steps: int) -> dict[str, str]:
    """The first at or after each multiple of `steps` but 0, and before the next."""
    first: dict[int, str] = {}
    # Downwards, so that the lowest step of each is written last, and of two at one step the older.
    for record in sorted(newest_first(records), key=attrgetter("step"), reverse=True):
        first[record.step // steps] = record.folder
    first.pop(0, None)
    return {folder: f"the first from step {period * steps} on" for period, folder in first.items()}


def _spaced_by(records: Sequence[Record], minutes: float) -> dict[str, str]:
    """From the oldest on, each that is this far from the one kept before it. Only kept ones decide about later ones:
    so nothing changes about them when others are deleted or come."""
    kept: dict[str, str] = {}
    last, reason = None, _every(minutes, "minute")
    for record in reversed(newest_first(records)):
        # A clock that was put back counts as a distance too: otherwise nothing is kept until it has caught up.
        if last is None or abs(record.created_seconds - last) >= minutes * 60:
            kept[record.folder] = reason
            last = record.created_seconds
    return kept


# What a user may pass


def _check_interval(kind: str, **given: object) -> None:
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
        _check_count(f"{kind}({name}=...)", given[name])


def _check_count(what: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= MAX_STEP:
        raise UsageError(f"{what} takes a whole number from 1 on, not {_shown(value)}")


def _check_minutes(what: str, value: object) -> None:
    if _positive(value) is None:
        raise UsageError(f"{what} takes a positive number, not {_shown(value)}")


def _check_places(kind: str, n: object) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_STEP:
        raise UsageError(
            f"{kind} takes a whole number from 1 on, not {_shown(n)}", advice="to keep everything use KeepAll()"
        )


def _positive(value: object) -> float | None:
    """The value as a float when it is a positive number that means something as a time."""
    if isinstance(value, bool) or not isinstance(value, _NUMBER) or not 0 < value <= MAX_STEP:
        return None
    return float(value)


def _signal_name(given: object) -> str:
    name = given.name if isinstance(given, signal.Signals) else _known_signal(given)
    if name in _CAUGHT_BY_NOBODY:
        raise UsageError(f"{name} ends or stops a process without asking it", advice="use a signal such as SIGTERM")
    return name


def _known_signal(given: object) -> str:
    short = given.upper().removeprefix("SIG") if isinstance(given, str) else ""
    if f"SIG{short}" in signal.Signals.__members__:
        # An alias has the name of the signal that it stands for.
        return signal.Signals[f"SIG{short}"].name
    # Without the front that all names share: with it, every name is near to every other.
    others = [name.removeprefix("SIG") for name in signal.Signals.__members__ if name not in _CAUGHT_BY_NOBODY]
    nearest = [f"SIG{other}" for other in _nearest(short, others, count=3)] or _USUAL_SIGNALS
    raise UsageError(f"{_shown(given)} is no signal", advice=f"use a name such as {', '.join(nearest)}")


def _seconds(what: str, duration: object) -> float:
    """A duration in seconds, or a UsageError that shows how one is written."""
    value = duration
    if isinstance(duration, timedelta):
        value = duration.total_seconds()
    elif isinstance(duration, str):
        value = _spelled_seconds(duration)
    seconds = _positive(value)
    if seconds is None:
        raise UsageError(
            f"TimeLimit({what}={_shown(duration)}) is no time that passes",
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
    """As a person writes it; a number where that cannot say it exactly."""
    whole = int(seconds)
    if whole != seconds or whole >= 10**9:
        return seconds
    clock = f"{whole // 3600 % 24:02d}:{whole // 60 % 60:02d}:{whole % 60:02d}"
    return clock if whole < 86400 else f"{whole // 86400}-{clock}"


def _job_end(text: str) -> float | None:
    """The end of the job in seconds since 1970. An empty variable is as good as none."""
    if not text:
        return None
    if not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) > 0):
        raise UsageError(
            f"{JOB_END_VARIABLE} is {_shown(text)}, not a number of seconds since 1970",
            advice="correct it, or take it out of the environment and give TimeLimit a limit",
        )
    return float(text)


def _cannot_join(left: object, right: object) -> UsageError:
    shown = f"{_shown(left)} | {_shown(right)}"
    if isinstance(left, Trigger | KeepPolicy) and isinstance(right, Trigger | KeepPolicy):
        return UsageError(
            f"{shown} joins when to save with what to keep", advice="give the one to save= and the other to keep="
        )
    ours = left if isinstance(left, Trigger | KeepPolicy) else right
    kind, example = ("trigger", "OnSignal('SIGTERM')") if isinstance(ours, Trigger) else ("policy", "KeepLast(3)")
    return UsageError(f"{shown} joins a {kind} with something else", advice=f"join it with another, such as {example}")


def _nearest(given: object, names: Sequence[str], *, count: int) -> list[str]:
    return difflib.get_close_matches(given, names, n=count) if isinstance(given, str) else []


def _shown(value: object) -> str:
    # Python refuses to write a number of thousands of digits.
    if isinstance(value, int) and value.bit_length() > 512:
        return f"a number of {value.bit_length()} bits"
    return f"{value!r:.100}"


def _with_what_is_set(value: Any) -> str:
    given = {field.name: getattr(value, field.name) for field in fields(value)}
    spelled = ", ".join(f"{name}={set_to!r}" for name, set_to in given.items() if set_to is not None)
    return f"{type(value).__name__}({spelled})"


def _set(value: object, **given: object) -> None:
    """The fields of a value that is being made; afterwards they do not change."""
    for name, content in given.items():
        object.__setattr__(value, name, content)


def _distinct(values: Iterable[_Part]) -> tuple[_Part, ...]:
    return tuple(dict.fromkeys(values))
