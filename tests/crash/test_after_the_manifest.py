"""Every call after a manifest was created fails: no save is reported as failed while it is the latest checkpoint."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import HoldfastError, SaveFailedError, SaveUncertainError, StorageError
from holdfast.ranks.base import Ranks
from holdfast.ranks.single import Alone
from holdfast.ranks.store import StoreRanks
from holdfast.runs.catalog import Catalog
from holdfast.saving.pipeline import Saver
from holdfast.saving.request import SaveRequest
from holdfast.storage.base import Storage, StorageFeatures
from holdfast.testing import MemoryStorage, PowerLossStorage
from holdfast.testing.storages import _Wrapper
from tests.crash.runs import MemoryStore, Witness, components, violations
from tests.crash.test_crash_points import scratch
from tests.sizes import pairs

__all__ = ["scratch"]

_PATIENCE_SECONDS = 300.0

ERRORS: dict[str, Callable[[str], Exception]] = {
    "of the storage": lambda call: StorageError("the disk has a bad day [EIO]", errno=errno.EIO, file=call),
    "of a plug-in": lambda call: RuntimeError(f"the client library failed in {call}"),
}


class FailingAfterManifest(_Wrapper):
    """A storage whose n-th call after a manifest was created fails, counted from 0, which is the creation itself; with
    `lasting` every later call fails, too. Calls about leases do not count: their number depends on the clock."""

    def __init__(self, inner: Storage, fail_at: int | None, error: Callable[[str], Exception], lasting: bool) -> None:
        super().__init__(inner)
        self.fail_at, self.error, self.lasting = fail_at, error, lasting
        self.calls: list[str] = []
        self._lock = threading.Lock()

    def put(self, key: str, data: bytes) -> None:
        self._maybe_fail(f"put {key}")
        self.inner.put(key, data)
        if key.endswith("manifest.json") and not self.calls:
            self._maybe_fail(f"after put {key}", begins=True)

    def read(self, key: str, limit_bytes: int) -> bytes:
        self._maybe_fail(f"read {key}")
        return self.inner.read(key, limit_bytes)

    def entries(self, folder: str) -> Any:
        self._maybe_fail(f"entries {folder}")
        return self.inner.entries(folder)

    def sync(self, folder: str) -> None:
        self._maybe_fail(f"sync {folder}")
        self.inner.sync(folder)

    def delete(self, key: str) -> None:
        self._maybe_fail(f"delete {key}")
        self.inner.delete(key)

    @property
    def features(self) -> StorageFeatures:
        return StorageFeatures(links=_FailingLinks(self._maybe_fail))

    def _maybe_fail(self, call: str, *, begins: bool = False) -> None:
        with self._lock:
            if not (begins or self.calls) or " lease" in call:
                return
            number = len(self.calls)
            self.calls.append(call)
        if self.fail_at is not None and (number == self.fail_at or (self.lasting and number > self.fail_at)):
            raise self.error(call)


class _FailingLinks:
    """Links that lead nowhere; to make one may fail."""

    def __init__(self, maybe_fail: Callable[[str], None]) -> None:
        self._maybe_fail = maybe_fail

    def point(self, name: str, target: str) -> None:
        self._maybe_fail(f"point {name}")

    def remove(self, name: str) -> None:
        raise AssertionError("no link is removed while saving")

    def targets(self) -> dict[str, str]:
        return {}


def save_once(storage: Storage, n: int, mode: Any) -> list[HoldfastError | str]:
    """Save step 1 on `n` ranks that are threads, and return how that ended on each: its folder, or the error."""
    store = MemoryStore(lambda: False)
    ended: list[HoldfastError | str] = [""] * n

    def live(rank: int) -> None:
        ranks: Ranks = Alone()
        if n > 1:
            ranks = StoreRanks(store, rank, n, name="threads", timeout_seconds=_PATIENCE_SECONDS / 3)
        saver = Saver(Catalog(storage), ranks, mode=mode, timeout_seconds=_PATIENCE_SECONDS / 3)
        try:
            ended[rank] = saver.save(1, lambda: SaveRequest(1, components(1, rank))).result().folder
        except HoldfastError as error:
            ended[rank] = error
        saver.close()

    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    return ended


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize(
    ("mode", "n", "kind", "lasting"), pairs(["sync", "async"], [1, 2], ERRORS, [False, True]), ids=str
)
def test_a_save_is_never_reported_as_failed_while_it_is_the_latest(mode: str, n: int, kind: str, lasting: bool) -> None:
    point, failed_at_all, seen = -1, True, set()
    while failed_at_all:
        point += 1
        inner = MemoryStorage()
        storage = FailingAfterManifest(inner, point, ERRORS[kind], lasting)
        ended = save_once(storage, n, mode)
        failed_at_all = len(storage.calls) > point
        where = f"{point}, {storage.calls[point] if failed_at_all else 'the end'}: {ended}"
        assert len({(type(end), str(end)) for end in ended}) == 1, f"the ranks differ: {where}"
        scan = Catalog(inner).scan()
        there = [found.folder for found in scan.checkpoints]
        first = ended[0]
        if isinstance(first, str):
            assert there == [first], where
        elif not isinstance(first, SaveUncertainError):
            assert there == [], where
            assert scan.closed == ("step-000000001",), f"nobody can commit it any more: {where}"
        seen.add(type(first))
        witness = Witness(committed=[1] if isinstance(first, str) else [])
        assert violations(inner, n, witness) == [], where
    assert point > 2
    assert str in seen
    assert (StorageError if kind == "of the storage" else SaveFailedError) in seen or lasting
    assert (SaveUncertainError in seen) == lasting, "an error that comes once leaves no doubt"


class RepeatingPut(_Wrapper):
    """A storage whose client repeats the creation of a manifest, because the answer to the first request was lost."""

    def put(self, key: str, data: bytes) -> None:
        self.inner.put(key, data)
        if key.endswith("manifest.json"):
            self.inner.put(key, data)


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_manifest_that_is_created_twice_by_one_request_is_committed(mode: str) -> None:
    inner = MemoryStorage()
    assert save_once(RepeatingPut(inner), 1, mode) == ["step-000000001"]
    assert [found.step for found in Catalog(inner).scan().checkpoints] == [1]


class CutLine(_Wrapper):
    """A storage that cuts the leader off from its writer in the middle of a commit, before the manifest or after it."""

    def __init__(self, inner: Storage, after: bool) -> None:
        super().__init__(inner)
        self.after = after
        self.cut: Callable[[], None] = lambda: None

    def put(self, key: str, data: bytes) -> None:
        is_manifest = key.endswith("manifest.json")
        if is_manifest and not self.after:
            self.cut()
        self.inner.put(key, data)
        if is_manifest and self.after:
            self.cut()


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("after", [False, True], ids=["before the manifest", "after it"])
def test_a_leader_that_is_cut_off_from_its_writer_has_nothing_removed_that_may_be_committed(after: bool) -> None:
    inner = MemoryStorage()
    storage = CutLine(inner, after)
    store = MemoryStore(lambda: False)
    ended: list[Any] = [None, None]
    savers: list[Saver] = []

    def cut() -> None:
        writer: Any = savers[0]._async.supervisor.writer
        writer._channel._socket.close()

    def live(rank: int) -> None:
        ranks = StoreRanks(store, rank, 2, name="threads", timeout_seconds=_PATIENCE_SECONDS / 3)
        saver = Saver(Catalog(storage), ranks, mode="async", timeout_seconds=_PATIENCE_SECONDS / 3)
        if rank == 0:
            savers.append(saver)
        try:
            ended[rank] = saver.save(1, lambda: SaveRequest(1, components(1, rank))).result().folder
        except HoldfastError as error:
            ended[rank] = error
        saver.close()

    storage.cut = cut
    threads = [threading.Thread(target=live, args=(rank,), daemon=True) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(_PATIENCE_SECONDS)
        assert not thread.is_alive(), "a rank hangs"
    assert len({(type(end), str(end)) for end in ended}) == 1, ended
    assert isinstance(ended[0], SaveUncertainError) or ended[0] == "step-000000001", ended
    witness = Witness(committed=[1] if isinstance(ended[0], str) else [])
    assert violations(inner, 2, witness) == []


class UnsyncedManifest(PowerLossStorage):
    """A disk on which the sync of a folder that follows on its manifest fails, and syncs nothing."""

    has_manifest = has_failed = False

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        self.has_manifest = self.has_manifest or key.endswith("manifest.json")

    def sync(self, folder: str) -> None:
        if self.has_manifest and not self.has_failed:
            self.has_failed = True
            raise StorageError("syncing the folder failed: [EIO]", errno=errno.EIO, file=folder)
        super().sync(folder)


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_save_that_was_reported_as_failed_is_not_brought_back_by_a_power_cut(mode: str, scratch: Path) -> None:
    storage = UnsyncedManifest(scratch / "disk")
    (ended,) = save_once(storage, 1, mode)
    assert isinstance(ended, StorageError), ended
    for seed in range(24):
        found = storage.after_power_loss(seed, scratch / f"after-{seed}")
        scan = Catalog(found).scan()
        assert (scan.checkpoints, scan.damaged) == ((), ()), seed
        assert scan.closed == ("step-000000001",), seed
