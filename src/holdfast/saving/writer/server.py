"""Carry out the commands of a trainer: write, commit, discard. Runs in the writer process or in a thread.

If the trainer is gone after everything was staged, the writer goes on: a follower's part ends with its receipt, and the
leader's writer looks for the receipts of all ranks and commits when they are there.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from holdfast.errors import (
    DamagedRecordError,
    HoldfastError,
    KeyExistsError,
    SaveFailedError,
    error_record,
)
from holdfast.ondisk import paths
from holdfast.ondisk.decoding import encode_record, read_record
from holdfast.runs.catalog import Catalog
from holdfast.runs.heartbeat import Heartbeat
from holdfast.runs.links import point_latest
from holdfast.runs.run_record import open_run
from holdfast.saving.commit import commit
from holdfast.saving.messages import Receipt
from holdfast.saving.staging.arena import Arena
from holdfast.saving.writer.channel import Channel
from holdfast.saving.writer.drain import drain
from holdfast.saving.writer.messages import (
    Command,
    Commit,
    Committed,
    Discard,
    Discarded,
    Failed,
    Image,
    Job,
    Layout,
    NewArena,
    Reply,
    Shutdown,
    SignedReceipt,
    Written,
)
from holdfast.storage.base import Storage

logger = logging.getLogger("holdfast")

__all__ = ["serve"]

_MAX_RECEIPT_BYTES = 1 << 30
_FIRST_LOOK_SECONDS = 0.05
_LONGEST_LOOK_SECONDS = 2.0


def serve(
    channel: Channel,
    open_storage: Callable[[str], Storage],
    gone: Callable[[], bool],
    identity: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Handle commands until the trainer shuts the writer down or is gone. `identity` is stored with each claim."""
    _Writer(channel, open_storage, gone, identity).run()


