"""One writer per run: claims, numbers that fence, floors, and clocks that a test can turn."""

from __future__ import annotations

import json
import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import DamagedRecordError, KeyExistsError, RunInUseError, StorageError
from holdfast.manager.functions import prune
from holdfast.ondisk.paths import Floor
from holdfast.ranks.single import Alone
from holdfast.runs.attempts import MAX_LEASE_NUMBER
from holdfast.runs.catalog import Catalog
from holdfast.runs.claims import LONGEST_TIMEOUT_SECONDS, read_claim
from holdfast.runs.heartbeat import Heartbeat
from holdfast.runs.lease import Lease, require_number
from holdfast.runs.orphans import wait_for_orphans
from holdfast.runs.process_identity import Identity, birth_of, this_process
from holdfast.runs.retention import KeepLast
from holdfast.saving.pipeline import Saver
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import MemoryStorage
from tests.unit.runs.scene import (
    GONE,
    HOST,
    MACHINE,
    NEIGHBOUR,
    Meeting,
    Time,
    Unreadable,
    acquire,
    far,
    names,
    save,
    steps,
)

# Becoming the writer


def test_the_first_who_comes_has_number_one_and_may_write(storage: Any) -> None:
    lease = acquire(storage)
    assert lease.number == 1
    lease.require()
    claim = json.loads(storage.read("lease/000000001.json", 1 << 16))
    assert claim["holder"] == msgspec.to_builtins(this_process())


@pytest.mark.guarantee("G13")
def test_a_second_live_writer_is_told_host_process_and_age(storage: Any) -> None:
    acquire(storage, NEIGHBOUR)
    with pytest.raises(RunInUseError) as caught:
        acquire(storage)
    error = caught.value
    assert (error.host, error.process) == (HOST, 1)  # type: ignore[attr-defined]
    assert 0 <= error.age_seconds < 60  # type: ignore[attr-defined]
    assert f"process 1 on {HOST}" in str(error)
    assert f"its last heartbeat was {error.age_seconds:.0f} s ago" in str(error)  # type: ignore[attr-defined]
    assert "`holdfast unlock RUN --force`" in str(error)
    assert names(storage) == ["000000001.json"]


def test_the_age_is_that_of_the_last_beat(storage: Any) -> None:
    acquire(storage, NEIGHBOUR)
    then = datetime.now(UTC) - timedelta(seconds=90)
    storage.put("lease/000000001.beat-000000004", then.isoformat().encode() + b"\n")
    with pytest.raises(RunInUseError) as caught:
        acquire(storage)
    age_seconds: float = caught.value.age_seconds  # type: ignore[attr-defined]
    assert 90 <= age_seconds <= (datetime.now(UTC) - then).total_seconds()
    assert f"its last heartbeat was {age_seconds:.0f} s ago" in str(caught.value)


def test_a_clock_that_is_behind_gives_no_negative_age(storage: Any) -> None:
    acquire(storage, NEIGHBOUR)
    storage.put("lease/000000001.beat-000000001", b"2999-01-01T00:00:00+00:00\n")
    with pytest.raises(RunInUseError, match="its last heartbeat was 0 s ago"):
        acquire(storage)


@pytest.mark.guarantee("G13")
def test_a_dead_process_of_this_machine_is_followed_at_once(storage: Any) -> None:
    first = acquire(storage, GONE)
    time = Time()
    second = acquire(storage, time=time)
    assert second.number == 2
    assert time.now == 0.0
    with pytest.raises(RunInUseError, match="has taken this run over") as caught:
        first.require()
    assert caught.value.process == os.getpid()  # type: ignore[attr-defined]


@pytest.mark.guarantee("G13")
def test_a_silent_process_elsewhere_is_followed_after_the_time_that_its_claim_states(storage: Any) -> None:
    acquire(storage, far(), timeout_seconds=120.0)
    time = Time()
    assert acquire(storage, time=time).number == 2
    assert 120.0 <= time.now < 130.0


