"""Whose run it is: one writer at a time, and which checkpoints are being read. Knows storage; knows no torch.

A claim is a key that is created once; whoever creates the next number is the writer. Its holder adds a beat now and
then. A holder on this machine is looked up among the processes; one elsewhere counts as dead when no beat has come for
as long as its claim says, by the clock of whoever watches: clocks of two machines are never compared.

The number fences: who holds it may commit only while there is no higher one. Between that look and the commit lies a
moment, so a process that takes a run over also closes every open attempt (`Attempts.close_older`), after its own claim:
an attempt that was begun before finds its manifest's name taken, and one that is begun later finds the higher number.

People delete `lease/` by hand. So a claim has a random token, and its holder may commit or delete only while its own
claim, with that token, is there; and a new number is higher than any that an attempt in the run records.

No record is trusted: a claim that cannot be decoded belongs to an unknown holder, who is watched for a sign of life for
a bounded time and then followed. Numbers that no run could have reached by counting are foreign names.

A deletion cannot be refused like that: there is no name to take before it. So names are not used again. Each lease has
a floor: all names that are there once its number is claimed and the open attempts are closed lie under it, and so does
all that lay under the floor of a lease before it. What an earlier holder may still be deleting is among them, and
whoever holds the lease takes only names above.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from typing import Annotated

import msgspec

from holdfast.errors import (
    DamagedRecordError,
    HoldfastError,
    KeyDamagedError,
    KeyExistsError,
    KeyMissingError,
    RunInUseError,
    StorageError,
)
from holdfast.ondisk import paths
from holdfast.ondisk.decoding import encode_record, read_record
from holdfast.runs.attempts import MAX_LEASE_NUMBER, MAX_PLAUSIBLE_LEASE_NUMBER, read_attempt
from holdfast.runs.process_identity import Identity, is_alive, this_process
from holdfast.storage.base import Entry, Storage

logger = logging.getLogger("holdfast")

__all__ = [
    "DEFAULT_TIMEOUT_SECONDS",
    "LONGEST_TIMEOUT_SECONDS",
    "Claim",
    "Clock",
    "Heart",
    "Lease",
    "Readers",
    "claim_names",
    "foreign_claims",
    "has_claim",
    "holder",
    "read_claim",
    "reader_claims",
    "reading",
    "require_free",
    "require_number",
]

DEFAULT_TIMEOUT_SECONDS = 60.0
_BEATS_PER_TIMEOUT = 6
# What a file says is not waited for beyond this.
LONGEST_TIMEOUT_SECONDS = 120.0
_LOOKS_PER_BEAT = 4
_SHORTEST_PAUSE_SECONDS = 0.01
_MAX_BEAT_BYTES = 1 << 10
# A million times more than a training can reach: a count above was not made by counting.
_MAX_BEAT = 10**12
# What needs no content has none: an empty file can be made on a disk that is full.
_NOTHING = b""
_FULL = {errno.ENOSPC, errno.EDQUOT}
_BEAT = ".beat-"
_CLAIM = ".json"
_RELEASED = ".released"
_FLOOR = ".floor-"
_NUMBER = re.compile(r"([0-9]{9,15})\.json", re.ASCII)
_NUMBERED = re.compile(r"([0-9]{9,15})\.(?:json|released|beat-[0-9]+|floor-[0-9.]+)", re.ASCII)
_FOREIGN = re.compile(r"[0-9]{16,}\.", re.ASCII)
_COUNT = re.compile(r"[0-9]{9,13}", re.ASCII)
_FLOOR_NAME = re.compile(r"[0-9]{9,15}\.floor-([0-9]{9,19})\.([1-9][0-9]{0,8})", re.ASCII)


class Claim(msgspec.Struct, frozen=True):
    """Who holds something, and after how long a silence that process does not any more. `token` is different in every
    claim: a process recognises its own by it."""

    holder: Identity
    started: Annotated[str, msgspec.Meta(max_length=100)]
    timeout_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]
    token: Annotated[str, msgspec.Meta(max_length=100)] = ""

    @classmethod
    def of(cls, holder: Identity, timeout_seconds: float) -> Claim:
        """Return a new claim of a process, as of now."""
        return cls(holder, _now(), timeout_seconds, uuid.uuid4().hex)

    @property
    def who(self) -> str:
        """The holder in words."""
        return str(self.holder) if self is not _UNKNOWN else "an unknown process"

    @property
    def patience_seconds(self) -> float:
        """How long to wait for a sign of life, within the bounds."""
        return min(self.timeout_seconds, LONGEST_TIMEOUT_SECONDS)


# The holder whose claim cannot be decoded.
_UNKNOWN = Claim(Identity("an unknown host", "", 0, None), "an unknown time", DEFAULT_TIMEOUT_SECONDS)


@dataclass(frozen=True, slots=True)
class Clock:
    """Time that passes, for those who wait for it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Lease:
    """The right to write to a run. Held until it is released, or until somebody has reason to take it over.

    `floor`: what an earlier holder may still be deleting has a name below it; only names above it are free.
    """

    def __init__(self, storage: Storage, number: int, token: str, floor: paths.Floor, heart: Heart) -> None:
        self.number = number
        self.token = token
        self.floor = floor
        self._storage = storage
        self._heart = heart
        self._owner = os.getpid()
        self._held = True
        weakref.finalize(self, heart.stop)

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
        """Become the writer of a run. A RunInUseError when somebody who lives is; who may have died elsewhere is
        watched for as long as his claim says. `from_this_process`: whether to take it from this very process.
        `close_attempts` is called with the number: without it, who had the run before may still commit. `lost` is the
        number of a claim of this process that was damaged. `force`: take the run over without asking whether its writer
        lives; that one cannot commit any more."""
        claim = Claim.of(identity or this_process(), timeout_seconds)
        tried = 0
        while True:
            entries = _entries(storage, paths.LEASE)
            highest = _highest(entries)
            if highest and highest != lost and not force:
                _require_free(storage, highest, entries, claim, clock or Clock(), from_this_process)
            number = _next_number(storage, max(highest, tried))
            try:
                _with_room(storage, highest, partial(_put_claim, storage, number, claim))
            except KeyExistsError:
                # Somebody was faster: look again who it is. What is taken and not listed is no file; go past it.
                tried = number
                continue
            lease = cls._established(storage, number, claim, highest, entries, close_attempts)
            if lease is not None:
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
        """Return the lease of a claim that was just laid down, None when others came, and went, in between."""
        heart = Heart.of_lease(storage, number, claim.timeout_seconds, token=claim.token)
        try:
            storage.sync(paths.LEASE)
            claims = _entries(storage, paths.LEASE)
            if _highest(claims) != number:
                return None
            heart.start()
            _with_room(storage, number, partial(close_attempts, number))
            floor = _lay_floor(storage, number, claims)
            _forget_older(storage, highest, entries)
        except BaseException:
            # Nobody would ever release it, and nobody else could have it while this process lives.
            heart.stop()
            _release(storage, number)
            raise
        return cls(storage, number, claim.token, floor, heart)

    def require(self) -> None:
        """Raise if this process is not the writer any more: another one is, or the claim is gone."""
        require_number(self._storage, self.number, self.token)

    def is_lost(self) -> bool:
        """Return True when the claim was deleted or damaged and nobody else has written to the run since: then the run
        is free for this process to acquire again. Raise if another process has become the writer."""
        highest = _highest(_entries(self._storage, paths.LEASE))
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
        self._heart.stop()
        self._held = False

    def release(self) -> None:
        """Let the next one have it at once. Idempotent; a forked child releases nothing, and neither does a process
        whose claim is not there any more: what has that number now may be the claim of another."""
        self._heart.stop()
        if not self._held or self._owner != os.getpid():
            return
        self._held = False
        if _is_own(self._storage, self.number, self.token):
            _release(self._storage, self.number)


