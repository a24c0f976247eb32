"""Begin and commit a checkpoint outside of a training: the lease, the folder, the lineage, the facts of the manifest.

A run and a step enter; a claimed folder leaves, and after its files are written, the facts to commit it with. Used by
`HoldfastWriter` and by `import_checkpoint`.
"""

from __future__ import annotations

import logging
import platform
from dataclasses import dataclass

import torch

from holdfast._version import __version__
from holdfast.errors import UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.manifest import BLOCK_BYTES, UserMetadata
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.lease import Lease
from holdfast.runs.lineage import Lineage, ancestry, draw_segment
from holdfast.runs.links import point_latest
from holdfast.runs.run_record import open_run
from holdfast.saving.facts import Facts
from holdfast.saving.training_lineage import Ancestry

logger = logging.getLogger("holdfast")

__all__ = ["Attempt", "begin", "facts_of", "finish", "this_torch"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """A claimed folder, and what its checkpoint will go back to. The lease is held until it is released."""

    folder: str
    claim: str
    step: int
    ancestry: Ancestry
    lease: Lease


def begin(catalog: Catalog, step: int | None, size: int, *, resave: bool = False) -> Attempt:
    """Become the writer of a run and claim the folder of a step for so many ranks. None is the step after the latest
    checkpoint's, which the new one continues; a step which that lineage has committed is refused, unless `resave` asks
    for a later checkpoint of the same step."""
    _place_after_latest(catalog, step, resave)  # what is refused becomes no writer, and makes no run
    open_run(catalog)
    lease = Lease.acquire(catalog.storage, close_attempts=catalog.attempts.close_older)
    try:
        # Again: until the lease was taken, its last holder could commit.
        place = _place_after_latest(catalog, step, resave)
        first = lease.floor.first_attempt(place.step)
        folder, claim = catalog.attempts.claim(place.step, size, lease=lease.number, first=first)
    except BaseException:
        lease.release()
        raise
    return Attempt(folder, claim, place.step, place.ancestry, lease)


@dataclass(frozen=True, slots=True)
class _Place:
    step: int
    ancestry: Ancestry


def _place_after_latest(catalog: Catalog, step: int | None, resave: bool) -> _Place:
    """Return the step of the next checkpoint and what it continues, by the checkpoints that are there now."""
    scan = catalog.scan()
    latest = scan.checkpoints[0] if scan.checkpoints else None
    if step is None:
        step = paths.check_step(latest.step + 1 if latest else 0)
    parent = latest.digest if latest else None
    line = ancestry(parent, scan.checkpoints)
    if not resave and any(checkpoint.step == step for checkpoint in line):
        raise UsageError(
            f"step {step} is committed already",
            run=catalog.storage.url,
            step=step,
            advice="a committed checkpoint never changes; save another step",
        )
    return _Place(step, Ancestry(parent, Lineage.through(line), _segment_after(latest)))


def facts_of(attempt: Attempt, metadata: UserMetadata, versions: dict[str, str]) -> Facts:
    """Return the facts of the manifest. `versions`: what is known of the program that had the state, beside ours."""
    return Facts(
        folder=attempt.folder,
        step=attempt.step,
        metadata=metadata,
        ancestry=attempt.ancestry,
        meshes=(),
        versions={"holdfast": __version__, "python": platform.python_version(), **versions},
        lease=attempt.lease.number,
        lease_token=attempt.lease.token,
        block_bytes=BLOCK_BYTES,
    )


def this_torch() -> dict[str, str]:
    """Return the version of the running torch, for state that comes from objects of this process."""
    return {"torch": str(torch.__version__)}


def finish(checkpoint: Checkpoint) -> None:
    """Report a checkpoint that this process has just committed, and point `latest` to it."""
    logger.info("committed step %d: %.1f MiB to %s", checkpoint.step, checkpoint.size_bytes / 2**20, checkpoint.path)
    _committed_last[checkpoint.head.run_id] = checkpoint.digest
    point_latest(checkpoint.storage, checkpoint.folder)


# By run, what this process committed last. `dcp.save` is often given a new writer each time.
_committed_last: dict[str, str] = {}


def _segment_after(latest: Checkpoint | None) -> str:
    """Return the segment of the next checkpoint: that of the latest one if this process has just committed it."""
    if latest is not None and latest.head.segment and _committed_last.get(latest.head.run_id) == latest.digest:
        return latest.head.segment
    return draw_segment()
