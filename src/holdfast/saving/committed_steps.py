"""Which steps the lineage of a save has committed already. Read from the catalog once, and then kept. Leader only."""

from __future__ import annotations

from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.lineage import ancestry
from holdfast.saving.training_lineage import Ancestry

__all__ = ["CommittedSteps"]


class CommittedSteps:
    """The folder of each step that the lineage with this head has; None as long as it is not known."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._folders: dict[int, str] | None = None
        self._head: str | None = None

    def read(self, step: int, before: Ancestry) -> Checkpoint | None:
        """Return the checkpoint of the step, None if this lineage has none. Raises what the catalog raises when it is
        removed at this moment or damaged."""
        folder = self._find(step, before)
        return self._catalog.read(folder) if folder is not None else None

    def follow(self, parent: str | None) -> None:
        """Forget what is known of another lineage than the one with this head. A training that has restored another
        checkpoint since would otherwise add its next commit to the old lineage."""
        if self._head != parent:
            self._folders = None

    def add(self, step: int, folder: str, digest: str) -> None:
        """Add a checkpoint that is committed now, and is the head of the lineage."""
        if self._folders is not None:
            self._folders[step] = folder
            self._head = digest

    def forget(self) -> None:
        """Read the catalog anew before the next answer."""
        self._folders = None

    def _find(self, step: int, before: Ancestry) -> str | None:
        if self._folders is None or self._head != before.parent:
            # What cannot be read now is no reason to lose a save: at the worst a step is written a second time. The
            # manifest of the step itself is read again.
            scan = self._catalog.survey_cached()
            # Another writer of the run may have removed the head of the lineage; what it goes back to is known.
            known = [checkpoint for checkpoint in scan.checkpoints if checkpoint in before.lineage]
            found = ancestry(before.parent, scan.checkpoints) or known
            self._folders = {checkpoint.step: checkpoint.folder for checkpoint in reversed(found)}
            self._head = before.parent
        return self._folders.get(step)
