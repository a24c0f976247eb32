"""Keep what a cleanup has decided about a run for the next one. Checkpoints and a policy enter; what a later checkpoint
may still change leaves. Deletes nothing.

Most cleanups find one more checkpoint, of a higher step, that continues the line of the newest. It changes nothing for
nearly all others: the policies state which of their choices they may still change (`KeepPolicy.open_choice`), and only
these are looked at again. After anything else that happens to a run, all of it is looked at.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence, Set
from operator import attrgetter

from holdfast.errors import AttemptClosedError, HoldfastError, KeyMissingError, StorageError
from holdfast.runs.annotations import parse_note_name
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint, Scan
from holdfast.runs.lineage import Lineage
from holdfast.runs.retention import KeepPolicy, KeepTagged, Record, newest_first

__all__ = ["RetentionState", "added_since", "are_unchanged"]

# How many of those that were committed before a checkpoint are read again before it is removed.
_NEIGHBOURS = 4

Recorder = Callable[[Sequence[Checkpoint]], list[Record]]


class RetentionState:
    """The checkpoints of a run that stay, as one cleanup has decided.

    folders: all that stay. notes: the names of all notes before the scan. may_change: those that a later checkpoint may
    have removed; the others stay whatever is added. newest: the latest that counts.
    """

    def __init__(
        self,
        policy: KeepPolicy,
        scan: Scan,
        records: Sequence[Record],
        notes: Iterable[str],
        *,
        gone: Set[str],
    ) -> None:
        """Take what a scan found and was decided about it. gone: the folders that do not stay."""
        self.notes = frozenset(notes)
        kept = [found for found in scan.checkpoints if found.folder not in gone]
        # What is here may change without a name that does: a note that cannot be read now can be read later.
        self._has_remains = bool(scan.closed or scan.damaged or any(found.unread_notes for found in kept))
        self.folders = {found.folder for found in kept}
        self._in_order = sorted(kept, key=attrgetter("sequence"))
        self.newest = next((found for found in kept if not found.damage), None)
        self.may_change: dict[str, Checkpoint] = {}
        self._parts = (*policy.parts(), KeepTagged())
        self._open: list[tuple[str, ...]] | None = [() for _ in self._parts]
        self._final: set[str] = set()
        self._step = max((found.step for found in kept), default=-1)
        self._sequence = max((found.sequence for found in kept), default=0)
        staying = [record for record in newest_first(records) if record.folder not in gone]
        # None is added to these: a checkpoint that continues the line has a step of its own.
        self._replaced_steps = {record.step for record in staying if record.replaced}
        self._choose([staying for _ in self._parts], staying, {found.folder: found for found in kept})

    def is_continued_by(self, added: Sequence[Checkpoint]) -> bool:
        """Return whether these, the oldest first, are later checkpoints of the newest one's line, with higher steps."""
        newest, step, sequence = self.newest, self._step, self._sequence
        for checkpoint in added:
            if newest is None or checkpoint.damage or checkpoint.unread_notes:
                return False
            line = Lineage.before(newest.head).followed_by(newest.sequence, newest.head.segment)
            if Lineage.before(checkpoint.head) != line or checkpoint.step <= step or checkpoint.sequence <= sequence:
                return False
            newest, step, sequence = checkpoint, checkpoint.step, checkpoint.sequence
        return self._open is not None and not self._has_remains

    def add(self, added: Sequence[Checkpoint], notes: Iterable[str], record: Recorder) -> list[Checkpoint]:
        """Add checkpoints that continue the line; return those that no policy keeps any more, the oldest first.
        record: makes of checkpoints, the latest first, the records that policies choose from."""
        self.notes = frozenset(notes)
        present = {**self.may_change, **{found.folder: found for found in added}}
        ordered = sorted(present.values(), key=lambda found: found.sequence, reverse=True)
        records = newest_first(record(ordered))
        new = {found.folder for found in added}
        relevant = [
            [record for record in records if record.folder in new or record.folder in part] for part in self._open or ()
        ]
        if added:
            self.newest, self._step, self._sequence = added[-1], added[-1].step, added[-1].sequence
        self.folders |= new
        self._in_order += added
        self._choose(relevant, records, present)
        going = [found for found in reversed(ordered) if not self._stays(found.folder)]
        self.folders -= {found.folder for found in going}
        for found in going:
            del self._in_order[self._place_of(found)]
        return going

    def is_valid_without(self, going: Iterable[Checkpoint]) -> bool:
        """Return whether the decisions hold once these are removed. Not where one of them took the place of an earlier
        checkpoint of its step, which stays: that one counts again from then on."""
        return self._replaced_steps.isdisjoint(found.step for found in going)

    def to_read_again(self, going: Sequence[Checkpoint]) -> list[Checkpoint]:
        """Return the checkpoints that must be what they were for these to be removed: they themselves, those that may
        still be decided about, and those that stay right before each of them, one of which takes its place."""
        if not going:
            return []
        found = {checkpoint.folder: checkpoint for checkpoint in (*going, *self.may_change.values())}
        for checkpoint in going:
            place = self._place_of(checkpoint)
            found |= {kept.folder: kept for kept in self._in_order[max(place - _NEIGHBOURS, 0) : place]}
        return list(found.values())

    def _place_of(self, checkpoint: Checkpoint) -> int:
        """Return where a checkpoint stands, or would stand, in the order of the commits."""
        place = bisect_left(self._in_order, checkpoint.sequence, key=attrgetter("sequence"))
        same = (at for at, found in enumerate(self._in_order[place:], place) if found.sequence == checkpoint.sequence)
        return next((at for at in same if self._in_order[at] == checkpoint), place)

    def _stays(self, folder: str) -> bool:
        return folder in self.may_change or folder in self._final

    def _choose(
        self, relevant: Sequence[Sequence[Record]], records: Sequence[Record], present: dict[str, Checkpoint]
    ) -> None:
        """Have each policy choose among the records that are relevant to it, and keep what of that is open."""
        open_folders = set() if self.newest is None else {self.newest.folder}
        chosen_open: list[tuple[str, ...]] | None = []
        for part, considered in zip(self._parts, relevant, strict=True):
            folders = part.choose(considered)
            chosen = [record for record in considered if record.folder in folders]
            still_open = part.open_choice(chosen)
            if still_open is None or chosen_open is None:
                chosen_open = None
                open_folders |= {record.folder for record in chosen}
                continue
            chosen_open.append(tuple(record.folder for record in still_open))
            open_folders |= set(chosen_open[-1])
            self._final |= {record.folder for record in chosen} - set(chosen_open[-1])
        self._open = chosen_open
        # By what the record itself states, and not by another look: a reader may have ended, or begun, since.
        open_folders |= {record.folder for record in records if record.shield and not record.shield_lasts}
        self._final |= {record.folder for record in records if record.shield and record.shield_lasts}
        self.may_change = {folder: found for folder, found in present.items() if folder in open_folders}


