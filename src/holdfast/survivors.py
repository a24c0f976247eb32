"""Wait for writers that have outlived their training: what they are about to commit is the newest there is.

A run's attempts enter; nothing leaves, but later. Only processes of this machine can be seen.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from typing import Any

from holdfast.catalog import Catalog
from holdfast.identity import birth_of, parent_of

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
    for folder in catalog.open_attempts():
        if _is_orphan(catalog.attempt_record(folder)):
            return folder
    return None


def _is_orphan(record: dict[str, Any]) -> bool:
    """Whether a writer is alive whose trainer is not. One whose trainer lives is at work for somebody else."""
    writer, trainer = record.get("process"), record.get("trainer")
    if not isinstance(writer, int) or not isinstance(trainer, int) or record.get("host") != socket.gethostname():
        return False
    if birth_of(writer) is None or birth_of(writer) != record.get("birth") or writer == os.getpid():
        return False
    return parent_of(writer) != trainer
