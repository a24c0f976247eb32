"""What to keep: policies as values that compose with `|`, and the decision about each checkpoint that follows.

The records of checkpoints and a policy enter, a decision about each leaves. Deletes nothing; knows no clock, no file.

    keep=KeepLast(3) | KeepBest("val_loss", 2) | KeepEvery(steps=10_000)
"""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import ClassVar, Literal, NamedTuple, NoReturn

import msgspec

from holdfast.errors import UsageError
from holdfast.ondisk.paths import MAX_STEP
from holdfast.runs.composing import (
    NUMBER,
    POLICY,
    Kind,
    cannot_join,
    check_interval,
    distinct,
    every_text,
    nearest,
    shown,
    with_set_fields,
)

__all__ = [
    "Decision",
    "KeepAll",
    "KeepAny",
    "KeepBest",
    "KeepEvery",
    "KeepLast",
    "KeepPolicy",
    "KeepTagged",
    "Record",
    "newest_first",
    "retain",
]

_UNWANTED = ("no policy keeps it",)


# Left out of garbage collection: it holds texts and numbers alone, and looking through 100,000 of them again and again
# takes longer than deciding.
class Decision(msgspec.Struct, frozen=True, gc=False):
    """What happens to one checkpoint, and why."""

    folder: str
    step: int
    keep: bool
    reasons: tuple[str, ...]

    def __str__(self) -> str:
        return f"{'keep' if self.keep else 'delete':<6} {self.folder}: {'; '.join(self.reasons)}"


def retain(records: Sequence[Record], policy: KeepPolicy) -> list[Decision]:
    """Return which checkpoints to keep and which to delete, the newest first.

    Whatever the policy chooses, these stay: the newest that counts, tagged ones, shielded ones; all when none counts.
    """
    ordered = newest_first(records)
    reasons = _reasons(ordered, policy)
    return [_decision(record, reasons.get(record.folder)) for record in ordered]


def _decision(record: Record, reasons: list[str] | None) -> Decision:
    if reasons is None:
        return Decision(record.folder, record.step, False, _UNWANTED)
    return Decision(record.folder, record.step, True, tuple(dict.fromkeys(reasons)))


def _reasons(ordered: Sequence[Record], policy: KeepPolicy) -> dict[str, list[str]]:
    """Return the reasons for each checkpoint that is kept."""
    found = {record.folder: [record.shield] for record in ordered if record.shield}
    chosen = [part.choose(ordered) for part in (*policy.parts(), KeepTagged())]
    for choice in (_never_deleted(ordered), *chosen):
        for folder, reason in choice.items():
            found.setdefault(folder, []).append(reason)
    return found


def _never_deleted(ordered: Sequence[Record]) -> dict[str, str]:
    newest = next((record for record in ordered if record.counts), None)
    if newest is not None:
        return {newest.folder: "the newest"}
    # Damaged ones may be all that is left of a run, and a later version may read more of them.
    return {record.folder: "no checkpoint of the run counts" for record in ordered}


