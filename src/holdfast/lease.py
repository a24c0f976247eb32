"""Whose run it is: one writer at a time, and which checkpoints are being read. Knows storage; knows no torch.

A claim is a key that is created once; whoever creates the next number is the writer. Its holder adds a beat now and
then. A holder on this machine is looked up among the processes; one elsewhere counts as dead when no beat has come for
as long as its claim says, by the clock of whoever watches: clocks of two machines are never compared.

The number fences: who holds it may commit only while there is no higher one. Between that look and the commit lies a
moment, so whoever takes a run over also closes every open attempt (`Catalog.close_attempts`), after its own claim: an
attempt that was begun before finds its manifest's name taken, and one that is begun later finds the higher number.

A deletion cannot be refused like that: there is no name to take before it. So names are not used again. Each lease has
a floor: all names that are there once its number is claimed and the open attempts are closed lie under it, and so does
all that lay under the floor of a lease before it. What an earlier holder may still be deleting is among them, and
whoever holds the lease takes only names above.
"""

from __future__ import annotations

import contextlib
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

import msgspec

from holdfast.errors import HoldfastError, KeyExistsError, KeyMissingError, RunInUseError, StorageError
from holdfast.identity import Identity, is_alive, this_process
from holdfast.records import layout
from holdfast.records.manifest import digest_of
from holdfast.records.wire import from_json
from holdfast.storage.base import Entry, Storage

logger = logging.getLogger("holdfast")

__all__ = ["DEFAULT_TIMEOUT_SECONDS", "Clock", "Heart", "Lease", "Readers", "claim_digest", "reading", "require_number"]

DEFAULT_TIMEOUT_SECONDS = 60.0
_BEATS_PER_TIMEOUT = 6
_LONGEST_TIMEOUT_SECONDS = 600.0
_LOOKS_PER_BEAT = 4
_MAX_RECORD_BYTES = 1 << 16
_BEAT = ".beat-"
_CLAIM = ".json"
_RELEASED = ".released"
_FLOOR = ".floor-"
_NUMBER = re.compile(r"([0-9]{9,19})\.json", re.ASCII)
_FLOOR_NAME = re.compile(r"[0-9]{9,19}\.floor-([0-9]{9,19})\.([1-9][0-9]{0,8})", re.ASCII)


class _Claim(msgspec.Struct, frozen=True):
    """Who holds something, and after how long a silence he does not any more."""

    holder: Identity
    started: str
    timeout_seconds: float


