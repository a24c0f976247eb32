"""The record of who began an attempt: `attempt.json`. Values only; it is no part of a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import msgspec

from holdfast.ondisk.decoding import encode_record, read_record

__all__ = ["MAX_LEASE_NUMBER", "MAX_PLAUSIBLE_LEASE_NUMBER", "AttemptRecord", "encode_attempt", "read_attempt"]

# No run ever gets there by counting: a record that states a higher number is damaged, a file name with one is foreign.
MAX_LEASE_NUMBER = 10**12
# Above this number a cleanup removes a claim or a record. The numbers in between keep a run going that was given one:
# without them a number that is just accepted would leave no room for the next.
MAX_PLAUSIBLE_LEASE_NUMBER = 10**11

LeaseNumber = Annotated[int, msgspec.Meta(ge=0, le=MAX_LEASE_NUMBER)]
ProcessNumber = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Birth = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
WorldSize = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]


class AttemptRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Who began an attempt. `claim` is a random name for it; `lease` is the number that its writer held; `trainer` is
    the process that a writer process works for."""

    claim: str = ""
    host: str = ""
    machine: str = ""
    process: ProcessNumber | None = None
    birth: Birth | None = None
    started: str = ""
    world_size: WorldSize = 0
    lease: LeaseNumber = 0
    trainer: ProcessNumber | None = None
    trainer_birth: Birth | None = None


def encode_attempt(record: AttemptRecord) -> bytes:
    return encode_record(record)


def read_attempt(read: Callable[[int], bytes], file: str) -> AttemptRecord:
    """Return the record that `read` gives; see `read_record` for what it raises."""
    return read_record(read, AttemptRecord, what="the record of an attempt", file=file)