def _put_claim(storage: Storage, number: int, claim: Claim) -> None:
    storage.put(_key(paths.LEASE, _name(number), _CLAIM), encode_record(claim))


def _with_room(storage: Storage, highest: int, write: Callable[[], None]) -> None:
    """Write something small. On a full disk, remove what earlier holders left in `lease/` and write it again: a run
    must be leased before anything else of it can be removed. `highest`: the highest number that was claimed."""
    try:
        write()
        return
    except StorageError as error:
        if error.errno not in _FULL:
            raise
    _make_room(storage, highest)
    try:
        write()
    except StorageError as error:
        if error.errno not in _FULL:
            raise
        raise error.changed(
            run=storage.url,
            advice="the disk is full, and the lease of the run needs one block of it, and one for each attempt that "
            "was never committed: remove any file that is no part of a run, then run `holdfast prune` again; where "
            "there is none, delete the whole folder of one checkpoint that is not the newest",
        ) from error


def _make_room(storage: Storage, highest: int) -> None:
    """Remove the claims below a number, which say nothing while there is a higher one, and all heartbeats, of which a
    process that lives gives another. Floors stay: they are valid until the next writer has laid its own."""
    for entry in _entries(storage, paths.LEASE):
        match = _NUMBERED.fullmatch(entry.name)
        if match is None or _FLOOR in entry.name:
            continue
        if int(match[1]) < highest or (int(match[1]) == highest and _BEAT in entry.name):
            with contextlib.suppress(StorageError):  # the write that follows says whether there is room
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
    """Return the highest number under which anything in this run was begun. A damaged record counts as none: its
    attempt is closed like that of any earlier writer. One that cannot be read now is an error: its number may be that
    of a process that lives, and must not be given again."""
    highest = 0
    for entry in storage.entries(""):
        if not entry.is_folder or paths.parse_folder(entry.name) is None:
            continue
        key = paths.key(entry.name, paths.ATTEMPT)
        with contextlib.suppress(DamagedRecordError, KeyMissingError):
            highest = max(highest, read_attempt(partial(storage.read, key), key).lease)
    return highest