def added_since(state: RetentionState, notes: Sequence[str], catalog: Catalog) -> list[Checkpoint] | None:
    """Return the checkpoints that were added to a run, the oldest first; None where more than that may have changed.
    notes: the names of all notes, which were listed before."""
    added, all_there = catalog.folders_since(state.folders)
    if not all_there or not state.notes <= set(notes):
        return None
    found = []
    for name in added:
        try:
            found.append(catalog.read_head(name))
        except AttemptClosedError:
            return None
        except KeyMissingError:
            continue  # an attempt that goes on
        except HoldfastError:
            return None
    about = {parsed.folder if (parsed := parse_note_name(name)) else "" for name in set(notes) - state.notes}
    if not about <= {checkpoint.folder for checkpoint in found}:
        return None
    if about:
        found = [catalog.annotated(checkpoint) for checkpoint in found]
    return sorted(found, key=lambda checkpoint: checkpoint.sequence)


def are_unchanged(checkpoints: Iterable[Checkpoint], catalog: Catalog) -> bool:
    """Return whether these can be read, each as it was before. What cannot be read now is an error."""
    try:
        return all(catalog.read_head(found.folder) == found for found in checkpoints)
    except StorageError as error:
        if not isinstance(error, KeyMissingError):
            raise
        return False
    except HoldfastError:
        return False
