"""A checkpoint that is being read is known as such until its reader ends, and keeps its bytes meanwhile."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.ranks.single import Alone
from holdfast.runs.catalog import Catalog
from holdfast.runs.cleanup import Housekeeper
from holdfast.runs.heartbeat import Heartbeat
from holdfast.runs.process_identity import Identity, birth_of, this_process
from holdfast.runs.readers import Readers, reading
from holdfast.runs.retention import KeepLast
from holdfast.runs.selector import Selector
from holdfast.saving.pipeline import Saver
from holdfast.storage.base import Storage
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import MemoryStorage
from tests.interrupting import interrupt_everywhere
from tests.unit.runs.scene import (
    GONE,
    HOST,
    NEIGHBOUR,
    Meeting,
    Time,
    far,
    names,
    save,
    steps,
)


def test_what_is_read_is_known_until_it_is_not(storage: Any) -> None:
    readers = Readers(storage)
    with reading(storage, "step-000000001"), reading(storage, "step-000000001"), reading(storage, "step-000000002.3"):
        assert readers.folders() == {"step-000000001", "step-000000002.3"}
    assert readers.folders() == set()
    assert names(storage, "readers") == []


def test_a_reader_that_fails_leaves_nothing(storage: Any) -> None:
    with pytest.raises(KeyError), reading(storage, "step-000000001"):
        raise KeyError
    assert names(storage, "readers") == []


def test_where_nothing_can_be_written_there_is_reading_all_the_same() -> None:
    with reading(MemoryStorage(capacity_bytes=0), "step-000000001"):
        pass


def heartbeats() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "holdfast-lease"}


@pytest.mark.parametrize("door", [MemoryStorage, LocalStorage])
def test_an_interrupt_at_any_moment_leaves_neither_a_claim_nor_a_thread(door: type, tmp_path: Path) -> None:
    storage: Storage = door(str(tmp_path / "run"))
    before = heartbeats()

    def read() -> None:
        with reading(storage, "step-000000001"):
            pass

    moments = 0
    for place in interrupt_everywhere(read):
        assert names(storage, "readers") == [], place
        for thread in heartbeats() - before:
            thread.join(60)
        assert heartbeats() <= before, place
        moments += 1
    assert moments > 30


@pytest.mark.parametrize("operation", ["list readers", "delete"])
def test_an_interrupt_of_the_cleanup_is_raised_after_it(operation: str) -> None:
    def strike() -> None:
        raise KeyboardInterrupt

    storage = Meeting(MemoryStorage(), do=strike)
    claim = reading(storage, "step-000000001")
    claim.__enter__()
    (name,) = names(storage, "readers")
    storage.before = f"delete readers/{name}" if operation == "delete" else operation
    with pytest.raises(KeyboardInterrupt):
        claim.__exit__(None, None, None)
    assert names(storage, "readers") == []


def test_a_claim_of_this_process_by_which_nothing_reads_shields_nothing(storage: Any) -> None:
    claim_of(storage, "step-000000001", this_process())
    readers = Readers(storage)
    with reading(storage, "step-000000002"):
        assert readers.folders() == {"step-000000002"}
        readers.sweep()
        assert [name.partition("--")[0] for name in names(storage, "readers")] == ["step-000000002"]


class Undeletable(MemoryStorage):
    """A storage that deletes nothing for a while, and is interrupted whenever it should."""

    works = False

    def delete(self, key: str) -> None:
        if not self.works:
            raise KeyboardInterrupt
        super().delete(key)


def test_a_claim_that_could_not_be_removed_is_swept_by_the_process_that_made_it() -> None:
    storage = Undeletable()
    with contextlib.suppress(KeyboardInterrupt), reading(storage, "step-000000001"):
        pass
    assert len(names(storage, "readers")) == 1
    storage.works = True
    readers = Readers(storage)
    assert readers.folders() == set()
    readers.sweep()
    assert names(storage, "readers") == []


def claim_of(storage: Any, folder: str, holder: Identity, timeout_seconds: float = 60.0) -> str:
    """A reader elsewhere, or one that died: only its claim is there."""
    name = f"{folder}--{holder.host}{holder.birth}"
    claim = {"holder": msgspec.to_builtins(holder), "started": "2026-01-01T00:00:00+00:00"}
    storage.put(f"readers/{name}.json", msgspec.json.encode({**claim, "timeout_seconds": timeout_seconds}))
    return name


def test_a_reader_of_this_machine_counts_as_long_as_its_process_lives(storage: Any) -> None:
    claim_of(storage, "step-000000001", GONE)
    claim_of(storage, "step-000000002", NEIGHBOUR)
    readers = Readers(storage)
    assert readers.folders() == {"step-000000002"}
    readers.sweep()
    assert names(storage, "readers") == [f"step-000000002--{HOST}{birth_of(1)}.json"]


def test_a_reader_elsewhere_counts_until_it_was_silent_for_as_long_as_it_said(storage: Any) -> None:
    name = claim_of(storage, "step-000000001", far(), 30.0)
    time = Time()
    readers = Readers(storage, time.clock)
    heart = Heartbeat(storage, "readers", name, 5.0)
    for now, beats, lives in [(0, 0, True), (29, 0, True), (29.5, 1, True), (59, 0, True), (60, 0, False)]:
        time.now = now
        for _ in range(beats):
            assert heart.beat()
        assert (readers.folders() == {"step-000000001"}) is lives, now
    readers.sweep()
    assert names(storage, "readers") == []
    assert heart.beat() is False


def test_looking_alone_removes_no_claim(storage: Any) -> None:
    claim_of(storage, "step-000000001", GONE)
    assert Readers(storage).folders() == set()
    assert len(names(storage, "readers")) == 1


def test_a_claim_that_cannot_be_read_counts(storage: Any) -> None:
    storage.put("readers/step-000000001--x.json", b"no claim")
    readers = Readers(storage)
    assert readers.folders() == {"step-000000001"}
    readers.sweep()
    assert len(names(storage, "readers")) == 1


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_reader_that_comes_just_before_or_after_the_end_reads_all_of_it_or_knows(when: str) -> None:
    """The claim, then a look at the manifest; the end of the manifest, then a look at the claims. In any order one of
    the two sees the other."""
    inner = MemoryStorage()
    met: list[bool] = []
    claim = reading(inner, "step-000000001")

    def come() -> None:
        claim.__enter__()
        met.append(1 in steps(inner))

    operation = "delete step-000000001/manifest.json" if when == "before" else "sync step-000000001"
    storage = Meeting(inner)
    catalog = Catalog(storage)
    saver = Saver(catalog, Alone(), mode="sync")
    for step in (1, 2):
        save(saver, step)
    storage.before, storage.do = operation, come
    keeper = Housekeeper(catalog, keep=KeepLast(1), may_write=saver.hold_run, in_use=lambda: {saver.lineage.head})
    keeper.clean_up()
    assert met == [when == "before"]
    assert steps(inner) == [2]
    left = [name for name in names(inner, "step-000000001") if name.endswith(".safetensors")]
    assert bool(left) or when == "after"
    claim.__exit__(None, None, None)
    keeper.clean_up()
    assert names(inner, "step-000000001") == []


def test_a_selector_finds_a_checkpoint_while_somebody_reads_it(storage: Any) -> None:
    save(Saver(Catalog(storage), Alone(), mode="sync"), 1)
    with reading(storage, "step-000000001"):
        assert Catalog(storage).find(Selector("latest")).step == 1
