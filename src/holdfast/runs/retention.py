"""Decide what stays: the records of checkpoints and a policy enter, a decision about each leaves. Deletes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from holdfast.runs.policies import KeepPolicy, KeepTagged, Record, newest_first

__all__ = ["Decision", "retain"]

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
    """Which checkpoints to keep and which to delete, the newest first.

    Whatever the policy says, these stay: the newest that counts, tagged ones, shielded ones, and all when none counts.
    """
    ordered = newest_first(records)
    reasons = _reasons(ordered, policy)
    return [_decision(record, reasons.get(record.folder)) for record in ordered]


def _decision(record: Record, reasons: list[str] | None) -> Decision:
    if reasons is None:
        return Decision(record.folder, record.step, False, _UNWANTED)
    return Decision(record.folder, record.step, True, tuple(dict.fromkeys(reasons)))


def _reasons(ordered: Sequence[Record], policy: KeepPolicy) -> dict[str, list[str]]:
    """Why each is kept that is."""
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
