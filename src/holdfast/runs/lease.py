"""The lease of a run: one writer at a time. Knows storage; knows no torch.

A claim is a key that is created once; the process that creates the next number is the writer, and adds a heartbeat now
and then. A holder on this machine is looked up among the processes; one elsewhere counts as dead when no heartbeat has
come for as long as its claim states, by the clock of the process that watches: the clocks of two machines are never
compared.

The number is a fencing token: its holder may commit only while there is no higher one. A commit follows that check
after a moment, so a process that takes a run over also closes every open attempt (`Attempts.close_older`), after its
own claim: an attempt that was begun before finds its manifest's name taken, and one that is begun later finds the
higher number.

People delete `lease/` by hand. So a claim has a random token, and its holder may commit or delete only while its own
claim, with that token, is there; and a new number is higher than any that an attempt in the run records.

No record is trusted: a claim that cannot be decoded belongs to an unknown holder, which is watched for a heartbeat for
a bounded time. Numbers that no run could have reached by counting are foreign names.

A deletion cannot be fenced by a name that it would have to create. So names are not used again. Each lease has a floor:
all names that exist once its number is claimed and the open attempts are closed lie under it, and so do all names under
the floor of an earlier lease. What an earlier holder may still be deleting is among them, and the holder of the lease
takes only names above.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import weakref
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial

from holdfast.errors import (
    DamagedRecordError,
    HoldfastError,
    KeyExistsError,
    KeyMissingError,
    RunInUseError,
    StorageError,
)
from holdfast.ondisk import paths
from holdfast.ondisk.decoding import encode_record
from holdfast.runs.attempts import MAX_LEASE_NUMBER, read_attempt
from holdfast.runs.claims import (
    BEAT,
    BEATS_PER_TIMEOUT,
    CLAIM,
    DEFAULT_TIMEOUT_SECONDS,
    DISK_FULL,
    EMPTY,
    FLOOR,
    NUMBERED,
    RELEASED,
    UNKNOWN,
    Claim,
    beat_key,
    claim_key,
    claim_or_unknown,
    entries_of,
    highest_number,
    last_beat,
    name_of,
    read_claim,
)
from holdfast.runs.clock import Clock
from holdfast.runs.heartbeat import Heartbeat
from holdfast.runs.process_identity import Identity, is_alive, this_process
from holdfast.storage.base import Entry, Storage

logger = logging.getLogger("holdfast")

__all__ = ["Lease", "holder", "require_free", "require_number"]

_LOOKS_PER_BEAT = 4
_SHORTEST_PAUSE_SECONDS = 0.01
_MAX_BEAT_BYTES = 1 << 10
_FLOOR_NAME = re.compile(r"[0-9]{9,15}\.floor-([0-9]{9,19})\.([1-9][0-9]{0,8})", re.ASCII)


class Lease:
    """The right to write to a run. Held until it is released or taken over.

    `floor`: what an earlier holder may still be deleting has a name below it; only names above it are free.
    `taken_from`: the claim of the earlier holder, where that had not released it.
    """

    def __init__(self, storage: Storage, number: int, token: str, floor: paths.Floor, heartbeat: Heartbeat) -> None:
        self.number = number
        self.token = token
        self.floor = floor
        self.taken_from: Claim | None = None
        self._storage = storage
        self._heartbeat = heartbeat
        self._owner = os.getpid()
        self._held = True
        weakref.finalize(self, heartbeat.stop)

    @classmethod
    def acquire(
        cls,
        storage: Storage,
        *,
        timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS,
        identity: Identity | None = None,
        clock: Clock | None = None,
        from_this_process: bool = True,
        close_attempts: Callable[[int], None] = lambda number: None,
        lost: int = 0,
        force: bool = False,
    ) -> Lease:
        """Become the writer of a run; a RunInUseError when a live process is. A holder on another machine is watched
        for as long as its claim states. `from_this_process`: whether to take the run from this very process.
        `close_attempts` is called with the number: without it the last holder may still commit. `lost`: the number of a
        claim of this process that was damaged. `force`: take the run over without checking whether its writer lives;
        that process cannot commit any more."""
        claim = Claim.of(identity or this_process(), timeout_seconds)
        tried = 0
        previous: Claim | None = None
        while True:
            entries = entries_of(storage, paths.LEASE)
            highest = highest_number(entries)
            if highest and highest != lost and not force:
                previous = _require_free(storage, highest, entries, claim, clock or Clock(), from_this_process)
            number = _next_number(storage, max(highest, tried))
            try:
                _with_room(storage, highest, partial(_put_claim, storage, number, claim))
            except KeyExistsError:
                # Another process was faster: check again. A name that is taken and not listed is no file; skip it.
                tried = number
                continue
            lease = cls._established(storage, number, claim, highest, entries, close_attempts)
            if lease is not None:
                lease.taken_from = previous
                return lease

    @classmethod
    def _established(
        cls,
        storage: Storage,
        number: int,
        claim: Claim,
        highest: int,
        entries: Sequence[Entry],
        close_attempts: Callable[[int], None],
    ) -> Lease | None:
        """Return the lease of a claim that was just created, None when another process took a higher number."""
        heartbeat = Heartbeat.of_lease(storage, number, claim.timeout_seconds, token=claim.token)
        try:
            storage.sync(paths.LEASE)
            claims = entries_of(storage, paths.LEASE)
            if highest_number(claims) != number:
                return None
            _start(heartbeat, storage)
            _with_room(storage, number, partial(close_attempts, number))
            floor = _lay_floor(storage, number, claims)
            _forget_older(storage, highest, entries)
        except BaseException:
            # Otherwise the run would be held, and never released, as long as this process lives.
            heartbeat.end()
            _release(storage, number)
            raise
        return cls(storage, number, claim.token, floor, heartbeat)

    def require(self) -> None:
        """Raise if this process is not the writer any more: another one is, or the claim is gone."""
        require_number(self._storage, self.number, self.token)

    def is_lost(self) -> bool:
        """Return True when the claim was deleted or damaged and no other process has written to the run since: then
        this process may acquire it again. Raise if another process has become the writer."""
        highest = highest_number(entries_of(self._storage, paths.LEASE))
        if highest > self.number:
            raise _taken_over(self._storage, highest)
        try:
            claim = read_claim(self._storage, self.number)
        except DamagedRecordError:
            claim = None
        if claim is not None and claim.token == self.token:
            return False
        if claim is not None:
            raise _taken_over(self._storage, self.number)
        recorded = _recorded_number(self._storage)
        if recorded > self.number:
            raise _taken_over(self._storage, recorded)
        return True

    def abandon(self) -> None:
        """Stop the heartbeat and release nothing: the claim is lost."""
        self._heartbeat.end()
        self._held = False

    def release(self) -> None:
        """Release the run for the next writer. Idempotent; a forked child releases nothing, and neither does a process
        whose claim is gone: what has that number now may be the claim of another process."""
        self._heartbeat.end()
        if not self._held or self._owner != os.getpid():
            return
        self._held = False
        if _is_own(self._storage, self.number, self.token):
            _release(self._storage, self.number)


def _put_claim(storage: Storage, number: int, claim: Claim) -> None:
    storage.put(claim_key(paths.LEASE, name_of(number), CLAIM), encode_record(claim))


def _with_room(storage: Storage, highest: int, write: Callable[[], None]) -> None:
    """Write something small. On a full disk, remove what earlier holders left in `lease/` and write it again: a run
    must be leased before anything else of it can be removed. `highest`: the highest number that was claimed."""
    try:
        write()
        return
    except StorageError as error:
        if error.errno not in DISK_FULL:
            raise
    _make_room(storage, highest)
    try:
        write()
    except StorageError as error:
        if error.errno not in DISK_FULL:
            raise
        raise error.changed(
            run=storage.url,
            advice="the disk is full, and the lease of the run needs one block of it, and one for each attempt that "
            "was never committed: remove any file that is no part of a run, then run `holdfast prune` again; where "
            "there is none, delete the whole folder of one checkpoint that is not the newest",
        ) from error


def _make_room(storage: Storage, highest: int) -> None:
    """Remove the claims below a number, which mean nothing while there is a higher one, and all heartbeats, of which a
    live process adds another. Floors stay: they are valid until the next writer has recorded its own."""
    for entry in entries_of(storage, paths.LEASE):
        match = NUMBERED.fullmatch(entry.name)
        if match is None or FLOOR in entry.name:
            continue
        if int(match[1]) < highest or (int(match[1]) == highest and BEAT in entry.name):
            with contextlib.suppress(StorageError):  # the write that follows fails if there is no room
                storage.delete(f"{paths.LEASE}/{entry.name}")
    storage.sync(paths.LEASE)


def _next_number(storage: Storage, highest: int) -> int:
    """Return a number above all that are listed, and above all that the attempts in the run record: `lease/` may have
    been deleted by hand while its holder lives."""
    number = max(highest, _recorded_number(storage)) + 1
    if number > MAX_LEASE_NUMBER:
        raise StorageError(
            f"a lease claim or an attempt.json states the highest lease number that there is, {MAX_LEASE_NUMBER}",
            run=storage.url,
            file=paths.LEASE,
            advice="no writer counted up to it: `holdfast doctor RUN --fix` removes what states it",
        )
    return number


def _recorded_number(storage: Storage) -> int:
    """Return the highest lease number that an attempt of the run records. A damaged record counts as none: its attempt
    is closed like that of any earlier writer. One that cannot be read now is an error: its number may be that of a live
    process, and must not be given again."""
    highest = 0
    for entry in storage.entries(""):
        if not entry.is_folder or paths.parse_folder(entry.name) is None:
            continue
        key = paths.key(entry.name, paths.ATTEMPT)
        with contextlib.suppress(DamagedRecordError, KeyMissingError):
            highest = max(highest, read_attempt(partial(storage.read, key), key).lease)
    return highest


def _is_own(storage: Storage, number: int, token: str) -> bool:
    try:
        claim = read_claim(storage, number)
    except HoldfastError as error:
        logger.warning("the run %s was not released; the next writer looks for a heartbeat: %s", storage.url, error)
        return False
    return claim is not None and claim.token == token


def _start(heartbeat: Heartbeat, storage: Storage) -> None:
    try:
        heartbeat.start()
    except RuntimeError as error:
        raise HoldfastError(
            f"the writer of a run needs a thread for its heartbeat, and the system refuses one: {error}",
            run=storage.url,
            advice="raise the limit of processes and threads (ulimit -u, pids.max of the container)",
        ) from error


def _lay_floor(storage: Storage, number: int, claims: Sequence[Entry]) -> paths.Floor:
    """Return the floor of a lease, and record it for later leases.

    `claims` and the names of the run are listed after the number was claimed: before, the last holder could still add
    some. The floor is recorded because this holder will remove names that an earlier one, suspended, is about to remove
    as well; and after the attempts were closed, because those may be removed too.
    """
    visible = paths.Floor.of(entry.name for entry in storage.entries(""))
    laid = (_FLOOR_NAME.fullmatch(entry.name) for entry in claims)
    floor = paths.Floor.highest((visible, *(paths.Floor(int(match[1]), int(match[2])) for match in laid if match)))
    if floor == paths.Floor():
        return floor
    with contextlib.suppress(KeyExistsError):  # left by a holder of this number whose claim a power cut removed
        storage.put(claim_key(paths.LEASE, name_of(number), f"{FLOOR}{floor.step:09d}.{floor.attempt}"), EMPTY)
    storage.sync(paths.LEASE)
    return floor


def _release(storage: Storage, number: int) -> None:
    try:
        storage.put(claim_key(paths.LEASE, name_of(number), RELEASED), EMPTY)
    except KeyExistsError:
        pass
    except StorageError as error:
        logger.warning("the run could not be released; the next writer looks for a heartbeat: %s", error)


def require_number(storage: Storage, number: int, token: str = "") -> None:
    """Raise if the holder of this number may not commit any more: there is a higher one, or the claim with this number
    and `token` is not there. 0 is the number of a writer without a claim; an empty token matches any claim."""
    highest = highest_number(entries_of(storage, paths.LEASE))
    if highest > number:
        raise _taken_over(storage, highest)
    if number == 0:
        return
    try:
        claim = read_claim(storage, number)
    except DamagedRecordError as error:
        raise _lost(storage, f"damaged: {error}") from None
    if claim is None:
        raise _lost(storage, "deleted")
    if token and claim.token != token:
        raise _taken_over(storage, number)


def _taken_over(storage: Storage, number: int) -> RunInUseError:
    claim = claim_or_unknown(storage, number) or UNKNOWN
    known = claim is not UNKNOWN
    age = _age_seconds(storage, number, claim)
    return RunInUseError(
        f"{claim.holder if known else 'another process'} has taken this run over; {_heartbeat_text(age)}",
        host=claim.holder.host if known else "",
        process=claim.holder.process if known else None,
        age_seconds=age,
        run=storage.url,
        advice="this process cannot save to the run any more; nothing that was committed is lost; to save from here "
        "again, end that process, or free the run with `holdfast unlock RUN --force`, and start this one anew",
    )


def _lost(storage: Storage, how: str) -> RunInUseError:
    return RunInUseError(
        f"the claim by which this process writes to the run was {how}",
        run=storage.url,
        advice="this save was not committed; nothing that was committed is lost; the next save claims the run again if "
        "no other process has",
    )


def require_free(storage: Storage) -> None:
    """Raise a RunInUseError while a process that lives, or may live, holds the run. Changes nothing."""
    entries = entries_of(storage, paths.LEASE)
    highest = highest_number(entries)
    if highest:
        mine = Claim.of(this_process(), DEFAULT_TIMEOUT_SECONDS)
        _require_free(storage, highest, entries, mine, Clock(), from_this_process=False)


def _require_free(
    storage: Storage, number: int, entries: Sequence[Entry], mine: Claim, clock: Clock, from_this_process: bool
) -> Claim | None:
    """Return when the holder of a number does not hold the run any more: its claim, or None if it released that. Raise
    when it does, or when another process took the run over meanwhile."""
    names = {entry.name for entry in entries}
    if f"{name_of(number)}{RELEASED}" in names:
        return None
    claim = claim_or_unknown(storage, number)
    if claim is None:
        return None
    if claim.holder == mine.holder and from_this_process:
        logger.warning(
            "this process opened the run %s before, and did not close it: that manager cannot save any more",
            storage.url,
        )
        return claim
    alive = claim.holder == mine.holder or is_alive(claim.holder)
    if alive is None:
        alive = _beats(storage, number, claim, clock)
    if alive:
        raise _in_use(storage, number, claim)
    highest = highest_number(entries_of(storage, paths.LEASE))
    faster = claim_or_unknown(storage, highest) if highest != number else None
    if faster is not None and not (faster.holder == mine.holder and from_this_process):
        raise _in_use(storage, highest, faster)
    return claim


def _beats(storage: Storage, number: int, claim: Claim, clock: Clock) -> bool:
    """Return whether a holder on another machine adds a heartbeat within the time that its claim states."""
    patience = claim.patience_seconds
    pause = max(patience / BEATS_PER_TIMEOUT / _LOOKS_PER_BEAT, _SHORTEST_PAUSE_SECONDS)
    first = last_beat(entries_of(storage, paths.LEASE), name_of(number))
    deadline = clock.now() + patience
    logger.warning("%s held the run %s; waiting up to %g s for a heartbeat of it", claim.who, storage.url, patience)
    while clock.now() < deadline:
        clock.sleep(pause)
        entries = entries_of(storage, paths.LEASE)
        if f"{name_of(number)}{RELEASED}" in {entry.name for entry in entries}:
            return False
        if highest_number(entries) != number:
            return False
        if last_beat(entries, name_of(number)) != first:
            return True
    return False


def _in_use(storage: Storage, number: int, claim: Claim) -> RunInUseError:
    age = _age_seconds(storage, number, claim)
    known = claim is not UNKNOWN
    who = f"a process whose claim {claim_key(paths.LEASE, name_of(number), CLAIM)} cannot be read"
    advice = (
        "end that process or wait until it ends; if it hangs, `holdfast unlock RUN --force` takes the run from it, and "
        "its saves fail from then on"
    )
    if claim.holder == this_process():
        advice = "close the CheckpointManager of this process that holds the run first"
    return RunInUseError(
        f"{f'{claim.holder}, since {claim.started},' if known else who} holds this run; {_heartbeat_text(age)}",
        host=claim.holder.host if known else "",
        process=claim.holder.process if known else None,
        age_seconds=age,
        run=storage.url,
        advice=advice,
    )


def _heartbeat_text(age_seconds: float | None) -> str:
    if age_seconds is None:
        return "when it last gave a heartbeat is not known"
    return f"its last heartbeat was {age_seconds:.0f} s ago"


def _age_seconds(storage: Storage, number: int, claim: Claim) -> float | None:
    """Return how old the last heartbeat is, or the claim while there is none; None when that cannot be read."""
    beat = last_beat(entries_of(storage, paths.LEASE), name_of(number))
    stated = claim.started
    if beat:
        try:
            data = storage.read(beat_key(paths.LEASE, name_of(number), beat), _MAX_BEAT_BYTES)
        except KeyMissingError:
            return 0.0  # a newer heartbeat has just replaced it
        except StorageError:
            return None
        stated = data.decode("utf-8", "replace").strip()
    try:
        # A time without a zone, as no writer of ours states it, is no time that can be compared.
        return max((datetime.now(UTC) - datetime.fromisoformat(stated)).total_seconds(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None


def _forget_older(storage: Storage, highest: int, entries: Sequence[Entry]) -> None:
    """Remove the files of earlier holders. The claim of the last one stays, so that it finds the higher number; the new
    floor is as high as theirs."""
    for entry in entries:
        match = NUMBERED.fullmatch(entry.name)
        if match and (int(match[1]) < highest or BEAT in entry.name or FLOOR in entry.name):
            with contextlib.suppress(StorageError):
                storage.delete(f"{paths.LEASE}/{entry.name}")


def holder(storage: Storage) -> Claim | None:
    """Return the claim by which the run is held, whether its holder lives or not; None when the run is free. A claim
    that cannot be decoded is that of an unknown process."""
    entries = entries_of(storage, paths.LEASE)
    highest = highest_number(entries)
    if not highest or f"{name_of(highest)}{RELEASED}" in {entry.name for entry in entries}:
        return None
    return claim_or_unknown(storage, highest)