@dataclass(frozen=True, slots=True)
class Clock:
    """Time that passes, for those who wait for it."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


class Lease:
    """The right to write to a run. Held until it is released, or until somebody has reason to take it over.

    `floor`: what an earlier holder may still be deleting has a name below it; only names above it are free.
    """

    def __init__(self, storage: Storage, number: int, floor: layout.Floor, heart: Heart) -> None:
        self.number = number
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
    ) -> Lease:
        """Become the writer of a run. A RunInUseError when somebody who lives is; who may have died elsewhere is
        watched for as long as his claim says. `from_this_process`: whether to take it from this very process.
        `close_attempts` is called with the number: without it, who had the run before may still commit."""
        claim = _Claim(identity or this_process(), _now(), timeout_seconds)
        while True:
            entries = storage.entries(layout.LEASE)
            highest = _highest(entries)
            if highest:
                _require_free(storage, highest, entries, claim, clock or Clock(), from_this_process)
            try:
                storage.put(_key(layout.LEASE, _name(highest + 1), _CLAIM), msgspec.json.encode(claim) + b"\n")
            except KeyExistsError:
                continue  # somebody was faster; look again who it is
            heart = Heart.of_lease(storage, highest + 1, timeout_seconds)
            try:
                storage.sync(layout.LEASE)
                claims = storage.entries(layout.LEASE)
                if _highest(claims) != highest + 1:
                    continue  # others came, and went, since this one looked
                heart.start()
                close_attempts(highest + 1)
                floor = _lay_floor(storage, highest + 1, claims)
                _forget_older(storage, highest, entries)
            except BaseException:
                # Nobody would ever release it, and nobody else could have it while this process lives.
                heart.stop()
                _release(storage, highest + 1)
                raise
            return cls(storage, highest + 1, floor, heart)

    def require(self) -> None:
        """Raise if somebody else has become the writer."""
        require_number(self._storage, self.number)

    def release(self) -> None:
        """Let the next one have it at once. Idempotent; a forked child releases nothing."""
        self._heart.stop()
        if not self._held or self._owner != os.getpid():
            return
        self._held = False
        _release(self._storage, self.number)


def _lay_floor(storage: Storage, number: int, claims: Sequence[Entry]) -> layout.Floor:
    """Find the floor of a lease and write it down for those that come after it.

    `claims` and the names of the run are seen after the number was claimed: before, its last holder could still go on.
    Written down because this one will remove names which an earlier holder, asleep, is about to remove as well. And
    after the attempts were closed: those are the ones of others that this one may remove.
    """
    visible = layout.Floor.of(entry.name for entry in storage.entries(""))
    laid = (_FLOOR_NAME.fullmatch(entry.name) for entry in claims)
    floor = layout.Floor.highest((visible, *(layout.Floor(int(match[1]), int(match[2])) for match in laid if match)))
    if floor == layout.Floor():
        return floor
    with contextlib.suppress(KeyExistsError):  # by one who had the number, and lost it with the power
        storage.put(_key(layout.LEASE, _name(number), f"{_FLOOR}{floor.step:09d}.{floor.attempt}"), b"{}\n")
    storage.sync(layout.LEASE)
    return floor


def _release(storage: Storage, number: int) -> None:
    try:
        storage.put(_key(layout.LEASE, _name(number), _RELEASED), b"{}\n")
    except KeyExistsError:
        pass
    except StorageError as error:
        logger.warning("the run could not be released; the next writer will see by itself: %s", error)


def require_number(storage: Storage, number: int) -> None:
    """Raise if there is a writer with a higher number than this one: whoever has this one may not commit any more."""
    highest = _highest(storage.entries(layout.LEASE))
    if highest <= number:
        return
    holder = _read_claim(storage, highest)
    raise RunInUseError(
        f"{holder.holder if holder else 'another process'} has taken this run over",
        host=holder.holder.host if holder else "",
        process=holder.holder.process if holder else None,
        run=storage.url,
        advice="this process may not save to it any more; nothing that was committed is lost",
    )


def claim_digest(storage: Storage, number: int) -> str:
    """Return the digest of the claim with this number, which no other run has; empty when there is no such claim."""
    try:
        return digest_of(storage.read(_key(layout.LEASE, _name(number), _CLAIM), _MAX_RECORD_BYTES))
    except KeyMissingError:
        return ""


def _require_free(
    storage: Storage, number: int, entries: Sequence[Entry], mine: _Claim, clock: Clock, from_this_process: bool
) -> None:
    """Return when the holder of a number does not hold it any more; raise when he does, or when somebody else took it
    over while this one watched."""
    names = {entry.name for entry in entries}
    if f"{_name(number)}{_RELEASED}" in names:
        return
    claim = _read_claim(storage, number)
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
    highest = _highest(storage.entries(layout.LEASE))
    faster = _read_claim(storage, highest) if highest != number else None
    if faster is not None and not (faster.holder == mine.holder and from_this_process):
        raise _in_use(storage, highest, faster)


def _beats(storage: Storage, number: int, claim: _Claim, clock: Clock) -> bool:
    """Whether a holder on another machine gives a sign within the time that his claim states."""
    # What a file says is not waited for beyond reason.
    patience = min(max(claim.timeout_seconds, 0.0), _LONGEST_TIMEOUT_SECONDS)
    pause = patience / _BEATS_PER_TIMEOUT / _LOOKS_PER_BEAT
    first = _last_beat(storage.entries(layout.LEASE), _name(number))
    deadline = clock.now() + patience
    logger.warning("%s held the run %s; waiting up to %g s for a sign of it", claim.holder, storage.url, patience)
    while clock.now() < deadline:
        clock.sleep(pause)
        entries = storage.entries(layout.LEASE)
        if f"{_name(number)}{_RELEASED}" in {entry.name for entry in entries}:
            return False
        if _highest(entries) != number:
            return False
        if _last_beat(entries, _name(number)) != first:
            return True
    return False


def _in_use(storage: Storage, number: int, claim: _Claim) -> RunInUseError:
    age = _age_seconds(storage, number, claim)
    return RunInUseError(
        f"{claim.holder} writes to this run; it began at {claim.started} and was heard of {age:.0f} s ago",
        host=claim.holder.host,
        process=claim.holder.process,
        age_seconds=age,
        run=storage.url,
        advice="end that training first, or give this one a run of its own; reading needs no permission",
    )


def _age_seconds(storage: Storage, number: int, claim: _Claim) -> float:
    beat = _last_beat(storage.entries(layout.LEASE), _name(number))
    said = claim.started
    if beat:
        with contextlib.suppress(StorageError):
            said = storage.read(_beat_key(layout.LEASE, _name(number), beat), _MAX_RECORD_BYTES).decode().strip()
    try:
        return max((datetime.now(UTC) - datetime.fromisoformat(said)).total_seconds(), 0.0)
    except ValueError:
        return 0.0


def _forget_older(storage: Storage, highest: int, entries: Sequence[Entry]) -> None:
    """Remove what the holders before the last left behind. The last one's claim stays, so that he finds out; the new
    one's floor is as high as theirs."""
    for entry in entries:
        number = entry.name.partition(".")[0]
        if number.isdigit() and (int(number) < highest or _BEAT in entry.name or _FLOOR in entry.name):
            with contextlib.suppress(StorageError):
                storage.delete(f"{layout.LEASE}/{entry.name}")


