"""Hold what calls of a manager return: the handle of a save, which may still be under way, and the outcome of a
restore."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

from holdfast.errors import HoldfastError, KeyMissingError
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.saving.outcome import Saved
from holdfast.saving.pending import PendingSave

logger = logging.getLogger("holdfast")

__all__ = ["RestoreResult", "SaveHandle"]


class SaveHandle:
    """One save, which may still be under way."""

    def __init__(self, pending: PendingSave, catalog: Catalog) -> None:
        self.step = pending.step
        self._pending = pending
        self._catalog = catalog
        self._checkpoint: Checkpoint | None = None

    @property
    def path(self) -> str:
        """Return where the checkpoint lies once it is committed: the `path` of the `Checkpoint`, the same on all ranks.
        Of a step that was committed before, it is that of its checkpoint. Until `wait` returns there may be nothing at
        it, or files without a manifest. A save that failed leaves no checkpoint at it; the next save of the step may.
        """
        return self._catalog.path_of(self._pending.folder)

    @property
    def skipped(self) -> bool:
        """Return whether the step was committed before, so that nothing was written."""
        return self._pending.skipped

    def staged(self) -> bool:
        """Return whether the state is copied, so that the training may change its tensors in any way. In the pinned
        modes the steps of the optimizers wait for it by themselves."""
        return self._pending.staged()

    def done(self) -> bool:
        """Return whether the save has ended: committed, or failed, which `wait` then raises."""
        return self._pending.done()

    def wait(self) -> Checkpoint:
        """Wait for the commit and return the checkpoint, or raise the error of the save.

        The outcome is the same on every rank. On one that cannot read the manifest, or where retention has removed the
        checkpoint since, `step`, `folder`, `path`, `digest`, `sequence` and `size_bytes` are what the leader committed,
        and everything else is read when it is asked for.
        """
        saved = self._pending.result()
        if self._checkpoint is not None:
            return self._checkpoint
        try:
            self._checkpoint = self._read(saved)
        except KeyMissingError:
            # No error: another rank may have read it before it was removed.
            logger.info("step %d was committed in %s, which was removed since", self.step, saved.folder)
            return self._announced(saved)
        except HoldfastError as error:
            logger.warning(
                "step %d is committed in %s, but this process cannot read its records now: %s",
                self.step,
                saved.folder,
                error,
            )
            # Not kept: the next call tries again.
            return self._announced(saved)
        return self._checkpoint

    def _announced(self, saved: Saved) -> Checkpoint:
        return self._catalog.announced(
            saved.folder, self.step, saved.digest, sequence=saved.sequence, size_bytes=saved.size_bytes
        )

    def _read(self, saved: Saved) -> Checkpoint:
        found = self._pending.checkpoint or self._catalog.read(saved.folder)
        # One that was there before has the annotations since then, and those of this save.
        return self._catalog.annotated(found) if saved.skipped else found

    def __repr__(self) -> str:
        if not self._pending.done():
            state = "staged" if self._pending.staged() else "under way"
        elif self._pending.error is not None:
            state = "failed"
        else:
            state = "committed before" if self.skipped else "committed"
        return f"SaveHandle(step={self.step}, {state})"


@dataclass(frozen=True, slots=True)
class RestoreResult:
    """The outcome of a restore. `resumed` is False for a fresh run, whose `next_step` is 0.

    `restored` are the components that took state, `missing` what the checkpoint did not have, `skipped` what was left
    as it is, each with the reason, and `rejected` the folders that were no sound checkpoint, each with the reason. A
    fresh start has it, too: with `resume="never"` it lists all that is there. `accepted` are differences that the
    strategy let pass and a stricter one would refuse, such as another number of parameter groups. `renamed` and `cast`
    are the leaves that have another name or another floating type in the checkpoint. `deferred` are the components of
    the random state that `restore(rng="later")` has read and checked, and that `restore_rng()` sets; they are not in
    `restored`.
    """

    resumed: bool
    step: int | None = None
    next_step: int = 0
    progress: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    extra: dict[str, Any] = field(default_factory=dict)
    config: Any = None
    checkpoint: Checkpoint | None = None
    restored: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    rejected: tuple[str, ...] = ()
    accepted: tuple[str, ...] = ()
    renamed: tuple[str, ...] = ()
    cast: tuple[str, ...] = ()
    deferred: tuple[str, ...] = ()