@pytest.mark.guarantee("G13")
def test_a_process_elsewhere_that_gives_a_sign_is_not(storage: Any) -> None:
    lease = acquire(storage, far())

    def beat_once(now: float) -> None:
        if now > 50.0 and "000000001.beat-000000001" not in names(storage):
            lease._heartbeat.beat()

    time = Time(beat_once)
    with pytest.raises(RunInUseError) as caught:
        acquire(storage, time=time)
    assert time.now < 60.0
    assert caught.value.host == "far-1"  # type: ignore[attr-defined]
    lease.require()


def test_a_sign_from_before_is_none(storage: Any) -> None:
    acquire(storage, far())._heartbeat.beat()
    assert acquire(storage).number == 2


def test_a_process_elsewhere_that_releases_meanwhile_is_not_waited_for(storage: Any) -> None:
    lease = acquire(storage, far())
    time = Time(lambda now: lease.release() if now > 5.0 else None)
    assert acquire(storage, time=time).number == 2
    assert time.now < 10.0


def test_of_two_who_wait_for_a_silent_one_the_later_is_told_who_was_faster(storage: Any) -> None:
    acquire(storage, far(1))

    def overtake(now: float) -> None:
        if now > 30.0 and "000000002.json" not in names(storage):
            acquire(storage, far(2))

    with pytest.raises(RunInUseError) as caught:
        acquire(storage, far(3), Time(overtake))
    assert (caught.value.host, caught.value.process) == ("far-2", 2)  # type: ignore[attr-defined]


def test_a_lease_that_was_released_is_free_at_once_whoever_comes(storage: Any) -> None:
    acquire(storage, NEIGHBOUR).release()
    time = Time()
    second = acquire(storage, far(), time)
    assert (second.number, time.now) == (2, 0.0)
    second.release()
    assert acquire(storage).number == 3


