"""Wait for writers that have outlived their training: what they are about to commit is the newest there is.

A run's attempts enter; nothing leaves, but later. Only processes of this machine can be seen.
"""

from __future__ import annotations

import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import msgspec

from holdfast.catalog import Catalog
from holdfast.errors import HoldfastError
from holdfast.records import layout

logger = logging.getLogger("holdfast")

__all__ = ["birth_of", "wait_for_survivors"]

_MAX_RECORD_BYTES = 1 << 16
_PAUSE_SECONDS = 0.05
_PARENT, _BIRTH = 1, 19


def wait_for_survivors(catalog: Catalog, timeout_seconds: float) -> None:
    """Return when no writer whose training has ended is at work on this run, or the time is over."""
    deadline = time.monotonic() + timeout_seconds
    said = False
    while (folder := _surviving(catalog)) is not None and time.monotonic() < deadline:
        if not said:
            said = True
            logger.warning("waiting for %s, which the writer of a training that has ended is still saving", folder)
        time.sleep(_PAUSE_SECONDS)


def birth_of(process: int) -> int | None:
    """When a process began, in the system's own count: with its number it names one process and no later one."""
    fields = _stat(process)
    return int(fields[_BIRTH]) if fields else None


def _surviving(catalog: Catalog) -> str | None:
    for folder in catalog.open_attempts():
        try:
            data = catalog.storage.read(layout.key(folder, layout.ATTEMPT), _MAX_RECORD_BYTES)
            record = msgspec.json.decode(data, type=dict[str, Any])
        except (HoldfastError, msgspec.MsgspecError):
            continue
        if _is_orphan(record):
            return folder
    return None


def _is_orphan(record: dict[str, Any]) -> bool:
    """Whether a writer is alive whose trainer is not. One whose trainer lives is at work for somebody else."""
    writer, trainer = record.get("process"), record.get("trainer")
    if not isinstance(writer, int) or not isinstance(trainer, int) or record.get("host") != socket.gethostname():
        return False
    fields = _stat(writer)
    if not fields or int(fields[_BIRTH]) != record.get("birth") or writer == os.getpid():
        return False
    return int(fields[_PARENT]) != trainer


def _stat(process: int) -> list[str]:
    """What the system says of a process, from its state on; nothing of one that is gone or only waits to be counted."""
    try:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
    return [] if fields[0] in "ZX" else fields
