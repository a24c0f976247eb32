"""Which checkpoints a training goes back to. Values only: manifests enter, lineages and decisions about them leave.

A checkpoint is known by its sequence number and by its segment, which is drawn at random whenever a training starts or
restores. Numbers alone are not enough: one whose folder cannot be seen for a while (a manifest that was damaged and put
back, a folder that was moved away, a copy of the run that was continued) can be given to another checkpoint.
"""

from __future__ import annotations

import uuid
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar

import msgspec

from holdfast.ondisk.manifest import SEGMENT_CHARACTERS, Body

__all__ = ["Lineage", "ancestry", "draw_segment", "start_of"]


class Committed(Protocol):
    """A checkpoint, as far as its lineage is concerned."""

    @property
    def head(self) -> Body: ...

    @property
    def digest(self) -> str: ...


_Found = TypeVar("_Found", bound=Committed)


def draw_segment() -> str:
    """Return a new segment: the saves from one start, or one restore, to the next."""
    return uuid.uuid4().hex[:SEGMENT_CHARACTERS]


class Lineage(msgspec.Struct, frozen=True):
    """The checkpoints that a training goes back to, also those that are deleted since: ranges of sequence numbers, in
    ascending order, and the segment of each. A segment is empty where the checkpoints come from a version without."""

    ranges: tuple[tuple[int, int], ...] = ()
    segments: tuple[str, ...] = ()

    @classmethod
    def before(cls, manifest: Body) -> Lineage:
        """Return what a checkpoint goes back to, without itself."""
        return cls(manifest.line, manifest.segments or ("",) * len(manifest.line))

    @classmethod
    def of(cls, checkpoint: Committed) -> Lineage:
        """Return a lineage of one checkpoint alone."""
        return cls().followed_by(checkpoint.head.sequence, checkpoint.head.segment)

    @classmethod
    def through(cls, ancestry: Sequence[Committed]) -> Lineage:
        """Return what the next save goes back to, given the newest checkpoint and those that it goes back to."""
        if ancestry and ancestry[0].head.line:
            newest = ancestry[0].head
            return cls.before(newest).followed_by(newest.sequence, newest.segment)
        lineage = cls()
        for found in reversed(ancestry):
            lineage = lineage.followed_by(found.head.sequence, found.head.segment)
        return lineage

    def followed_by(self, sequence: int, segment: str) -> Lineage:
        """Return this lineage with one more checkpoint at its end."""
        if self.ranges and self.ranges[-1][1] == sequence - 1 and self.segments[-1] == segment:
            return Lineage((*self.ranges[:-1], (self.ranges[-1][0], sequence)), self.segments)
        return Lineage((*self.ranges, (sequence, sequence)), (*self.segments, segment))

    def __contains__(self, checkpoint: Committed) -> bool:
        sequence = checkpoint.head.sequence
        place = bisect_right(self.ranges, sequence, key=lambda part: part[0]) - 1
        return place >= 0 and sequence <= self.ranges[place][1] and self.segments[place] == checkpoint.head.segment

    @property
    def next_sequence(self) -> int:
        """Return the lowest sequence number that the next checkpoint may have."""
        return self.ranges[-1][1] + 1 if self.ranges else 1


def ancestry(digest: str | None, among: Iterable[_Found]) -> list[_Found]:
    """Return the checkpoint that has a digest and those of `among` that it goes back to, in the order of `among`; none
    when it is not there. `among` has the latest first."""
    by_digest = {found.digest: found for found in among}
    newest = by_digest.get(digest or "")
    if newest is not None and newest.head.line:
        earlier = Lineage.before(newest.head)
        return [found for found in by_digest.values() if found is newest or found in earlier]
    found_by_parent = []
    while digest is not None and digest in by_digest:
        found = by_digest.pop(digest)
        found_by_parent.append(found)
        digest = found.head.parent
    return found_by_parent


def start_of(checkpoint: Committed) -> tuple[int, str] | None:
    """Return the number and the segment of the first checkpoint that one goes back to; None where that is unknown."""
    head = checkpoint.head
    if head.line:
        earlier = Lineage.before(head)
        return earlier.ranges[0][0], earlier.segments[0]
    return (head.sequence, head.segment) if head.parent is None else None