class Heart:
    """Adds a beat to a claim every so often, in a thread, until it is stopped or the claim is gone or overtaken.

    `only_if`: beats only while this is so; for a writer process, which speaks for its trainer when that is gone.
    """

    def __init__(
        self,
        storage: Storage,
        folder: str,
        name: str,
        interval_seconds: float,
        only_if: Callable[[], bool] = lambda: True,
    ) -> None:
        self._storage = storage
        self._folder = folder
        self._claim_name = name
        self._interval_seconds = interval_seconds
        self._only_if = only_if
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
    ) -> Heart:
        return cls(storage, layout.LEASE, _name(number), timeout_seconds / _BEATS_PER_TIMEOUT, only_if)

    def start(self) -> None:
        threading.Thread(target=self._run, name="holdfast-lease", daemon=True).start()

    def stop(self) -> None:
        self._stopped.set()

    def beat(self) -> bool:
        """Add one beat; False when there is nothing to keep alive any more."""
        entries = self._storage.entries(self._folder)
        if f"{self._claim_name}{_CLAIM}" not in {entry.name for entry in entries}:
            return False
        if self._folder == layout.LEASE and _highest(entries) > int(self._claim_name):
            return False
        last = _last_beat(entries, self._claim_name)
        try:
            self._storage.put(_beat_key(self._folder, self._claim_name, last + 1), _now().encode() + b"\n")
        except KeyExistsError:
            return True  # the other one who speaks for this claim did
        if last:
            self._storage.delete(_beat_key(self._folder, self._claim_name, last))
        return True

    def _run(self) -> None:
        while not self._stopped.wait(self._interval_seconds):
            try:
                if self._only_if() and not self.beat():
                    return
            except HoldfastError as error:
                if not self._warned:
                    self._warned = True
                    logger.warning("no sign of life could be left with the run: %s", error)


# Readers


@contextmanager
def reading(storage: Storage, folder: str) -> Iterator[None]:
    """Say that a checkpoint is being read, so that nobody removes its bytes meanwhile. Look at its manifest only after
    this: a checkpoint that was given up before is not there then. Where nothing can be written nothing is said."""
    name = f"{folder}--{uuid.uuid4().hex[:12]}"
    claim = _Claim(this_process(), _now(), DEFAULT_TIMEOUT_SECONDS)
    try:
        storage.put(_key(layout.READERS, name, _CLAIM), msgspec.json.encode(claim) + b"\n")
    except StorageError as error:
        logger.debug("%s is read without saying so: %s", folder, error)
        yield
        return
    heart = Heart(storage, layout.READERS, name, DEFAULT_TIMEOUT_SECONDS / _BEATS_PER_TIMEOUT)
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
        entries = self.storage.entries(layout.READERS)
        names = [entry.name.removesuffix(_CLAIM) for entry in entries if entry.name.endswith(_CLAIM)]
        return [(name, self._lives(name, _last_beat(entries, name))) for name in names]

    def _lives(self, name: str, beat: int) -> bool:
        try:
            claim = from_json(self.storage.read(_key(layout.READERS, name, _CLAIM), _MAX_RECORD_BYTES), _Claim)
        except KeyMissingError:
            return False
        except (StorageError, msgspec.MsgspecError):
            return True
        alive = is_alive(claim.holder)
        if alive is not None:
            return alive
        last, since = self._seen.get(name, (-1, 0.0))
        if beat != last:
            self._seen[name] = (beat, self.clock.now())
            return True
        return self.clock.now() - since < claim.timeout_seconds


def _forget_reader(storage: Storage, name: str) -> None:
    with contextlib.suppress(StorageError):
        for entry in storage.entries(layout.READERS):
            if entry.name.startswith(f"{name}."):
                storage.delete(f"{layout.READERS}/{entry.name}")


# Names


def _name(number: int) -> str:
    return f"{number:09d}"


def _key(folder: str, name: str, ending: str) -> str:
    return layout.key(folder, f"{name}{ending}")


def _beat_key(folder: str, name: str, beat: int) -> str:
    return _key(folder, name, f"{_BEAT}{beat:09d}")


def _highest(entries: Sequence[Entry]) -> int:
    numbers = (_NUMBER.fullmatch(entry.name) for entry in entries)
    return max((int(match[1]) for match in numbers if match), default=0)


def _last_beat(entries: Sequence[Entry], name: str) -> int:
    front = f"{name}{_BEAT}"
    beats = (entry.name.removeprefix(front) for entry in entries if entry.name.startswith(front))
    return max((int(beat) for beat in beats if beat.isdigit()), default=0)


def _read_claim(storage: Storage, number: int) -> _Claim | None:
    """The claim with that number; None when it is gone."""
    try:
        data = storage.read(_key(layout.LEASE, _name(number), _CLAIM), _MAX_RECORD_BYTES)
        return from_json(data, _Claim)
    except KeyMissingError:
        return None
    except msgspec.MsgspecError as error:
        raise StorageError(f"it is no claim: {error}", file=_key(layout.LEASE, _name(number), _CLAIM)) from None


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="microseconds")
