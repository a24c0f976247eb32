"""Every crash point of saves behind the training: the machine, or one rank's writer, dies at each operation."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StorageError
from holdfast.storage.base import Sink, Storage
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import CrashingStorage, MemoryStorage, PowerLossStorage
from tests.crash.runs import STEPS, run_behind, violations, violations_after_power_loss
from tests.crash.test_crash_points import ManifestFirst, forget_all, forget_nth, scratch
from tests.sizes import DEEP, if_deep, pairs, some

__all__ = ["scratch"]

ALL_SEEDS = range(6)
SEEDS = ALL_SEEDS if DEEP else ALL_SEEDS[:2]


def power_cuts(
    n: int,
    scratch: Path,
    forget: Callable[[], Callable[[str], bool]] = lambda: lambda path: False,
    door: type[PowerLossStorage] = PowerLossStorage,
    seeds: Sequence[int] = SEEDS,
) -> Iterator[tuple[str, list[str]]]:
    """Cut the power at every call that changes the disk, until one save is through; what is wrong with each disk.

    Ranks that really run beside each other make their calls in another order each time, so a point is a number only.
    """
    point, whole = 0, False
    while not whole:
        point += 1
        storage = door(scratch / f"{point}", crash_at=point, ignore_fsync_of=forget())
        witness = run_behind([storage] * n, dead=lambda storage=storage: storage.crashed)
        whole = not storage.crashed
        assert witness.committed == list(STEPS) or not whole, witness.ended
        for seed, wrong in violations_after_power_loss(storage, seeds, n, witness, scratch / f"disks-{point}"):
            yield f"{n} ranks, cut at {point} ({storage.log[-1]}), seed {seed}", wrong
        shutil.rmtree(scratch / f"{point}", ignore_errors=True)


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G2")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("n", [1, 2])
def test_a_power_cut_at_any_call_behind_the_training_loses_nothing_that_was_committed(n: int, scratch: Path) -> None:
    disks = 0
    for where, wrong in power_cuts(n, scratch):
        assert wrong == [], where
        disks += 1
    assert disks > 60 * len(SEEDS)


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize(("kind", "n", "after"), pairs(["object store", "folder"], [1, 2], [False, True]))
def test_a_machine_that_dies_at_any_operation_behind_the_training_loses_nothing_that_was_committed(
    kind: str, n: int, after: bool, scratch: Path
) -> None:
    point, whole = 0, False
    while not whole:
        point += 1
        inner = _storage(kind, scratch / str(point))
        storage = CrashingStorage(inner, point, after=after)
        witness = run_behind([storage] * n, dead=lambda storage=storage: storage.crashed)
        whole = not storage.crashed
        assert witness.committed == list(STEPS) or not whole, witness.ended
        assert violations(inner, n, witness) == [], f"crash at {point}: {storage.operations[-1]}"
    assert point > 15


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_writer_that_dies_at_any_operation_while_the_other_ranks_live_leaves_nothing_half_committed(
    victim: int, after: bool
) -> None:
    """The other rank goes on: it must not remove its part of what may have been committed."""
    point, whole = 0, False
    while not whole:
        point += 1
        inner = MemoryStorage()
        storage = CrashingStorage(inner, point, after=after)
        storages: list[Storage] = [inner, inner]
        storages[victim] = storage
        witness = run_behind(storages)
        whole = not storage.crashed
        assert violations(inner, 2, witness) == [], f"rank {victim} died at {point}: {storage.operations[-1]}"
    assert point > 8


class Stumbling(CrashingStorage):
    """One operation fails, before it is done or after, and everything else works."""

    def _begin(self, operation: str) -> bool:
        with self._lock:
            self.operations.append(operation)
            return len(self.operations) == self.crash_at

    def _death(self) -> BaseException:  # type: ignore[override]
        self.crashed = True
        return StorageError("the disk has a bad day [EIO]", errno=errno.EIO, file=self.operations[-1])

    def _look(self, action: Callable[[], Any]) -> Any:
        return action()

    def _abort(self, sink: Sink) -> None:
        sink.abort()


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize(
    ("n", "victim", "after"),
    [(1, 0, False), (2, 0, True), (2, 1, False), *if_deep((1, 0, True), (2, 0, False), (2, 1, True))],
)
def test_an_operation_that_fails_once_costs_at_most_that_save_and_leaves_nothing_half_committed(
    n: int, victim: int, after: bool
) -> None:
    point, whole, broken = 0, False, []
    while not whole:
        point += 1
        inner = MemoryStorage()
        storage = Stumbling(inner, point, after=after)
        storages: list[Storage] = [inner] * n
        storages[victim] = storage
        witness = run_behind(storages)
        whole = not storage.crashed
        where = f"{point}: {storage.operations[point - 1] if not whole else 'the end'}"
        assert len(witness.failed) <= 1, f"{where}: {witness.failed}"
        assert sorted([*witness.committed, *witness.failed]) == list(STEPS), where
        for errors in witness.failed.values():
            assert len(errors) == n, f"{where}: every rank hears it"
            assert len({(type(error), str(error)) for error in errors}) == 1, f"{where}: {errors}"
        broken += [f"{where}: {wrong}" for wrong in violations(inner, n, witness)]
    assert broken == []
    assert point > 8


def _storage(kind: str, folder: Path) -> Storage:
    return MemoryStorage() if kind == "object store" else LocalStorage(folder)


NEEDED = {
    "the tensor file's bytes": forget_all("rank-00000.safetensors"),
    "the folder before the manifest": forget_nth("step-000000002", 1),
    "the folder after the manifest": forget_nth("step-000000002", 2),
    "the run's folder": forget_all(""),
}


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("sync", some(NEEDED, 2))
def test_without_any_one_sync_the_power_cuts_behind_the_training_are_noticed(sync: str, scratch: Path) -> None:
    assert any(wrong for _, wrong in power_cuts(1, scratch, NEEDED[sync], seeds=ALL_SEEDS))


@pytest.mark.guarantee("G1")
def test_with_the_manifest_before_the_data_the_power_cuts_behind_the_training_are_noticed(scratch: Path) -> None:
    assert any(wrong for _, wrong in power_cuts(1, scratch, door=ManifestFirst, seeds=ALL_SEEDS))