class _Writer:
    def __init__(
        self,
        channel: Channel,
        open_storage: Callable[[str], Storage],
        gone: Callable[[], bool],
        identity: Mapping[str, Any],
    ) -> None:
        self._channel = channel
        self._identity = identity
        self._open_storage = open_storage
        self._gone = gone
        self._arena: Arena | None = None
        self._layout: Layout | None = None
        self._catalogs: dict[str, Catalog] = {}
        self._job: Job | None = None
        self._receipt = Receipt((), ())
        self._created: list[str] = []
        self._committed_layout: int | None = None
        # Set once another process may rely on the files of this save: a manifest names them, or a leader's writer has
        # seen this rank's receipt. A later failure must not remove them.
        self._sealed = False
        self._heart: Heartbeat | None = None

    def run(self) -> None:
        try:
            while (command := self._channel.receive(self._gone)) is not None and not isinstance(command, Shutdown):
                self._handle(command)
            if command is None and self._job is not None:
                self._finish_alone(self._job)
        finally:
            if self._heart is not None:
                self._heart.stop()
            self._release_arena()
            self._channel.close()

    def _handle(self, command: Command) -> None:
        if isinstance(command, NewArena):
            self._release_arena()
            self._arena = Arena(self._channel.take_handle(), command.size_bytes)
        elif isinstance(command, Layout):
            self._layout = command
        elif isinstance(command, Job):
            self._job, self._created, self._sealed = command, [], False
            self._reply_to(command, self._write)
        elif isinstance(command, Commit):
            job = self._job
            if job is None or job.number != command.number:
                self._send(Failed(command.number, error_record(SaveFailedError("there is nothing to commit"))))
            else:
                self._reply_to(job, partial(self._commit, waits=command.waits))
        elif isinstance(command, Discard):
            if self._job is not None and self._job.number == command.number:
                self._discard(self._job)
            self._send(Discarded(command.number))

    def _discard(self, job: Job) -> None:
        if not (self._sealed and job.rank == 0):
            self._remove(job, self._created)
        self._job = None

    def _reply_to(self, job: Job, work: Callable[[Job], Reply]) -> None:
        """Do the work and send its outcome. A trainer that is gone meanwhile is noticed at the next `receive`."""
        try:
            reply = work(job)
        except BaseException as error:
            if not self._sealed:
                self._remove(job, self._created)
                self._job = None
            reply = Failed(job.number, error_record(error), self._sealed)
            if not isinstance(error, Exception):
                self._send(reply)
                raise
        self._send(reply)

    def _send(self, reply: Reply) -> None:
        with contextlib.suppress(OSError):
            self._channel.send(reply)

    # The work

    def _write(self, job: Job) -> Written:
        catalog = self._catalog(job)
        arena, images = self._staged_images(job)
        if job.rank == 0:
            open_run(catalog)
            self._claim(job, catalog)
            self._created.append(paths.ATTEMPT)
        self._receipt = drain(
            job.folder,
            images,
            job.plain,
            arena,
            catalog.storage,
            eager=job.eager,
            check_source=lambda: self._check_source(job),
            on_created=self._created.append,
        )
        if job.rank != 0:
            self._put_receipt(job, catalog.storage)
        size_bytes = sum(file.size_bytes for file in self._receipt.files)
        return Written(job.number, size_bytes)

    def _claim(self, job: Job, catalog: Catalog) -> None:
        try:
            catalog.attempts.claim_folder(job.folder, job.size, lease=self._lease_of(job), **self._identity)
        except KeyExistsError:
            raise SaveFailedError(
                f"another process took the folder {job.folder} in between",
                run=job.run,
                advice="only one training may write to a run; the next save takes another name",
            ) from None

    def _lease_of(self, job: Job) -> int:
        """Return the number under which the leader writes. If the leader is gone, this process renews its lease."""
        number = job.facts.lease if job.facts is not None else 0
        if number and self._heart is None:
            token = job.facts.lease_token if job.facts is not None else ""
            self._heart = Heartbeat.of_lease(self._catalog(job).storage, number, only_if=self._gone, token=token)
            self._heart.start()
        return number

    def _staged_images(self, job: Job) -> tuple[Arena, tuple[Image, ...]]:
        if self._arena is None or self._layout is None or self._layout.number != job.layout:
            raise SaveFailedError("the writer has no layout or no arena for this job")
        return self._arena, self._layout.images

    def _check_source(self, job: Job) -> None:
        if self._gone() or (self._arena is not None and self._arena.abandoned):
            raise SaveFailedError("the training ended before its state was staged", step=job.step)

    def _put_receipt(self, job: Job, storage: Storage) -> None:
        """Write the receipt: the part is durable, also for a leader's writer that outlives this process."""
        name = paths.receipt_file(job.rank)
        self._sealed = True
        self._created.append(name)
        storage.put(paths.key(job.folder, name), encode_record(SignedReceipt(job.token, self._receipt)))
        storage.sync(job.folder)

    def _commit(self, job: Job, *, waits: bool = True) -> Committed:
        catalog = self._catalog(job)
        if job.facts is None or self._layout is None or self._layout.listing is None:
            raise SaveFailedError("only the leader's writer commits")
        receipts = [self._receipt, *self._receipts(job, catalog.storage, job.timeout_seconds if waits else 0.0)]
        self._sealed = True
        # With one rank all chunks come from the layout. Other ranks' receipts come from the storage: not trusted.
        known = self._committed_layout == job.layout and job.size == 1
        checkpoint = commit(job.facts, self._layout.listing, receipts, catalog, same_tensors=known)
        self._committed_layout = job.layout
        self._job = None
        # The checkpoint is there: nothing that fails from here on may fail the save.
        if job.facts.links:
            point_latest(catalog.storage, job.folder)
        self._remove(job, [paths.receipt_file(rank) for rank in range(1, job.size)])
        return Committed(
            job.number, checkpoint.digest, checkpoint.size_bytes, checkpoint.sequence, checkpoint.head.segment
        )

    def _receipts(self, job: Job, storage: Storage, patience_seconds: float) -> list[Receipt]:
        """Return the receipts of the other ranks, once all are there."""
        wanted = {paths.receipt_file(rank) for rank in range(1, job.size)}
        deadline = time.monotonic() + patience_seconds
        pause = _FIRST_LOOK_SECONDS
        while wanted:
            # The folder is listed, and no name is looked up that may not be there yet: network file systems remember
            # for a long time that a name was not there.
            missing = wanted - {entry.name for entry in storage.entries(job.folder)}
            if not missing:
                break
            if time.monotonic() >= deadline:
                raise SaveFailedError(f"of {job.size} ranks' parts these are missing: {', '.join(sorted(missing)[:8])}")
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_LOOK_SECONDS)
        return [_read_receipt(storage, job, name) for name in sorted(wanted)]

    def _finish_alone(self, job: Job) -> None:
        """Finish a save whose trainer is gone. Its part is durable; the leader's writer commits once all parts are."""
        if job.rank != 0:
            return
        try:
            self._commit(job)
        except HoldfastError as error:
            logger.error("step %d was staged, and could not be committed after the training ended: %s", job.step, error)
            if not self._sealed:
                self._remove(job, self._created)
        else:
            logger.warning("step %d was committed after the training had ended", job.step)

    # Cleanup

    def _remove(self, job: Job, names: list[str]) -> None:
        """Remove files of an attempt. What cannot be removed is debris that nothing refers to."""
        storage = self._catalog(job).storage
        # The newest first: a receipt must not outlive the files that it lists.
        for name in reversed(names):
            try:
                storage.delete(paths.key(job.folder, name))
            except Exception as error:
                logger.debug("could not remove %s of an attempt: %s", name, error)

    def _catalog(self, job: Job) -> Catalog:
        if job.run not in self._catalogs:
            self._catalogs[job.run] = Catalog(self._open_storage(job.run))
        return self._catalogs[job.run]

    def _release_arena(self) -> None:
        arena, self._arena = self._arena, None
        if arena is not None:
            arena.close()


def _read_receipt(storage: Storage, job: Job, name: str) -> Receipt:
    key = paths.key(job.folder, name)
    try:
        signed = read_record(
            partial(storage.read, key), SignedReceipt, what="a receipt", file=key, limit_bytes=_MAX_RECEIPT_BYTES
        )
    except DamagedRecordError as error:
        raise SaveFailedError(error.problem, run=job.run, file=key) from None
    if signed.token != job.token:
        raise SaveFailedError(f"{name} is of another save that took the same folder", run=job.run)
    return signed.receipt