def test_this_process_may_take_the_run_from_itself_and_is_warned(
    storage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = acquire(storage)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        assert acquire(storage).number == 2
    assert "this process opened the run" in caplog.text
    with pytest.raises(RunInUseError):
        first.require()


@pytest.mark.guarantee("G13")
@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_of_many_who_come_at_once_one_is_the_writer(kind: str, tmp_path: Path) -> None:
    for turn in range(8):
        storage: Any = MemoryStorage() if kind == "memory" else LocalStorage(tmp_path / str(turn))
        together = threading.Barrier(8)

        def come(number: int, storage: Any = storage, together: threading.Barrier = together) -> int | None:
            # Each sees the others as processes of this machine that live.
            identity = Identity(HOST, MACHINE, 1, birth_of(1)) if number % 2 else this_process()
            identity = Identity(f"{HOST}-{number}", identity.machine, identity.process, identity.birth)
            together.wait()
            try:
                return Lease.acquire(storage, identity=identity).number
            except RunInUseError:
                return None

        with ThreadPoolExecutor(8) as pool:
            numbers = [number for number in pool.map(come, range(8)) if number is not None]
        assert numbers == [1]


@pytest.mark.guarantee("G13")
def test_of_many_who_follow_a_dead_one_only_the_last_may_write(storage: Any) -> None:
    acquire(storage, GONE)
    together = threading.Barrier(6)

    def come(_: int) -> Lease:
        together.wait()
        return Lease.acquire(storage)  # all of them this process, which may follow itself

    with ThreadPoolExecutor(6) as pool:
        leases = list(pool.map(come, range(6)))
    allowed = []
    for lease in leases:
        with suppress(RunInUseError):
            lease.require()
            allowed.append(lease.number)
    assert allowed == [max(lease.number for lease in leases)]


@pytest.mark.guarantee("G13")
def test_a_number_is_given_once_however_late_somebody_comes() -> None:
    inner = MemoryStorage()
    acquire(inner, GONE)

    def others() -> None:
        numbers.extend(acquire(inner, identity).number for identity in (GONE, GONE, NEIGHBOUR))

    numbers: list[int] = []
    # He has seen number 1, and is about to claim the next.
    with pytest.raises(RunInUseError):
        numbers.append(Lease.acquire(Meeting(inner, "put lease/000000002.json", others)).number)
    assert numbers == [2, 3, 4]


def test_who_could_not_become_the_writer_is_in_nobodys_way() -> None:
    inner = MemoryStorage()

    def fail() -> None:
        raise StorageError("the disk has a bad day")

    with pytest.raises(StorageError):
        Lease.acquire(Meeting(inner, "sync lease", fail), identity=NEIGHBOUR)
    assert acquire(inner).number > 0


def test_what_earlier_holders_left_does_not_pile_up(storage: Any) -> None:
    for _ in range(10):
        lease = acquire(storage, GONE)
        lease._heartbeat.beat()
    assert len(names(storage)) <= 3
    for _ in range(10):
        acquire(storage).release()
    assert len(names(storage)) <= 4


@pytest.mark.guarantee("G13")
@pytest.mark.parametrize(
    "content",
    [
        b"what is this",
        b"",
        b"\xff\xfe",
        b"[" * 100_000,
        b'{"holder":' * 200,
        b"{}",
        b'{"holder":1,"started":2,"timeout_seconds":3}',
        b'{"holder":{"host":"h","machine":"m","process":12345678901234567890,"birth":1},"started":"","timeout_seconds":1}',
        b'{"holder":{"host":"h","machine":"m","process":1,"birth":1},"started":"","timeout_seconds":1e300}',
        b'{"holder":{"host":"h","machine":"m","process":1,"birth":1},"started":"","timeout_seconds":-1}',
    ],
    ids=range(10),
)
def test_a_claim_that_cannot_be_decoded_is_watched_for_a_bounded_time_and_then_followed(
    storage: Any, content: bytes
) -> None:
    storage.put("lease/000000001.json", content)
    time = Time()
    assert acquire(storage, time=time).number == 2
    assert 60.0 <= time.now < 70.0


@pytest.mark.guarantee("G13")
def test_a_holder_whose_claim_is_damaged_keeps_the_run_while_it_gives_signs(storage: Any) -> None:
    storage.put("lease/000000001.json", b"what is this")
    time = Time(lambda now: Heartbeat.of_lease(storage, 1).beat() and None)
    with pytest.raises(RunInUseError, match=r"whose claim lease/000000001\.json cannot be read"):
        acquire(storage, time=time)
    assert time.now < 60.0


@pytest.mark.guarantee("G13")
def test_every_flipped_bit_of_a_claim_is_found() -> None:
    storage = MemoryStorage()
    acquire(storage, NEIGHBOUR)
    sound = storage.read("lease/000000001.json", 1 << 16)
    wanted = read_claim(storage, 1)
    for place in range(len(sound) * 8):
        damaged = bytearray(sound)
        damaged[place // 8] ^= 1 << place % 8
        storage.delete("lease/000000001.json")
        storage.put("lease/000000001.json", bytes(damaged))
        with suppress(DamagedRecordError):
            assert read_claim(storage, 1) == wanted, f"bit {place} changed what the claim says"


@pytest.mark.guarantee("G13")
@pytest.mark.parametrize("stated", [3600.0, 86_400.0])
def test_no_claim_can_make_another_process_wait_for_longer_than_two_minutes(storage: Any, stated: float) -> None:
    acquire(storage, far(), timeout_seconds=stated)
    time = Time()
    assert acquire(storage, time=time).number == 2
    assert time.now <= LONGEST_TIMEOUT_SECONDS + 10.0 <= 130.0


@pytest.mark.guarantee("G13")
@pytest.mark.parametrize("digits", [13, 15, 16, 19, 20, 40])
def test_a_number_that_nobody_counted_to_is_a_foreign_name_and_no_endless_loop(storage: Any, digits: int) -> None:
    storage.put(f"lease/{'9' * digits}.json", b"{}")
    assert acquire(storage).number == 1
    assert acquire(storage).number == 2


def test_the_highest_number_of_all_is_an_error_that_names_the_command(storage: Any) -> None:
    storage.put(f"lease/{MAX_LEASE_NUMBER}.json", b"{}")
    with pytest.raises(StorageError, match="holdfast doctor RUN --fix"):
        acquire(storage)


def test_what_takes_the_place_of_a_claim_and_is_no_file_is_passed_by(tmp_path: Path) -> None:
    (tmp_path / "lease").mkdir()
    (tmp_path / "lease" / "000000001.json").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "lease" / "000000002.json")
    assert acquire(LocalStorage(tmp_path)).number == 3


@pytest.mark.parametrize("name", ["²", "9" * 13, "9" * 200, "-1", "x"])
def test_a_beat_that_is_no_count_neither_stops_anybody_nor_hides_a_sign(storage: Any, name: str) -> None:
    lease = acquire(storage, far())
    storage.put(f"lease/000000001.beat-{name}", b"\xff")
    time = Time(lambda now: lease._heartbeat.beat() and None)
    with pytest.raises(RunInUseError, match="far-1"):
        acquire(storage, time=time)


@pytest.mark.parametrize("said", [b"\xff\xfe", b"", b"2026-01-01T00:00:00", b"soon"])
def test_a_beat_that_states_no_time_is_a_sign_all_the_same_and_no_age_is_invented(storage: Any, said: bytes) -> None:
    acquire(storage, NEIGHBOUR)
    storage.put("lease/000000001.beat-000000001", said)
    with pytest.raises(RunInUseError, match="heartbeat is not known") as caught:
        acquire(storage)
    assert caught.value.age_seconds is None  # type: ignore[attr-defined]


def test_a_run_that_is_held_names_the_holder_the_age_of_its_heartbeat_and_the_command(storage: Any) -> None:
    door = Unreadable(storage)
    lease = acquire(door, far())
    lease._heartbeat.beat()
    held = Time(lambda now: lease._heartbeat.beat() and None)
    with pytest.raises(
        RunInUseError, match=r"process 1 on far-1, since \S+, holds .*heartbeat was [0-9]+ s ago.*--force`"
    ):
        acquire(door, time=held)
    door.unread = ".json"
    with pytest.raises(
        RunInUseError, match=r"whose claim lease/000000001.json cannot be read.* [0-9]+ s ago.*--force`"
    ):
        acquire(door, time=held)
    door.unread = ""
    acquire(storage, NEIGHBOUR, force=True)
    with pytest.raises(RunInUseError, match=r"process 1 on \S+ has taken this run over.* s ago.*--force`"):
        lease.require()


def test_a_process_that_holds_the_run_itself_is_not_told_to_end(storage: Any) -> None:
    acquire(storage)
    with pytest.raises(RunInUseError, match="close the CheckpointManager of this process"):
        acquire(storage, from_this_process=False)


# A claim that was deleted by hand


def empty(storage: Any, folder: str = "lease") -> None:
    for name in names(storage, folder):
        storage.delete(f"{folder}/{name}")


@pytest.mark.guarantee("G13")
def test_a_number_is_never_given_again_after_the_claims_were_deleted(storage: Any) -> None:
    saver = Saver(Catalog(storage), Alone(), mode="sync")
    save(saver, 1)
    numbers = [acquire(storage).number for _ in range(3)]
    Catalog(storage).attempts.claim(2, 1, lease=numbers[-1])
    empty(storage)
    assert acquire(storage).number == numbers[-1] + 1


@pytest.mark.guarantee("G13")
def test_a_number_is_not_given_while_the_record_of_an_attempt_cannot_be_read(storage: Any) -> None:
    door = Unreadable(storage)
    holder = acquire(storage, far())
    Catalog(storage).attempts.claim(2, 1, lease=holder.number)
    empty(storage)
    door.unread = "attempt.json"
    with pytest.raises(StorageError, match="no such access now"):
        acquire(door)
    with pytest.raises(StorageError, match="no such access now"):
        Lease(door, 5, "token", Floor(), holder._heartbeat).is_lost()
    assert names(storage) == []
    door.unread = ""
    assert acquire(door).number == holder.number + 1


def test_a_writer_that_may_have_outlived_its_training_is_named_when_it_cannot_be_told(
    storage: Any, caplog: Any
) -> None:
    door = Unreadable(storage)
    folder, _ = Catalog(door).attempts.claim(2, 1, lease=7)
    door.unread = "attempt.json"
    wait_for_orphans(Catalog(door), 60.0)
    assert f"whether a writer is still saving {folder} is not known" in caplog.text


@pytest.mark.guarantee("G13")
def test_whose_claim_was_deleted_may_not_commit_any_more_even_if_the_numbers_begin_again(storage: Any) -> None:
    first = acquire(storage, GONE)
    empty(storage)
    with pytest.raises(RunInUseError, match="was deleted"):
        first.require()
    second = acquire(storage, NEIGHBOUR)
    assert second.number == first.number
    with pytest.raises(RunInUseError, match="has taken this run over"):
        first.require()
    with pytest.raises(RunInUseError, match="has taken this run over"):
        first.is_lost()
    assert first._heartbeat.beat() is False, "a sign of life for the claim of another"
    first.release()
    second.require()
    assert not any("released" in name for name in names(storage))


@pytest.mark.guarantee("G13")
@pytest.mark.parametrize("harm", ["deleted", "damaged"])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_only_writer_claims_its_run_again_and_saves_on(storage: Any, harm: str, mode: Any, caplog: Any) -> None:
    saver = Saver(Catalog(storage), Alone(), mode=mode)
    save(saver, 1)
    empty(storage)
    if harm == "damaged":
        storage.put("lease/000000001.json", b"{")
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        save(saver, 2)
    assert "was deleted or damaged, and is made again" in caplog.text
    assert (steps(storage), saver.lease) == ([2, 1], 2)
    saver.close()
    assert acquire(storage).number == 3


@pytest.mark.guarantee("G13")
@pytest.mark.parametrize("harm", ["deleted", "damaged"])
def test_a_claim_that_goes_while_a_save_is_under_way_stops_its_commit_and_not_the_next_save(harm: str) -> None:
    whole = Meeting(MemoryStorage())
    saver = Saver(Catalog(whole), Alone(), mode="sync")
    save(saver, 1)
    first = len(whole.operations) + 1
    save(saver, 2)
    commit = whole.operations.index("put step-000000002/manifest.json") + 1
    for number in range(first, len(whole.operations) + 1):
        inner = MemoryStorage()

        def harm_it(inner: Any = inner) -> None:
            empty(inner)
            if harm == "damaged":
                inner.put("lease/000000001.json", b"{")

        saver = Saver(Catalog(Meeting(inner, number, harm_it)), Alone(), mode="sync")
        save(saver, 1)
        with suppress(RunInUseError):
            save(saver, 2)
        assert 2 in steps(inner) or number <= commit, whole.operations[number - 1]
        save(saver, 3)
        assert steps(inner)[0] == 3, whole.operations[number - 1]


@pytest.mark.parametrize("name", ["1.json", "000000001.txt", "00000000a.json", "-00000001.json", "latest.json"])
def test_foreign_names_are_no_claims(storage: Any, name: str) -> None:
    storage.put(f"lease/{name}", b"{}")
    assert acquire(storage).number == 1
    assert name in names(storage)


# The floor: names that an earlier holder may still be deleting are not used again


def attempt_at(storage: Any, *folders: str) -> None:
    for folder in folders:
        storage.put(f"{folder}/attempt.json", b"{}")


def test_where_nothing_ever_was_there_is_no_floor(storage: Any) -> None:
    assert acquire(storage).floor == Floor()
    assert names(storage) == ["000000001.json"]


@pytest.mark.guarantee("G13")
def test_the_floor_of_a_lease_is_as_high_as_everything_that_is_there(storage: Any) -> None:
    attempt_at(storage, "step-000000004", "step-000000002.7")
    storage.put("step-000000009/rank-00000.safetensors", b"what is left of a removal")
    storage.put("notes/step-000000099--000001.json", b"{}")
    assert acquire(storage).floor == Floor(9, 7)
    assert "000000001.floor-000000009.7" in names(storage)


@pytest.mark.guarantee("G13")
def test_floors_only_rise_whoever_comes_between_and_whatever_is_removed(storage: Any) -> None:
    attempt_at(storage, "step-000000004.3")
    acquire(storage, GONE)
    storage.delete("step-000000004.3/attempt.json")
    for _ in range(5):
        assert acquire(storage, GONE).floor == Floor(4, 3)
        acquire(storage).release()
    attempt_at(storage, "step-000000011")
    assert acquire(storage).floor == Floor(11, 3)
    assert len([name for name in names(storage) if "floor" in name]) == 1


@pytest.mark.guarantee("G13")
def test_a_claim_without_a_floor_is_followed_by_what_is_seen(storage: Any) -> None:
    """One of an older version, or of somebody who died before he had found his: he has removed nothing."""
    attempt_at(storage, "step-000000004")
    acquire(storage, GONE)
    storage.delete("step-000000004/attempt.json")
    claim = storage.read("lease/000000001.json", 1 << 16)
    for name in ["000000002.json", "000000003.json"]:
        storage.put(f"lease/{name}", claim)
    lease = acquire(storage)
    assert (lease.number, lease.floor) == (4, Floor(4, 1))


@pytest.mark.guarantee("G13")
def test_what_the_last_holder_made_until_the_next_number_was_claimed_is_below_the_floor() -> None:
    inner = MemoryStorage()
    acquire(inner, GONE)
    lease = Lease.acquire(Meeting(inner, "put lease/000000002.json", lambda: attempt_at(inner, "step-000000006")))
    assert lease.floor == Floor(6, 1)


@pytest.mark.guarantee("G13")
def test_so_is_what_he_removed_until_then() -> None:
    inner = MemoryStorage()
    acquire(inner, GONE)
    storage = Meeting(
        inner, "put lease/000000002.json", lambda: inner.put("lease/000000001.floor-000000012.1", b"{}\n")
    )
    assert Lease.acquire(storage).floor == Floor(12, 1)


@pytest.mark.guarantee("G13")
def test_an_attempt_that_was_closed_is_below_the_floor_because_it_may_be_removed(storage: Any) -> None:
    lease = acquire(storage, close_attempts=lambda number: attempt_at(storage, f"step-00000000{number + 4}"))
    assert lease.floor == Floor(5, 1)


@pytest.mark.parametrize(
    "name",
    [
        "000000001.floor-",
        "000000001.floor-9.1",
        "000000001.floor-000000009",
        "000000001.floor-000000009.0",
        "floor-000000009.1",
    ],
)
def test_foreign_names_are_no_floors(storage: Any, name: str) -> None:
    storage.put(f"lease/{name}", b"{}")
    assert acquire(storage).floor == Floor()


def test_a_floor_that_outlived_its_claim_is_no_obstacle(storage: Any) -> None:
    storage.put("lease/000000001.floor-000000004.1", b"{}\n")
    lease = acquire(storage)
    assert (lease.number, lease.floor) == (1, Floor(4, 1))


@pytest.mark.parametrize("operation", ["put lease/000000001.floor-000000004.1", "close", "sync lease"])
def test_who_became_the_writer_only_in_part_is_not_and_is_in_nobodys_way(operation: str) -> None:
    inner = MemoryStorage()
    attempt_at(inner, "step-000000004")

    def fail(number: int = 0) -> None:
        raise StorageError("the disk has a bad day")

    close = fail if operation == "close" else lambda number: None
    with pytest.raises(StorageError):
        Lease.acquire(Meeting(inner, operation, fail), identity=NEIGHBOUR, close_attempts=close)
    assert acquire(inner).number == 2


@pytest.mark.guarantee("G13")
def test_who_could_not_close_the_attempts_before_it_does_so_before_its_next_save() -> None:
    inner = MemoryStorage()
    old, _ = Catalog(inner).attempts.claim(1, 1)

    def fail() -> None:
        raise StorageError("the disk has a bad day")

    saver = Saver(Catalog(Meeting(inner, f"put {old}/manifest.json", fail)), Alone(), mode="sync")
    with pytest.raises(StorageError):
        save(saver, 2)
    save(saver, 2)
    assert Catalog(inner).scan().closed == (old,)


def drop(storage: Any, folder: str) -> None:
    catalog = Catalog(storage)
    catalog.uncommit(folder)
    catalog.remove(folder)


@pytest.mark.guarantee("G13")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_writer_uses_no_name_again_that_the_one_before_may_be_deleting(storage: Any, mode: Any) -> None:
    first, second, third = (Saver(Catalog(storage), Alone(), mode=mode) for _ in range(3))
    assert save(first, 4) == "step-000000004"
    assert save(first, 5) == "step-000000005"
    second.hold_run()
    drop(storage, "step-000000005")
    assert save(second, 5) == "step-000000005.2"
    assert save(second, 3) == "step-000000003.2", "a step that was there before, as far as one can know"
    assert save(second, 6) == "step-000000006", "whoever goes on from the latest step sees no difference"
    third.hold_run()
    drop(storage, "step-000000006")
    drop(storage, "step-000000005.2")
    assert [save(third, step) for step in (5, 6, 7)] == ["step-000000005.3", "step-000000006.3", "step-000000007"]
    for saver in (first, second, third):
        with suppress(RunInUseError):
            saver.close()


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_within_one_lease_a_name_that_is_free_is_taken(storage: Any, mode: Any) -> None:
    saver = Saver(Catalog(storage), Alone(), mode=mode)
    for _ in range(2):
        assert save(saver, 4) == "step-000000004"
        drop(storage, "step-000000004")
        saver._coordinator.forget()
    saver.close()


@pytest.mark.guarantee("G13")
def test_a_name_that_a_prune_between_two_writers_removed_is_not_used_again(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    saver = Saver(Catalog(storage), Alone(), mode="sync")
    assert [save(saver, step) for step in (4, 9, 2)] == ["step-000000004", "step-000000009", "step-000000002"]
    saver.close()
    prune(tmp_path, KeepLast(1))
    assert steps(storage) == [2]
    saver = Saver(Catalog(storage), Alone(), mode="sync")
    assert [save(saver, step) for step in (4, 9, 10)] == ["step-000000004.2", "step-000000009.2", "step-000000010"]
    saver.close()


@pytest.mark.guarantee("G13")
def test_a_save_that_finds_a_file_that_it_did_not_make_leaves_it_there() -> None:
    """The leader has given the attempt up, somebody else has the name, and one rank hears of it late."""
    inner = MemoryStorage()
    theirs = "step-000000001/rank-00000.safetensors"
    storage = Meeting(inner, f"create {theirs}", lambda: inner.put(theirs, b"of another save"))
    with pytest.raises(KeyExistsError):
        save(Saver(Catalog(storage), Alone(), mode="sync"), 1)
    assert inner.read(theirs, 100) == b"of another save"


# Letting go


def test_to_release_twice_is_to_release_once(storage: Any) -> None:
    lease = acquire(storage)
    lease.release()
    lease.release()
    assert names(storage) == ["000000001.json", "000000001.released"]


def test_who_lost_the_run_takes_nothing_from_the_next_one_by_releasing_it(storage: Any) -> None:
    first = acquire(storage, GONE)
    second = acquire(storage, NEIGHBOUR)
    first.release()
    second.require()
    with pytest.raises(RunInUseError):
        acquire(storage)


def test_a_run_that_cannot_be_released_is_said_and_no_error(caplog: pytest.LogCaptureFixture) -> None:
    storage = MemoryStorage()
    lease = acquire(storage)
    storage.capacity_bytes = 0
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        lease.release()
    assert "could not be released" in caplog.text


def test_a_forked_child_releases_nothing_and_is_another_process(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    lease = acquire(storage)
    child = os.fork()
    if child == 0:  # what it finds out is its exit status
        status = 1
        try:
            lease.release()
            try:
                Lease.acquire(storage)
            except RunInUseError:
                status = 0 if this_process().process == os.getpid() != lease._owner else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lease.require()
    assert names(storage) == ["000000001.json"]


# The number fences


def take_over(storage: Any) -> Lease:
    """What a new writer does before anything else."""
    lease = Lease.acquire(storage)
    Catalog(storage).attempts.close_older(lease.number)
    return lease


@pytest.mark.guarantee("G13")
def test_at_whatever_operation_a_writer_is_overtaken_it_commits_before_or_not_at_all() -> None:
    whole = Meeting(MemoryStorage())
    saver = Saver(Catalog(whole), Alone(), mode="sync")
    save(saver, 1)
    first = len(whole.operations) + 1
    save(saver, 2)
    commit = whole.operations.index("put step-000000002/manifest.json") + 1
    outcomes: dict[int, str] = {}
    for number in range(first, len(whole.operations) + 1):
        inner = MemoryStorage()
        seen: list[int] = []

        def overtake(inner: Any = inner, seen: list[int] = seen) -> None:
            take_over(inner)
            seen.extend(steps(inner))

        saver = Saver(Catalog(Meeting(inner, number, overtake)), Alone(), mode="sync")
        save(saver, 1)
        try:
            save(saver, 2)
            outcomes[number] = "saved"
        except (RunInUseError, KeyExistsError):
            outcomes[number] = "refused"
        # Whoever takes over has seen all there will ever be of the writers before.
        assert steps(inner) == seen, whole.operations[number - 1]
        with pytest.raises(RunInUseError):
            save(saver, 3)
        assert steps(inner) == seen, whole.operations[number - 1]
    assert outcomes == {number: "refused" if number <= commit else "saved" for number in outcomes}


@pytest.mark.guarantee("G13")
def test_a_writer_that_is_overtaken_right_before_the_manifest_finds_its_name_taken() -> None:
    inner = MemoryStorage()
    storage = Meeting(inner, "put step-000000001/manifest.json", lambda: take_over(inner))
    with pytest.raises(RunInUseError):
        save(Saver(Catalog(storage), Alone(), mode="sync"), 1)
    scan = Catalog(inner).scan()
    assert (scan.checkpoints, scan.closed) == ((), ("step-000000001",))


@pytest.mark.guarantee("G13")
def test_without_closing_attempts_a_writer_that_is_overtaken_there_would_commit() -> None:
    """The test above can fail: the look at the number alone leaves this moment open."""
    inner = MemoryStorage()
    storage = Meeting(inner, "put step-000000001/manifest.json", lambda: Lease.acquire(inner))
    save(Saver(Catalog(storage), Alone(), mode="sync"), 1)
    assert steps(inner) == [1]


def test_a_number_may_commit_as_long_as_there_is_no_higher_one(storage: Any) -> None:
    require_number(storage, 0)
    acquire(storage, GONE)
    require_number(storage, 1)
    with pytest.raises(RunInUseError, match=f"process 1 on {HOST} has taken this run over"):
        require_number(storage, 0)