def has_claim(storage: Storage, number: int, token: str) -> bool:
    """Return whether the claim with this number and token can be seen in this storage."""
    try:
        claim = read_claim(storage, number)
    except DamagedRecordError:
        return False
    return claim is not None and claim.token == token


def _is_own(storage: Storage, number: int, token: str) -> bool:
    try:
        claim = read_claim(storage, number)
    except HoldfastError as error:
        logger.warning("the run %s was not released; the next writer looks for a heartbeat: %s", storage.url, error)
        return False
    return claim is not None and claim.token == token


def _lay_floor(storage: Storage, number: int, claims: Sequence[Entry]) -> paths.Floor:
    """Find the floor of a lease and write it down for those that come after it.

    `claims` and the names of the run are seen after the number was claimed: before, its last holder could still go on.
    Written down because this one will remove names which an earlier holder, asleep, is about to remove as well. And
    after the attempts were closed: those are the ones of others that this one may remove.
    """
    visible = paths.Floor.of(entry.name for entry in storage.entries(""))
    laid = (_FLOOR_NAME.fullmatch(entry.name) for entry in claims)
    floor = paths.Floor.highest((visible, *(paths.Floor(int(match[1]), int(match[2])) for match in laid if match)))
    if floor == paths.Floor():
        return floor
    with contextlib.suppress(KeyExistsError):  # by one who had the number, and lost it with the power
        storage.put(_key(paths.LEASE, _name(number), f"{_FLOOR}{floor.step:09d}.{floor.attempt}"), _NOTHING)
    storage.sync(paths.LEASE)
    return floor


def _release(storage: Storage, number: int) -> None:
    try:
        storage.put(_key(paths.LEASE, _name(number), _RELEASED), _NOTHING)
    except KeyExistsError:
        pass
    except StorageError as error:
        logger.warning("the run could not be released; the next writer will see by itself: %s", error)


def require_number(storage: Storage, number: int, token: str = "") -> None:
    """Raise if whoever has this number may not commit any more: there is a higher one, or the claim with this number
    and `token` is not there. 0 is the number of a writer without a claim; an empty token is that of any claim."""
    highest = _highest(_entries(storage, paths.LEASE))
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
    claim = _claim_or_unknown(storage, number) or _UNKNOWN
    known = claim is not _UNKNOWN
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
    """Raise a RunInUseError while a process that lives, or may live, holds the run. Takes nothing."""
    entries = _entries(storage, paths.LEASE)
    highest = _highest(entries)
    if highest:
        mine = Claim.of(this_process(), DEFAULT_TIMEOUT_SECONDS)
        _require_free(storage, highest, entries, mine, Clock(), from_this_process=False)


