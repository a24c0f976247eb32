"""The record of a run, `run.json`: its id. Created by the first process that opens the run, read by all others."""

from __future__ import annotations

import logging
import time
import uuid
from functools import partial
from typing import Annotated

import msgspec

from holdfast.errors import (
    DamagedRecordError,
    KeyExistsError,
    KeyMissingError,
    StorageError,
    UnsupportedFormatError,
)
from holdfast.ondisk import paths
from holdfast.ondisk.decoding import encode_record, read_record
from holdfast.ondisk.manifest import FORMAT
from holdfast.runs.catalog import Catalog
from holdfast.runs.clock import timestamp
from holdfast.storage.base import Storage
from holdfast.storage.displacing import remove_or_set_aside

logger = logging.getLogger("holdfast")

__all__ = ["open_run", "read_run_id"]

# The record is looked for again when another process creates or repairs it at the same time: a file server may remember
# for a while that it was not there.
_PAUSES_SECONDS = (0.0, 0.0, 0.05, 0.2, 0.8, 3.2)


class _RunRecord(msgspec.Struct, frozen=True, kw_only=True):
    holdfast_format: Annotated[int, msgspec.Meta(ge=1, le=2**31 - 1)]
    run_id: Annotated[str, msgspec.Meta(min_length=1, max_length=200)]
    created: str


def open_run(catalog: Catalog) -> str:
    """Return the run's id; create the record where there is none. A record that is damaged or was lost is written again
    with the id that the newest checkpoint states."""
    for pause in _PAUSES_SECONDS:
        existing = _read_or_remove(catalog.storage)
        if existing is not None:
            return existing
        run_id = _id_in_checkpoints(catalog) or uuid.uuid4().hex
        record = _RunRecord(holdfast_format=FORMAT, run_id=run_id, created=timestamp())
        try:
            catalog.storage.put(paths.RUN_KEY, encode_record(record))
        except KeyExistsError:
            time.sleep(pause)  # another process was faster
            continue
        catalog.storage.sync("")
        return record.run_id
    raise StorageError(
        "the record of the run exists, but reading it finds nothing",
        run=catalog.storage.url,
        file=paths.RUN_KEY,
        advice="save again; if this goes on, look at the storage",
    )


def read_run_id(storage: Storage) -> str | None:
    """Return the run's id as its record states it, None where there is no record; a `DamagedRecordError` for one that
    cannot be decoded."""
    try:
        record = read_record(
            partial(storage.read, paths.RUN_KEY),
            _RunRecord,
            what="the record of the run",
            file=paths.RUN_KEY,
        )
    except KeyMissingError:
        return None
    except DamagedRecordError as error:
        raise error.at(run=storage.url) from None
    if record.holdfast_format > FORMAT:
        raise UnsupportedFormatError(
            f"the run is of format {record.holdfast_format}; this version knows formats up to {FORMAT}",
            run=storage.url,
            advice="use a newer version of Holdfast; if none ever wrote here, run.json is damaged, and "
            "`holdfast doctor RUN --fix` writes it again",
        )
    return record.run_id


def _read_or_remove(storage: Storage) -> str | None:
    """Return the run's id; remove the record and return None where it is damaged."""
    try:
        return read_run_id(storage)
    except DamagedRecordError as error:
        logger.warning("the record of the run is damaged and is written again: %s", error)
        _remove(storage, error)
        return None


def _remove(storage: Storage, damage: DamagedRecordError) -> None:
    try:
        remove_or_set_aside(storage, paths.RUN_KEY)
    except StorageError as error:
        raise damage.at(
            run=storage.url, advice=f"move it away by hand, because it cannot be removed: {error}"
        ) from None


def _id_in_checkpoints(catalog: Catalog) -> str:
    """Return the run's id as the newest sound checkpoint states it; empty where there is none."""
    return next((found.head.run_id for found in catalog.scan().checkpoints if found.head.run_id), "")
