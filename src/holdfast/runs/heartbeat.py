"""The heartbeat of a claim: a thread that shows other machines that its holder lives. Knows storage; knows no torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from queue import Empty, SimpleQueue

from holdfast.errors import HoldfastError, KeyExistsError, StorageError
from holdfast.ondisk import paths
from holdfast.runs.claims import (
    BEATS_PER_TIMEOUT,
    CLAIM,
    DEFAULT_TIMEOUT_SECONDS,
    DISK_FULL,
    EMPTY,
    beat_key,
    highest_number,
    last_beat,
    name_of,
    read_claim,
)
from holdfast.runs.clock import timestamp
from holdfast.storage.base import Storage
from holdfast.storage.threads import HelperThread

logger = logging.getLogger("holdfast")

__all__ = ["Heartbeat"]


class Heartbeat:
    """Adds a beat to a claim at an interval, in a thread, until it is stopped or the claim is gone or superseded.

    `only_if`: adds beats only while this returns True; for a writer process, which takes the heartbeat over when its
    trainer has ended. `token`: that of the claim; empty for any.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        name: str,
        interval_seconds: float,
        only_if: Callable[[], bool] = lambda: True,
        token: str = "",
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._claim_name = name
        self._interval_seconds = interval_seconds
        self._only_if = only_if
        self._token = token
        # No threading.Event: an interrupt in its `set` can leave its lock locked for ever, and with it the thread.
        self._stop: SimpleQueue[None] = SimpleQueue()
        self._thread: HelperThread | None = None
        self._warned = False

    @classmethod
    def of_lease(
        cls,
        storage: Storage,
        number: int,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        *,
        only_if: Callable[[], bool] = lambda: True,
        token: str = "",
    ) -> Heartbeat:
        return cls(storage, paths.LEASE, name_of(number), timeout_seconds / BEATS_PER_TIMEOUT, only_if, token)

    def start(self) -> None:
        thread = HelperThread(target=self._run, name="holdfast-lease", daemon=True)
        # First: an interrupt in between must not leave a thread that nothing waits for.
        self._thread = thread
        thread.start()

    def stop(self) -> None:
        """Have the thread end soon. Does not wait for it."""
        self._stop.put(None)

    def end(self) -> None:
        """Return when the thread has ended, and no beat comes any more."""
        self.stop()
        if self._thread is not None:
            self._thread.wait()

    def beat(self) -> bool:
        """Add one beat; False when there is nothing to keep alive any more."""
        entries = self._storage.entries(self._folder)
        if f"{self._claim_name}{CLAIM}" not in {entry.name for entry in entries}:
            return False
        if self._folder == paths.LEASE and highest_number(entries) > int(self._claim_name):
            return False
        if self._token and self._is_of_another():
            return False
        last = last_beat(entries, self._claim_name)
        try:
            self._put_beat(last + 1)
        except KeyExistsError:
            return True  # by the other process that keeps this claim alive
        if last:
            self._storage.delete(beat_key(self._folder, self._claim_name, last))
        return True

    def _put_beat(self, number: int) -> None:
        """Write a heartbeat; one without its time where the disk is full: a live process must not count as dead."""
        key = beat_key(self._folder, self._claim_name, number)
        try:
            self._storage.put(key, timestamp().encode() + b"\n")
        except StorageError as error:
            if error.errno not in DISK_FULL:
                raise
            self._storage.put(key, EMPTY)

    def _is_of_another(self) -> bool:
        """Return whether the claim was deleted by hand and its number taken by another process, which this heartbeat
        must not keep alive. A claim that cannot be read may be ours."""
        try:
            claim = read_claim(self._storage, int(self._claim_name))
        except HoldfastError:
            return False
        return claim is None or claim.token != self._token

    def _run(self) -> None:
        while not self._is_stopped_within(self._interval_seconds):
            try:
                if self._only_if() and not self.beat():
                    return
            except Exception as error:  # this thread must not end while the claim is held
                if not self._warned:
                    self._warned = True
                    logger.warning("a heartbeat could not be written to the run, and is tried again: %s", error)

    def _is_stopped_within(self, seconds: float) -> bool:
        try:
            self._stop.get(timeout=seconds)
        except Empty:
            return False
        return True