def _require_free(
    storage: Storage, number: int, entries: Sequence[Entry], mine: Claim, clock: Clock, from_this_process: bool
) -> None:
    """Return when the holder of a number does not hold it any more; raise when he does, or when somebody else took it
    over while this one watched."""
    names = {entry.name for entry in entries}
    if f"{_name(number)}{_RELEASED}" in names:
        return
    claim = _claim_or_unknown(storage, number)
    if claim is None:
        return
    if claim.holder == mine.holder and from_this_process:
        logger.warning(
            "this process opened the run %s before, and did not close it: that manager cannot save any more",
            storage.url,
        )
        return
    alive = claim.holder == mine.holder or is_alive(claim.holder)
    if alive is None:
        alive = _beats(storage, number, claim, clock)
    if alive:
        raise _in_use(storage, number, claim)
    highest = _highest(_entries(storage, paths.LEASE))
    faster = _claim_or_unknown(storage, highest) if highest != number else None
    if faster is not None and not (faster.holder == mine.holder and from_this_process):
        raise _in_use(storage, highest, faster)


def _beats(storage: Storage, number: int, claim: Claim, clock: Clock) -> bool:
    """Whether a holder on another machine gives a sign within the time that his claim states."""
    patience = claim.patience_seconds
    pause = max(patience / _BEATS_PER_TIMEOUT / _LOOKS_PER_BEAT, _SHORTEST_PAUSE_SECONDS)
    first = _last_beat(_entries(storage, paths.LEASE), _name(number))
    deadline = clock.now() + patience
    logger.warning("%s held the run %s; waiting up to %g s for a sign of it", claim.who, storage.url, patience)
    while clock.now() < deadline:
        clock.sleep(pause)
        entries = _entries(storage, paths.LEASE)
        if f"{_name(number)}{_RELEASED}" in {entry.name for entry in entries}:
            return False
        if _highest(entries) != number:
            return False
        if _last_beat(entries, _name(number)) != first:
            return True
    return False


def _in_use(storage: Storage, number: int, claim: Claim) -> RunInUseError:
    age = _age_seconds(storage, number, claim)
    known = claim is not _UNKNOWN
    who = f"a process whose claim {_key(paths.LEASE, _name(number), _CLAIM)} cannot be read"
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
    beat = _last_beat(_entries(storage, paths.LEASE), _name(number))
    said = claim.started
    if beat:
        try:
            data = storage.read(_beat_key(paths.LEASE, _name(number), beat), _MAX_BEAT_BYTES)
        except KeyMissingError:
            return 0.0  # a newer one has just replaced it
        except StorageError:
            return None
        said = data.decode("utf-8", "replace").strip()
    try:
        # A time without a zone, as no writer of ours states it, is no time that can be compared.
        return max((datetime.now(UTC) - datetime.fromisoformat(said)).total_seconds(), 0.0)
    except (ValueError, TypeError, OverflowError):
        return None


def _forget_older(storage: Storage, highest: int, entries: Sequence[Entry]) -> None:
    """Remove what the holders before the last left behind. The last one's claim stays, so that he finds out; the new
    one's floor is as high as theirs."""
    for entry in entries:
        match = _NUMBERED.fullmatch(entry.name)
        if match and (int(match[1]) < highest or _BEAT in entry.name or _FLOOR in entry.name):
            with contextlib.suppress(StorageError):
                storage.delete(f"{paths.LEASE}/{entry.name}")


