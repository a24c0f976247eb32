"""Every crash point: the machine dies, or loses its power, at each operation of two saves; then a restart."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest

from holdfast.errors import HoldfastError, RunInUseError
from holdfast.loading.pipeline import load
from holdfast.loading.records import LoadRequest
from holdfast.loading.strategy import LoadStrategy
from holdfast.ranks.single import Alone
from holdfast.runs.catalog import Catalog
from holdfast.runs.selector import Selector
from holdfast.saving.pipeline import save
from holdfast.saving.request import SaveRequest
from holdfast.storage.base import Storage, StorageFeatures
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import CrashingStorage, MemoryStorage, PowerLossStorage
from holdfast.testing.simulation import simulate_ranks
from tests.crash.runs import STEPS, Part, Witness, run, violations, violations_after_power_loss
from tests.sizes import DEEP, pairs, some

ALL_SEEDS = range(8)
SEEDS = ALL_SEEDS if DEEP else ALL_SEEDS[:3]
RANKS = (1, 2, 3)


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """Memory if there is some: the power loss is simulated, so no real disk has to be waited for."""
    shared = Path("/dev/shm")
    folder = shared / f"holdfast-{tmp_path.name}-{id(tmp_path)}" if shared.is_dir() else tmp_path / "scratch"
    folder.mkdir()
    yield folder
    shutil.rmtree(folder)


def power_cuts(
    n: int,
    scratch: Path,
    forget: Callable[[], Callable[[str], bool]],
    door: type[PowerLossStorage] = PowerLossStorage,
    seeds: Sequence[int] = SEEDS,
) -> Iterator[tuple[str, list[str]]]:
    """Cut the power at every call that changes the disk, look at several disks each; what is wrong with each."""
    whole = door(scratch / "whole", ignore_fsync_of=forget())
    assert run(whole, n).committed == list(STEPS)
    for point in range(1, whole.calls + 2):
        storage = door(scratch / f"{point}", crash_at=point, ignore_fsync_of=forget())
        witness = run(storage, n)
        operation = whole.log[point - 1] if point <= whole.calls else "the end"
        for seed, wrong in violations_after_power_loss(storage, seeds, n, witness, scratch / f"disks-{point}"):
            yield f"{n} ranks, cut at {point} ({operation}), seed {seed}", wrong
        shutil.rmtree(scratch / f"{point}", ignore_errors=True)


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G2")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("n", RANKS)
def test_a_power_cut_at_any_call_loses_nothing_that_was_committed(n: int, scratch: Path) -> None:
    points = 0
    for where, wrong in power_cuts(n, scratch, lambda: lambda path: False):
        assert wrong == [], where
        points += 1
    assert points > 60 * len(SEEDS)


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize(("kind", "n", "after"), pairs(["object store", "folder"], RANKS, [False, True]))
def test_a_crash_at_any_operation_loses_nothing_that_was_committed(
    kind: str, n: int, after: bool, scratch: Path
) -> None:
    def storage(name: str) -> Storage:
        return MemoryStorage() if kind == "object store" else LocalStorage(scratch / name)

    whole = CrashingStorage(storage("whole"))
    assert run(whole, n).committed == list(STEPS)
    assert len(whole.operations) > 15
    for point in range(1, len(whole.operations) + 1):
        inner = storage(str(point))
        witness = run(CrashingStorage(inner, point, after=after), n)
        assert witness.crashed
        assert violations(inner, n, witness) == [], f"crash at {point}: {whole.operations[point - 1]}"


def forget_all(name: str) -> Callable[[], Callable[[str], bool]]:
    """Forget every sync of a folder, or of files of this name in any folder."""
    return lambda: lambda path: path == name or (name.endswith((".json", ".safetensors")) and path.endswith(f"/{name}"))


def forget_nth(part: str, n: int) -> Callable[[], Callable[[str], bool]]:
    """Forget the n-th sync of a path, counted from 1."""

    def fresh() -> Callable[[str], bool]:
        seen = 0

        def forget(path: str) -> bool:
            nonlocal seen
            seen += path == part
            return path == part and seen == n

        return forget

    return fresh


NEEDED = {
    "the tensor file's bytes": forget_all("rank-00000.safetensors"),
    "the shared values' bytes": forget_all("shared.json"),
    "a rank's values' bytes": forget_all("rank-00000.json"),
    "the manifest's bytes": forget_all("manifest.json"),
    "the folder before the manifest": forget_nth("step-000000002", 1),
    "the folder after the manifest": forget_nth("step-000000002", 2),
    "the run's folder": forget_all(""),
    "the folder that holds the run": forget_all(".."),
}


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("sync", some(NEEDED, 3))
def test_without_any_one_sync_the_power_cuts_are_noticed(sync: str, scratch: Path) -> None:
    """The enumeration above can fail: each sync of the protocol that is forgotten breaks it."""
    assert any(wrong for _, wrong in power_cuts(1, scratch, NEEDED[sync], seeds=ALL_SEEDS))


class ManifestFirst(PowerLossStorage):
    """A door that gets the order wrong: what is streamed goes down only after the manifest. It answers for all that it
    has acknowledged, or the commit would look for the files."""

    @property
    def features(self) -> StorageFeatures:
        return dataclasses.replace(super().features, stamp=None)

    def create(self, key: str, size_bytes: int) -> Any:
        return _Held(self, key, size_bytes)

    def open(self, key: str) -> Any:
        held = dict(self.__dict__.get("held", []))
        return _HeldSource(len(held[key])) if key in held else super().open(key)

    def put(self, key: str, data: bytes) -> None:
        super().put(key, data)
        if key.endswith("manifest.json"):
            held, self.__dict__["held"] = self.__dict__.get("held", []), []
            for name, content in held:
                with super().create(name, len(content)) as sink:
                    sink.write(content)


class _Held:
    """A sink that only remembers."""

    def __init__(self, storage: ManifestFirst, key: str, size_bytes: int) -> None:
        self.storage, self.key, self.content = storage, key, bytearray()

    def write(self, data: Any) -> None:
        self.content += data

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.storage.__dict__.setdefault("held", []).append((self.key, bytes(self.content)))


class _HeldSource:
    """A source that only has its size."""

    def __init__(self, size_bytes: int) -> None:
        self.size_bytes = size_bytes

    def close(self) -> None:
        pass


@pytest.mark.guarantee("G1")
def test_with_the_manifest_before_the_data_the_power_cuts_are_noticed(scratch: Path) -> None:
    assert any(wrong for _, wrong in power_cuts(1, scratch, lambda: lambda path: False, ManifestFirst, ALL_SEEDS))


def many_writers(storage: Storage) -> list[str]:
    """Eight writers save the same step at the same time, none knowing of the others; what is wrong afterwards. Each
    takes the run over from whoever has it, and who lost it is told so."""
    with ThreadPoolExecutor(8) as pool:
        together = Barrier(8)

        def write(mark: int) -> str | None:
            together.wait()
            try:
                return save(SaveRequest(1, {"all": Part(mark)}), Catalog(storage), Alone()).folder
            except RunInUseError:
                return None

        folders = {mark: folder for mark, folder in enumerate(pool.map(write, range(8))) if folder is not None}
    names = list(folders.values())
    wrong = [] if len(set(names)) == len(names) else [f"two writers share a folder: {sorted(names)}"]
    for mark, folder in folders.items():
        part = Part()
        try:
            load(LoadRequest(Selector("folder", name=folder), {"all": part}, LoadStrategy()), Catalog(storage), Alone())
        except HoldfastError as error:
            wrong.append(str(error))
        if part != Part(mark):
            wrong.append(f"{folder} holds {part.mark}, not {mark}")
    return wrong


class Overwriting(MemoryStorage):
    """A door without the exclusive create: the last one wins."""

    def _require_free(self, key: str) -> None:
        pass


@pytest.mark.guarantee("G1")
def test_writers_that_do_not_know_of_each_other_never_share_an_attempt(scratch: Path) -> None:
    assert many_writers(MemoryStorage()) == []
    assert many_writers(LocalStorage(scratch / "run")) == []


@pytest.mark.guarantee("G1")
def test_without_the_exclusive_create_two_writers_are_noticed() -> None:
    # Two threads must meet: mostly they do at once, on a busy machine later.
    assert any(many_writers(Overwriting()) for _ in range(300))


def test_simulated_ranks_run_in_the_same_order_every_time(scratch: Path) -> None:
    logs = []
    for name in ("a", "b"):
        storage = PowerLossStorage(scratch / name)
        run(storage, 3)
        logs.append([line for line in storage.log if ".tmp-" not in line and "run.json" not in line])
    assert logs[0] == logs[1]


def test_what_a_simulated_rank_raises_is_its_outcome() -> None:
    def fail(ranks: object) -> None:
        raise KeyError("x")

    assert all(isinstance(end, KeyError) for end in simulate_ranks(1, fail))
    assert Witness(ended=simulate_ranks(1, fail)).crashed is False
