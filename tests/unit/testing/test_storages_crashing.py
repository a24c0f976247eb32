"""A process that dies at its n-th operation: what is done before is there, nothing is done after."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.storage.base import Storage
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import CrashingStorage, MemoryStorage, SimulatedCrash

OPERATIONS = [
    "create step/data",
    "write step/data (4 bytes)",
    "write step/data (2 bytes)",
    "close step/data",
    "sync step",
    "put step/manifest.json",
    "sync step",
    "delete old",
]


def save(storage: Storage) -> None:
    with storage.create("step/data", 6) as sink:
        sink.write(b"0123")
        sink.write(b"45")
    assert storage.read("step/data", 6) == b"012345"
    storage.sync("step")
    storage.put("step/manifest.json", b"{}")
    storage.sync("step")
    storage.delete("old")


def memory() -> MemoryStorage:
    storage = MemoryStorage()
    storage.put("old", b"x")
    return storage


def there(storage: Storage) -> list[str]:
    names = [entry.name for folder in ("", "step") for entry in storage.entries(folder) if not entry.is_folder]
    return sorted(names)


def test_without_a_crash_it_only_counts() -> None:
    storage = CrashingStorage(memory())
    save(storage)
    assert storage.operations == OPERATIONS
    assert there(storage) == ["data", "manifest.json"]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("crash_at", range(1, len(OPERATIONS) + 1))
def test_what_was_done_before_is_there_and_nothing_else(crash_at: int, after: bool) -> None:
    inner = memory()
    storage = CrashingStorage(inner, crash_at, after=after)
    with pytest.raises(SimulatedCrash, match=f"operation {crash_at}: {OPERATIONS[crash_at - 1][:5]}"):
        save(storage)
    assert storage.operations == OPERATIONS[:crash_at]
    done = OPERATIONS[: crash_at if after else crash_at - 1]
    wanted = ["data"] * ("close step/data" in done) + ["manifest.json"] * ("put step/manifest.json" in done)
    assert there(inner) == wanted + ["old"] * ("delete old" not in done)


def test_the_dead_do_nothing() -> None:
    inner = memory()
    storage = CrashingStorage(inner, 1)
    with pytest.raises(SimulatedCrash):
        storage.put("new", b"x")
    for call in (
        lambda: storage.put("new", b"x"),
        lambda: storage.create("new", 1),
        lambda: storage.delete("old"),
        lambda: storage.sync(""),
        lambda: storage.read("old", 1),
        lambda: storage.open("old"),
        lambda: storage.entries(""),
        lambda: storage.free_bytes(),
    ):
        with pytest.raises(SimulatedCrash):
            call()
    assert there(inner) == ["old"]
    assert len(storage.operations) == 1


def test_a_crash_inside_of_a_write_lets_half_of_it_through_and_leaves_the_debris(tmp_path: Path) -> None:
    class Sink:
        data = b""

        def write(self, data: memoryview) -> None:
            self.data += bytes(data)

    sink = Sink()

    class OneSink(MemoryStorage):
        def create(self, key: str, size_bytes: int) -> Sink:  # type: ignore[override]
            return sink

    storage = CrashingStorage(OneSink(), 3)  # type: ignore[arg-type]
    with pytest.raises(SimulatedCrash):
        save(storage)
    assert sink.data == b"01234"

    storage = CrashingStorage(LocalStorage(tmp_path), 3)
    with pytest.raises(SimulatedCrash):
        save(storage)
    assert os.listdir(tmp_path / "step") == ["data"]


def test_no_except_exception_survives_a_crash() -> None:
    assert not issubclass(SimulatedCrash, Exception)
