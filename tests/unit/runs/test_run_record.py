"""The record of a run, when several processes open a run at once."""

from __future__ import annotations

import threading

import pytest

from holdfast.errors import KeyMissingError, StorageError
from holdfast.runs.catalog import Catalog
from holdfast.runs.run_record import open_run
from holdfast.testing import MemoryStorage
from holdfast.testing.storages import _Wrapper


class LateReads(_Wrapper):
    """A file server that remembers for some reads that a key was not there."""

    def __init__(self, inner: MemoryStorage, misses: int) -> None:
        super().__init__(inner)
        self.misses = misses

    def read(self, key: str, limit_bytes: int) -> bytes:
        if self.misses:
            self.misses -= 1
            raise KeyMissingError("the key does not exist", file=key)
        return self.inner.read(key, limit_bytes)


@pytest.mark.parametrize("misses", [1, 2, 3])
def test_who_loses_the_race_for_a_run_gets_the_winners_id(misses: int) -> None:
    inner = MemoryStorage()
    winner = open_run(Catalog(inner))
    assert winner
    assert open_run(Catalog(LateReads(inner, misses))) == winner


def test_a_run_whose_record_cannot_be_seen_is_an_error_and_never_an_empty_id() -> None:
    inner = MemoryStorage()
    open_run(Catalog(inner))
    with pytest.raises(StorageError, match="the record of the run exists, but reading it finds nothing"):
        open_run(Catalog(LateReads(inner, 1000)))


def test_processes_that_open_a_run_at_once_get_one_id() -> None:
    inner = MemoryStorage()
    begin = threading.Barrier(8)
    found: list[str] = []

    def live() -> None:
        begin.wait()
        found.append(open_run(Catalog(inner)))

    threads = [threading.Thread(target=live) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(found) == 8
    assert len(set(found)) == 1
