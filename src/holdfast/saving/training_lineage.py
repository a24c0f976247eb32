"""Where a training stands in its run: the checkpoint that its next save goes back to, and all those before it.

The only place that keeps the lineage of this process. Checkpoints and outcomes of saves enter; the ancestry of the next
save leaves.
"""

from __future__ import annotations

import msgspec

from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.lineage import Lineage, ancestry, draw_segment

__all__ = ["Ancestry", "TrainingLineage"]


class Ancestry(msgspec.Struct, frozen=True):
    """What a save goes back to: the digest of its parent, all checkpoints before it, and the segment that it is in."""

    parent: str | None = None
    lineage: Lineage = Lineage()
    segment: str = ""


class TrainingLineage:
    """The lineage of this training. `head` is the digest of the checkpoint that was saved or restored last; `own` are
    the checkpoints that this training restored or saved and those that they go back to, None as long as it did neither.
    """

    def __init__(self) -> None:
        self.head: str | None = None
        self.own: Lineage | None = None
        self._lineage = Lineage()
        self._segment = draw_segment()

    def next_ancestry(self) -> Ancestry:
        """Return what the next save goes back to."""
        return Ancestry(self.head, self._lineage, self._segment)

    def continue_from(self, checkpoint: Checkpoint, catalog: Catalog) -> None:
        """Let the next save go back to this checkpoint."""
        known = [checkpoint]
        if checkpoint.parent is not None and not checkpoint.head.line:
            known = ancestry(checkpoint.digest, catalog.scan().checkpoints) or known
        self.head, self._lineage, self._segment = checkpoint.digest, Lineage.through(known), draw_segment()
        self.own = self._lineage

    def start(self, own: Lineage | None) -> None:
        """Start a new lineage: the next save has no parent, and no step counts as committed. `own` holds until then."""
        self.head, self._lineage, self._segment, self.own = None, Lineage(), draw_segment(), own

    def append(self, sequence: int, segment: str, digest: str) -> None:
        """Add a checkpoint that this training has just committed, once."""
        if self.head == digest:
            return
        lineage = self._lineage.followed_by(sequence, segment)
        own = (self.own or Lineage()).followed_by(sequence, segment)
        # Together: an interrupt comes at a call, so never between these.
        self._lineage, self.own, self.head = lineage, own, digest
