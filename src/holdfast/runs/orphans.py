"""Wait for orphaned writers, which have outlived their training: what they are about to commit is the newest there is.

The attempts of a run enter; nothing leaves. Only processes of this machine can be seen.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time

from holdfast.errors import HoldfastError, StorageError
from holdfast.runs.attempts import AttemptRecord
from holdfast.runs.catalog import Catalog
from holdfast.runs.events import Event, Observer
from holdfast.runs.lease import holder
from holdfast.runs.process_identity import is_alive, orphaned_writers, parent_of

logger = logging.getLogger("holdfast")

__all__ = ["wait_for_orphans"]

_PAUSE_SECONDS = 0.05


def wait_for_orphans(catalog: Catalog, timeout_seconds: float, emit: Observer = lambda event: None) -> None:
    """Return when no orphaned writer works on this run any more, or after the timeout. Emit an event for each
    checkpoint that one of them commits meanwhile."""
    deadline = time.monotonic() + timeout_seconds
    waited: list[str] = []
    warned = False
    while time.monotonic() < deadline:
        folder = _written_by_orphan(catalog)
        if folder is None:
            # A writer may have a save that it has not claimed a folder for yet. It ends by itself when it has none.
            process = _writer_without_training(catalog)
            if process is None:
                break
            if not warned:
                warned = True
                logger.warning("waiting for process %d, the writer of a training that has ended", process)
        elif folder not in waited:
            waited.append(folder)
            logger.warning("waiting for %s, which the writer of a training that has ended is still saving", folder)
        time.sleep(_PAUSE_SECONDS)
    for folder in waited:
        # One that did not commit, or that cannot be read now, is no reason to stop a restore.
        with contextlib.suppress(HoldfastError):
            found = catalog.read_head(folder)
            emit(Event("orphan_committed", found.step, 0, size_bytes=found.size_bytes, path=found.path))


def _written_by_orphan(catalog: Catalog) -> str | None:
    """Return the folder of an attempt that an orphaned writer is saving; None where there is none."""
    # By a look at the manifests, which a restore needs anyway, and not into each folder.
    found = catalog.survey_cached()
    for folder in sorted(set(found.attempts) - set(found.closed)):
        try:
            record = catalog.attempts.record(folder)
        except StorageError as error:
            # It does not stop a restore: what is committed can be read without it.
            logger.warning("whether a writer is still saving %s is not known, and is not waited for: %s", folder, error)
            continue
        if _is_orphan(record):
            return folder
    return None


def _writer_without_training(catalog: Catalog) -> int | None:
    """Return a writer process of this machine whose training held the run, has not released it, and is gone. Which run
    it writes to is not known: a training with two of them is waited for by both."""
    try:
        claim = holder(catalog.storage)
    except StorageError as error:
        # It does not stop a restore, as above.
        logger.warning("whether a writer is still saving to this run is not known, and is not waited for: %s", error)
        return None
    if claim is None or is_alive(claim.holder) is not False:
        return None
    return next(orphaned_writers(claim.holder.process), None)


def _is_orphan(record: AttemptRecord) -> bool:
    """Return whether the writer is seen alive and its trainer is not its parent any more. A process number alone proves
    nothing: another container may have the same host name and use the same numbers."""
    writer = record.writer
    if writer is None or record.trainer is None or writer.process == os.getpid():
        return False
    return is_alive(writer) is True and parent_of(writer.process) != record.trainer
