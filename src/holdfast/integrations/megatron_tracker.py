"""Write the file by which Megatron-Bridge finds a run. A folder and an iteration enter; the file is all that leaves.

Bridge calls the `load` of a manager only if its own look at the folder finds this file (or one of its own checkpoints).
Without it a resume would silently be a start from scratch. Nothing of Holdfast reads it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import holdfast

__all__ = ["mark_run", "write_tracker"]

_FILE = "latest_checkpointed_iteration.txt"
# Every run has it, from its first save on.
_RECORD = "run.json"


def mark_run(place: str | os.PathLike[str]) -> None:
    """Make sure that Bridge finds the Holdfast run in a folder. Other folders are left as they are."""
    _check_local(place)
    folder = Path(place)
    if (folder / "manifest.json").is_file():
        raise holdfast.UsageError(
            f"'{place}' is the folder of one checkpoint, and Megatron-Bridge would not find it",
            advice="name the folder of its run; ckpt_step chooses the checkpoint",
        )
    if not (folder / _RECORD).is_file() or (folder / _FILE).is_file():
        return
    # Also when nothing is committed: a writer of a training that ended may be at it, and a load waits for that.
    latest = next(iter(holdfast.checkpoints(place)), None)
    write_tracker(place, 0 if latest is None else latest.step)


def write_tracker(place: Any, iteration: int) -> None:
    """Write the number of the last committed iteration, all at once."""
    _check_local(place)
    folder = Path(place)
    # A name of its own for each process: ranks of several nodes may write at the same time.
    temporary = folder / f".{_FILE}.{os.uname().nodename}.{os.getpid()}"
    try:
        temporary.write_text(str(iteration))
        os.replace(temporary, folder / _FILE)
    except OSError as error:
        raise holdfast.StorageError(
            f"{_FILE} cannot be written to '{place}': {error}",
            errno=error.errno,
            advice="Megatron-Bridge loads nothing from a folder without it; make the folder writable, or create it "
            f"there with the text {iteration}",
        ) from error


def _check_local(place: str | os.PathLike[str]) -> None:
    text = os.fspath(place)
    if "://" in text and not text.startswith("file://"):
        raise holdfast.UsageError(
            f"'{text}' is a URL, and Megatron-Bridge looks for checkpoints in local folders only",
            advice="use a path; a resume from a URL would be a start from scratch",
        )
