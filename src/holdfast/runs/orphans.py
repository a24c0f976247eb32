"""Wait for orphaned writers, which have outlived their training: what they are about to commit is the newest there is.

The attempts of a run enter; nothing leaves. Only processes of this machine can be seen.
"""

from __future__ import annotations

import logging
import os
import time

from holdfast.errors import StorageError
from holdfast.runs.attempts import AttemptRecord
from holdfast.runs.catalog import Catalog
from holdfast.runs.process_identity import is_alive, parent_of

logger = logging.getLogger("holdfast")

__all__ = ["wait_for_orphans"]

_PAUSE_SECONDS = 0.05


def wait_for_orphans(catalog: Catalog, timeout_seconds: float) -> None:
    """Return when no orphaned writer works on this run any more, or after the timeout."""
    deadline = time.monotonic() + timeout_seconds
    warned = False
    while (folder := _written_by_orphan(catalog)) is not None and time.monotonic() < deadline:
        if not warned:
            warned = True
            logger.warning("waiting for %s, which the writer of a training that has ended is still saving", folder)
        time.sleep(_PAUSE_SECONDS)


def _written_by_orphan(catalog: Catalog) -> str | None:
    """Return the folder of an attempt that an orphaned writer is saving; None where there is none."""
    for folder in catalog.attempts.open_folders():
        try:
            record = catalog.attempts.record(folder)
        except StorageError as error:
            # It does not stop a restore: what is committed can be read without it.
            logger.warning("whether a writer is still saving %s is not known, and is not waited for: %s", folder, error)
            continue
        if _is_orphan(record):
            return folder
    return None


def _is_orphan(record: AttemptRecord) -> bool:
    """Return whether the writer is seen alive and its trainer is not its parent any more. A process number alone proves
    nothing: another container may have the same host name and use the same numbers."""
    writer = record.writer
    if writer is None or record.trainer is None or writer.process == os.getpid():
        return False
    return is_alive(writer) is True and parent_of(writer.process) != record.trainer
