"""Wait for writers that have outlived their training: what they are about to commit is the newest there is.

A run's attempts enter; nothing leaves, but later. Only processes of this machine can be seen.
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

__all__ = ["wait_for_survivors"]

_PAUSE_SECONDS = 0.05


def wait_for_survivors(catalog: Catalog, timeout_seconds: float) -> None:
    """Return when no writer whose training has ended is at work on this run, or the time is over."""
    deadline = time.monotonic() + timeout_seconds
    said = False
    while (folder := _surviving(catalog)) is not None and time.monotonic() < deadline:
        if not said:
            said = True
            logger.warning("waiting for %s, which the writer of a training that has ended is still saving", folder)
        time.sleep(_PAUSE_SECONDS)


def _surviving(catalog: Catalog) -> str | None:
    for folder in catalog.attempts.open_folders():
        try:
            record = catalog.attempts.record(folder)
        except StorageError as error:
            # No restore is stopped by it: what is committed can be read without.
            logger.warning("whether a writer is still saving %s is not known, and is not waited for: %s", folder, error)
            continue
        if _is_orphan(record):
            return folder
    return None


def _is_orphan(record: AttemptRecord) -> bool:
    """Return whether a writer is seen alive whose trainer is not its parent any more. The number of a process says
    nothing by itself: another container may have the same host name and use the same numbers."""
    writer = record.writer
    if writer is None or record.trainer is None or writer.process == os.getpid():
        return False
    return is_alive(writer) is True and parent_of(writer.process) != record.trainer