class Record(NamedTuple):
    """One committed checkpoint as retention sees it.

    on_line: it is in the lineage of the newest checkpoint; after a rollback, those of the abandoned part are not.
    shield: why it may not be deleted whatever the policy chooses, such as "being read"; empty when nothing shields it.
    counts: whether it may take a place in a policy; a damaged one may not.
    replaced: a later checkpoint of the same step, on the same line, takes its place in a policy.
    shield_lasts: whether the shield holds whatever checkpoints are added to the line; that of a reader ends with it.
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
    replaced: bool = False
    shield_lasts: bool = False


class KeepPolicy(ABC):
    """What to keep. `a | b` keeps what one of them keeps."""

    __slots__ = ()
    _kind: ClassVar[Kind] = POLICY

    @abstractmethod
    def choose(self, records: Sequence[Record]) -> dict[str, str]:
        """Return the folders that it keeps, each with the reason, whatever the order of the records."""

    @property
    def metrics(self) -> tuple[tuple[str, Literal["min", "max"]], ...]:
        """Return the metrics that it ranks by, each with its mode."""
        return ()

    def parts(self) -> tuple[KeepPolicy, ...]:
        return (self,)

    def open_choice(self, chosen: Sequence[Record]) -> Sequence[Record] | None:
        """Return those of the records that it has chosen, given with the newest first, on which its choice depends when
        later checkpoints are added to the line, each of a higher step; it keeps the others whatever is added. None
        where that is not known: then all are considered each time."""
        return None

    def __or__(self, other: KeepPolicy) -> KeepPolicy:
        if not isinstance(other, KeepPolicy):
            raise cannot_join(self, other)
        parts = distinct((*self.parts(), *other.parts()))
        return parts[0] if len(parts) == 1 else KeepAny(parts)

    def __ror__(self, other: object) -> NoReturn:
        raise cannot_join(other, self)


def newest_first(records: Iterable[Record]) -> list[Record]:
    """Return the records in the order of their commits, the latest first, whatever their steps and clocks."""
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

    def open_choice(self, chosen: Sequence[Record]) -> Sequence[Record]:
        return chosen


@dataclass(frozen=True, slots=True)
class KeepBest(KeepPolicy):
    """The best n by a metric, of all lines. NaN ranks worst but for a metric that is missing; ties go to the newer."""

    metric: str
    n: int = 1
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        if not isinstance(self.metric, str) or not self.metric:
            raise UsageError(f"KeepBest has no metric {shown(self.metric)}", advice="name one, such as 'val_loss'")
        _check_places("KeepBest", self.n)
        if self.mode not in ("min", "max"):
            close = nearest(self.mode, ("min", "max"), count=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise UsageError(f"KeepBest(mode={shown(self.mode)})", advice=f"use 'min' or 'max'{hint}")

    @property
    def metrics(self) -> tuple[tuple[str, Literal["min", "max"]], ...]:
        return ((self.metric, self.mode),)

    def choose(self, records: Sequence[Record]) -> dict[str, str]:
        ranked, nans, unknown = [], [], []
        # A later checkpoint of the step that was saved without the metric does not take the place of one that has it.
        known = {record.step for record in _on_line(records) if isinstance(record.metrics.get(self.metric), NUMBER)}
        for record in newest_first(record for record in records if record.counts):
            value = record.metrics.get(self.metric)
            if record.replaced and (record.step in known or not isinstance(value, NUMBER)):
                continue
            if not isinstance(value, NUMBER):
                unknown.append(record)
            elif value != value:
                nans.append(record)
            else:
                ranked.append(record)
        # By the numbers as they are: an int beyond 2**53 is not the float next to it. Both leave ties in order.
        pick = heapq.nsmallest if self.mode == "min" else heapq.nlargest
        best = pick(self.n, ranked, key=lambda record: record.metrics[self.metric])
        return {record.folder: self._reason(record) for record in [*best, *nans, *unknown][: self.n]}

    def open_choice(self, chosen: Sequence[Record]) -> Sequence[Record]:
        return chosen

    def _reason(self, record: Record) -> str:
        value = record.metrics.get(self.metric)
        if not isinstance(value, NUMBER):
            return f"{self.metric} is not known yet"
        return f"best {self.n} of {self.metric} ({self.mode}): {shown(value)}"


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class KeepEvery(KeepPolicy):
    """One in so many steps or minutes of the line that goes on; one of them. What it keeps once, it keeps."""

    steps: int | None = None
    minutes: float | None = None

    def __post_init__(self) -> None:
        check_interval("KeepEvery", steps=self.steps, minutes=self.minutes)

    def __repr__(self) -> str:
        return with_set_fields(self)

    def choose(self, records: Sequence[Record]) -> dict[str, str]:
        if self.minutes is not None:
            return _spaced_by(_on_line(records), self.minutes)
        return _first_of_each(_on_line(records), self.steps) if self.steps is not None else {}

    def open_choice(self, chosen: Sequence[Record]) -> Sequence[Record]:
        """Return the last that it has chosen: the next is measured from it, and what it keeps once, it keeps."""
        return chosen[:1] if self.minutes is not None else sorted(chosen, key=attrgetter("step"))[-1:]


@dataclass(frozen=True, slots=True)
class KeepTagged(KeepPolicy):
    """Whatever has a tag, on every line, and whether it counts or not."""

    def choose(self, records: Sequence[Record]) -> dict[str, str]:
        return {record.folder: f"tagged {', '.join(map(repr, record.tags))}" for record in records if record.tags}

    def open_choice(self, chosen: Sequence[Record]) -> Sequence[Record]:
        return ()


@dataclass(frozen=True, slots=True)
class KeepAll(KeepPolicy):
    """Everything, whether it counts or not."""

    def choose(self, records: Sequence[Record]) -> dict[str, str]:
        return {record.folder: "everything is kept" for record in records}

    def open_choice(self, chosen: Sequence[Record]) -> Sequence[Record]:
        return ()


@dataclass(frozen=True, slots=True, repr=False)
class KeepAny(KeepPolicy):
    """Policies joined by `|`, which makes it: flat, and none of them twice."""

    policies: tuple[KeepPolicy, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.policies))

    @property
    def metrics(self) -> tuple[tuple[str, Literal["min", "max"]], ...]:
        return distinct(pair for policy in self.policies for pair in policy.metrics)

    def parts(self) -> tuple[KeepPolicy, ...]:
        return self.policies

    def choose(self, records: Sequence[Record]) -> dict[str, str]:
        kept: dict[str, str] = {}
        for policy in self.policies:
            for folder, reason in policy.choose(records).items():
                kept[folder] = f"{kept[folder]}; {reason}" if folder in kept else reason
        return kept


def _on_line(records: Sequence[Record]) -> list[Record]:
    return [record for record in records if record.on_line and record.counts and not record.replaced]


def _first_of_each(records: Sequence[Record], steps: int) -> dict[str, str]:
    """Return the first at or after each multiple of `steps` except 0, and before the next."""
    first: dict[int, str] = {}
    # Downwards, so that the lowest step of each is written last, and of two at one step the older.
    for record in sorted(newest_first(records), key=attrgetter("step"), reverse=True):
        first[record.step // steps] = record.folder
    first.pop(0, None)
    return {folder: f"the first from step {period * steps} on" for period, folder in first.items()}


def _spaced_by(records: Sequence[Record], minutes: float) -> dict[str, str]:
    """Return, from the oldest on, each that is this far from the one kept before it. Only kept ones decide about later
    ones: the choice does not change when others are deleted or added."""
    kept: dict[str, str] = {}
    last, reason = None, every_text(minutes, "minute")
    for record in reversed(newest_first(records)):
        # A clock that was put back counts as a distance too: otherwise nothing is kept until it has caught up.
        if last is None or abs(record.created_seconds - last) >= minutes * 60:
            kept[record.folder] = reason
            last = record.created_seconds
    return kept


def _check_places(kind: str, n: object) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or not 1 <= n <= MAX_STEP:
        raise UsageError(
            f"{kind} takes a whole number from 1 on, not {shown(n)}", advice="to keep everything use KeepAll()"
        )
