"""Claims: small files by which a process states that it holds a run or reads a checkpoint, and how they are named.

A claim is a key that is created once; its holder adds heartbeats beside it. Values and names; what they mean is in
`lease` and `readers`. No record is trusted: a claim that cannot be decoded belongs to an unknown process, and numbers
that no run could have reached by counting are foreign names.
"""

from __future__ import annotations

import errno
import logging
import re
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated

import msgspec

from holdfast.errors import DamagedRecordError, HoldfastError, KeyDamagedError, KeyMissingError
from holdfast.ondisk import paths
from holdfast.ondisk.decoding import read_record
from holdfast.runs.attempts import MAX_LEASE_NUMBER, MAX_PLAUSIBLE_LEASE_NUMBER
from holdfast.runs.clock import timestamp
from holdfast.runs.process_identity import Identity
from holdfast.storage.base import Entry, Storage

logger = logging.getLogger("holdfast")

__all__ = [
    "BEAT",
    "BEATS_PER_TIMEOUT",
    "CLAIM",
    "DEFAULT_TIMEOUT_SECONDS",
    "DISK_FULL",
    "EMPTY",
    "FLOOR",
    "LONGEST_TIMEOUT_SECONDS",
    "NUMBERED",
    "RELEASED",
    "UNKNOWN",
    "Claim",
    "beat_key",
    "claim_key",
    "claim_names",
    "claim_or_unknown",
    "entries_of",
    "foreign_claims",
    "has_claim",
    "highest_number",
    "last_beat",
    "name_of",
    "read_claim",
    "read_claim_in",
]

DEFAULT_TIMEOUT_SECONDS = 60.0
BEATS_PER_TIMEOUT = 6
# A timeout that a file states is not waited for beyond this.
LONGEST_TIMEOUT_SECONDS = 120.0
# A million times more than a training can reach: a count above was not made by counting.
_MAX_BEAT = 10**12
# A file that needs no content has none: an empty file can be created on a full disk.
EMPTY = b""
DISK_FULL = {errno.ENOSPC, errno.EDQUOT}
BEAT = ".beat-"
CLAIM = ".json"
RELEASED = ".released"
FLOOR = ".floor-"
NUMBERED = re.compile(r"([0-9]{9,15})\.(?:json|released|beat-[0-9]+|floor-[0-9.]+)", re.ASCII)
_NUMBER = re.compile(r"([0-9]{9,15})\.json", re.ASCII)
_FOREIGN = re.compile(r"[0-9]{16,}\.", re.ASCII)
_COUNT = re.compile(r"[0-9]{9,13}", re.ASCII)


class Claim(msgspec.Struct, frozen=True):
    """The process that holds something, and the time without a heartbeat after which it counts as dead. `token` is
    different in every claim: a process recognises its own by it."""

    holder: Identity
    started: Annotated[str, msgspec.Meta(max_length=100)]
    timeout_seconds: Annotated[float, msgspec.Meta(ge=0.0, le=86_400.0)]
    token: Annotated[str, msgspec.Meta(max_length=100)] = ""

    @classmethod
    def of(cls, holder: Identity, timeout_seconds: float) -> Claim:
        """Return a new claim of a process, as of now."""
        return cls(holder, timestamp(), timeout_seconds, uuid.uuid4().hex)

    @property
    def who(self) -> str:
        """Return the holder in words."""
        return str(self.holder) if self is not UNKNOWN else "an unknown process"

    @property
    def patience_seconds(self) -> float:
        """Return how long to wait for a heartbeat, within the bounds."""
        return min(self.timeout_seconds, LONGEST_TIMEOUT_SECONDS)


# The holder whose claim cannot be decoded.
UNKNOWN = Claim(Identity("an unknown host", "", 0, None), "an unknown time", DEFAULT_TIMEOUT_SECONDS)


def read_claim(storage: Storage, number: int) -> Claim | None:
    """Return the claim with that number, None when it is gone; a `DamagedRecordError` for one that is no claim."""
    return read_claim_in(storage, paths.LEASE, name_of(number))


def has_claim(storage: Storage, number: int, token: str) -> bool:
    """Return whether the claim with this number and token can be seen in this storage."""
    try:
        claim = read_claim(storage, number)
    except DamagedRecordError:
        return False
    return claim is not None and claim.token == token


def claim_names(storage: Storage) -> list[int]:
    """Return the numbers of all claims on the run, the lowest first."""
    return _numbers(entries_of(storage, paths.LEASE))


def foreign_claims(storage: Storage) -> list[str]:
    """Return the names in `lease/` that state a number to which no writer has counted."""
    return [entry.name for entry in storage.entries(paths.LEASE) if _is_foreign(entry.name)]


def _is_foreign(name: str) -> bool:
    match = NUMBERED.fullmatch(name)
    return _FOREIGN.match(name) is not None or (match is not None and int(match[1]) > MAX_PLAUSIBLE_LEASE_NUMBER)


def name_of(number: int) -> str:
    return f"{number:09d}"


def claim_key(folder: str, name: str, ending: str) -> str:
    return paths.key(folder, f"{name}{ending}")


def beat_key(folder: str, name: str, beat: int) -> str:
    return claim_key(folder, name, f"{BEAT}{beat:09d}")


def entries_of(storage: Storage, folder: str) -> list[Entry]:
    """Return the entries of `lease` or `readers`. Where something that is no folder has that name, the error names the
    command that repairs it."""
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


def highest_number(entries: Sequence[Entry]) -> int:
    """Return the highest number of a claim among these names; 0 where there is none."""
    return max(_numbers(entries), default=0)


def last_beat(entries: Sequence[Entry], name: str) -> int:
    """Return the count of the last heartbeat of a claim; 0 where there is none."""
    front = f"{name}{BEAT}"
    beats = (entry.name.removeprefix(front) for entry in entries if entry.name.startswith(front))
    counts = (int(beat) for beat in beats if _COUNT.fullmatch(beat))
    return max((count for count in counts if count < _MAX_BEAT), default=0)


def read_claim_in(storage: Storage, folder: str, name: str) -> Claim | None:
    """Return the claim with that name in `lease` or `readers`; see `read_claim`."""
    key = claim_key(folder, name, CLAIM)
    try:
        return read_record(partial(storage.read, key), Claim, what="a claim", file=key)
    except KeyMissingError:
        return None


def claim_or_unknown(storage: Storage, number: int) -> Claim | None:
    """Return the claim with that number, None when it is gone, `UNKNOWN` when it cannot be read: its holder may live,
    and is watched for a heartbeat."""
    try:
        return read_claim(storage, number)
    except HoldfastError as error:
        logger.warning("the claim with number %d of the run %s cannot be read: %s", number, storage.url, error)
        return UNKNOWN