class Heart:
    """Adds a beat to a claim every so often, in a thread, until it is stopped or the claim is gone or overtaken.

    `only_if`: beats only while this is so; for a writer process, which speaks for its trainer when that is gone.
    `token`: only for the claim that has it.
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
        self._stopped = threading.Event()
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
    ) -> Heart:
        return cls(storage, paths.LEASE, _name(number), timeout_seconds / _BEATS_PER_TIMEOUT, only_if, token)

    def start(self) -> None:
        threading.Thread(target=self._run, name="holdfast-lease", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def beat(self) -> bool:
        """Add one beat; False when there is nothing to keep alive any more."""
        entries = self._storage.entries(self._folder)
        if f"{self._claim_name}{_CLAIM}" not in {entry.name for entry in entries}:
            return False
        if self._folder == paths.LEASE and _highest(entries) > int(self._claim_name):
            return False
        if self._token and self._is_of_another():
            return False
        last = _last_beat(entries, self._claim_name)
        try:
            self._put_beat(last + 1)
        except KeyExistsError:
            return True  # the other one who speaks for this claim did
        if last:
            self._storage.delete(_beat_key(self._folder, self._claim_name, last))
        return True

    def _put_beat(self, number: int) -> None:
        """Write a heartbeat; one without its time where the disk is full, or a live process would be taken for dead."""
        key = _beat_key(self._folder, self._claim_name, number)
        try:
            self._storage.put(key, _now().encode() + b"\n")
        except StorageError as error:
            if error.errno not in _FULL:
                raise
            self._storage.put(key, _NOTHING)

    def _is_of_another(self) -> bool:
        """Return whether the claim was deleted by hand and its number taken by another process: a sign for that one
        would be a lie. A claim that cannot be read may be ours."""
        try:
            claim = read_claim(self._storage, int(self._claim_name))
        except HoldfastError:
            return False
        return claim is None or claim.token != self._token

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_seconds):
            try:
                if self._only_if() and not self.beat():
                    return
            except Exception as error:  # nobody else would see that this thread has ended
                if not self._warned:
                    self._warned = True
                    logger.warning("no sign of life could be left with the run: %s", error)


# Readers


@contextmanager
def reading(storage: Storage, folder: str) -> Iterator[None]:
    """Say that a checkpoint is being read, so that nobody removes its bytes meanwhile. Look at its manifest only after
    this: a checkpoint that was given up before is not there then. Where nothing can be written nothing is said."""
    name = f"{folder}--{uuid.uuid4().hex[:12]}"
    claim = Claim.of(this_process(), DEFAULT_TIMEOUT_SECONDS)
    try:
        storage.put(_key(paths.READERS, name, _CLAIM), encode_record(claim))
    except StorageError as error:
        logger.debug("%s is read without saying so: %s", folder, error)
        yield
        return
    heart = Heart(storage, paths.READERS, name, DEFAULT_TIMEOUT_SECONDS / _BEATS_PER_TIMEOUT)
    heart.start()
    try:
        yield
    finally:
        heart.stop()
        _forget_reader(storage, name)


@dataclass(slots=True)
class Readers:
    """What is being read, as one process sees it again and again."""

    storage: Storage
    clock: Clock = field(default_factory=Clock)
    _seen: dict[str, tuple[int, float]] = field(default_factory=dict)

    def folders(self) -> set[str]:
        """The checkpoints that somebody reads."""
        return {name.partition("--")[0] for name, lives in self._claims() if lives}

    def sweep(self) -> None:
        """Remove the claims of readers that are gone."""
        for name, lives in self._claims():
            if not lives:
                _forget_reader(self.storage, name)

    def _claims(self) -> list[tuple[str, bool]]:
        """Each claim, and whether its reader lives."""
        entries = _entries(self.storage, paths.READERS)
        names = [entry.name.removesuffix(_CLAIM) for entry in entries if entry.name.endswith(_CLAIM)]
        return [(name, self._lives(name, _last_beat(entries, name))) for name in names]

    def _lives(self, name: str, beat: int) -> bool:
        try:
            claim = _read_claim(self.storage, paths.READERS, name)
        except HoldfastError:
            claim = _UNKNOWN  # watched, as one on another machine is
        if claim is None:
            return False
        alive = is_alive(claim.holder)
        if alive is not None:
            return alive
        last, since = self._seen.get(name, (-1, 0.0))
        if beat != last:
            self._seen[name] = (beat, self.clock.now())
            return True
        return self.clock.now() - since < claim.patience_seconds


def _forget_reader(storage: Storage, name: str) -> None:
    with contextlib.suppress(StorageError):
        for entry in storage.entries(paths.READERS):
            if entry.name.startswith(f"{name}."):
                storage.delete(f"{paths.READERS}/{entry.name}")


# Names


def _name(number: int) -> str:
    return f"{number:09d}"


def _key(folder: str, name: str, ending: str) -> str:
    return paths.key(folder, f"{name}{ending}")


def _beat_key(folder: str, name: str, beat: int) -> str:
    return _key(folder, name, f"{_BEAT}{beat:09d}")


def _entries(storage: Storage, folder: str) -> list[Entry]:
    """List `lease` or `readers`. Where something that is no folder has that name, say which command mends it."""
    try:
        return storage.entries(folder)
    except KeyDamagedError as error:
        advice = f"{folder} is no folder; `holdfast doctor RUN --fix` renames what has its name"
        raise error.changed(run=storage.url, advice=advice) from error


def _numbers(entries: Sequence[Entry]) -> list[int]:
    """Return the numbers of the claims among these names. One above the limit is foreign: no writer counts so far."""
    matches = (_NUMBER.fullmatch(entry.name) for entry in entries)
    numbers = (int(match[1]) for match in matches if match)
    return sorted(number for number in numbers if number <= MAX_LEASE_NUMBER)


def _highest(entries: Sequence[Entry]) -> int:
    return max(_numbers(entries), default=0)


def _last_beat(entries: Sequence[Entry], name: str) -> int:
    front = f"{name}{_BEAT}"
    beats = (entry.name.removeprefix(front) for entry in entries if entry.name.startswith(front))
    counts = (int(beat) for beat in beats if _COUNT.fullmatch(beat))
    return max((count for count in counts if count < _MAX_BEAT), default=0)


def read_claim(storage: Storage, number: int) -> Claim | None:
    """Return the claim with that number, None when it is gone; a `DamagedRecordError` for one that is no claim."""
    return _read_claim(storage, paths.LEASE, _name(number))


def holder(storage: Storage) -> Claim | None:
    """Return the claim by which the run is held, whether its holder lives or not; None when it is free. Of a claim that
    cannot be decoded, one of an unknown process."""
    entries = _entries(storage, paths.LEASE)
    highest = _highest(entries)
    if not highest or f"{_name(highest)}{_RELEASED}" in {entry.name for entry in entries}:
        return None
    return _claim_or_unknown(storage, highest)


def claim_names(storage: Storage) -> list[int]:
    """Return the numbers of all claims on the run, the lowest first."""
    return _numbers(_entries(storage, paths.LEASE))


def foreign_claims(storage: Storage) -> list[str]:
    """Return the names in `lease/` that state a number to which no writer has counted."""
    return [entry.name for entry in storage.entries(paths.LEASE) if _is_foreign(entry.name)]


def _is_foreign(name: str) -> bool:
    match = _NUMBERED.fullmatch(name)
    return _FOREIGN.match(name) is not None or (match is not None and int(match[1]) > MAX_PLAUSIBLE_LEASE_NUMBER)


def reader_claims(storage: Storage) -> list[tuple[str, Claim | DamagedRecordError | None]]:
    """Return the name of each mark of a reader, and its claim, or what is wrong with it; None when it is gone."""
    names = [entry.name for entry in storage.entries(paths.READERS) if entry.name.endswith(_CLAIM)]
    return [(name, _claim_or_damage(storage, name.removesuffix(_CLAIM))) for name in names]


def _claim_or_damage(storage: Storage, name: str) -> Claim | DamagedRecordError | None:
    try:
        return _read_claim(storage, paths.READERS, name)
    except DamagedRecordError as error:
        return error


def _read_claim(storage: Storage, folder: str, name: str) -> Claim | None:
    key = _key(folder, name, _CLAIM)
    try:
        return read_record(partial(storage.read, key), Claim, what="a claim", file=key)
    except KeyMissingError:
        return None


def _claim_or_unknown(storage: Storage, number: int) -> Claim | None:
    """Return the claim with that number, None when it is gone, `_UNKNOWN` when it cannot be read: its holder may live,
    and is watched for a sign of that."""
    try:
        return read_claim(storage, number)
    except HoldfastError as error:
        logger.warning("the claim with number %d of the run %s cannot be read: %s", number, storage.url, error)
        return _UNKNOWN


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
