"""A run in order: what goes and what stays, and nothing left behind, also after a crash anywhere."""

from __future__ import annotations

import logging
import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast.errors import RunInUseError, StorageError
from holdfast.runs.catalog import Catalog
from holdfast.runs.lease import Lease
from holdfast.runs.process_identity import Identity, birth_of
from holdfast.runs.readers import reading
from holdfast.runs.retention import KeepAll, KeepBest, KeepEvery, KeepLast, KeepPolicy, KeepTagged
from holdfast.runs.verify import verify
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import CrashingStorage, MemoryStorage, PowerLossStorage, SimulatedCrash
from tests.crash.room import signed_again
from tests.unit.runs.scene import (
    FAR,
    GONE,
    HERE,
    Meeting,
    Part,
    Run,
    attempt,
    folder,
    rot,
)

# What goes


POLICIES: list[KeepPolicy] = [
    KeepLast(1),
    KeepLast(3),
    KeepBest("loss", 2),
    KeepBest("acc", 1, "max") | KeepLast(2),
    KeepEvery(steps=3),
    KeepTagged(),
    KeepAll(),
]


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("policy", POLICIES, ids=repr)
def test_a_dry_run_says_what_is_then_done(policy: KeepPolicy) -> None:
    run = Run(MemoryStorage(), policy)
    losses = [0.5, float("nan"), 0.5, 0.25, float("inf"), None, 1.0, 2.0]
    for step, loss in enumerate(losses):
        metrics = {} if loss is None else {"loss": loss, "acc": -loss}
        run.save(step, tags=("gold",) if step == 2 else (), **metrics)
    before = dict(run.storage._values)
    planned = run.keeper.plan()
    assert run.storage._values == before
    assert [decision.step for decision in planned] == [7, 6, 5, 4, 3, 2, 1, 0]
    done = run.keeper.clean_up()
    assert done == planned
    assert run.steps == [decision.step for decision in planned if decision.keep]
    assert run.names == sorted(folder(decision.step) for decision in planned if decision.keep)
    assert run.keeper.clean_up() == [decision for decision in planned if decision.keep]


def test_what_goes_is_told_with_its_size_and_place() -> None:
    run = Run(MemoryStorage(), KeepLast(1))
    first = run.save(1)
    run.save(2)
    run.keeper.clean_up()
    (event,) = run.events
    assert (event.kind, event.step, event.rank) == ("pruned", 1, 0)
    assert (event.size_bytes, event.path) == (first.size_bytes, first.path)
    assert event.seconds >= 0
    run.keeper.clean_up()
    assert len(run.events) == 1


def test_without_a_policy_everything_stays() -> None:
    run = Run(MemoryStorage(), None)
    for step in range(4):
        run.save(step)
    assert all(decision.reasons == ("everything is kept",) for decision in run.keeper.clean_up())
    assert run.steps == [3, 2, 1, 0]


@pytest.mark.guarantee("G4")
def test_a_damaged_one_is_kept_aside_and_takes_nobodys_place() -> None:
    run = Run(MemoryStorage(), KeepLast(2))
    for step in (1, 2, 3):
        run.save(step)
    damaged = run.catalog.read(folder(2))
    rot(damaged)
    run.keeper.suspect({damaged: "it rots"})
    decided = run.keeper.clean_up()
    assert run.steps == [3, 2, 1]
    assert {decision.step: decision.reasons for decision in decided} == {
        3: ("this training continues from it", "the newest", "among the last 2"),
        2: ("damaged, kept for inspection: it rots",),
        1: ("among the last 2",),
    }
    run.save(4)
    run.keeper.clean_up()
    assert run.steps == [4, 3, 2]


def test_a_dry_run_knows_what_is_suspected() -> None:
    run = Run(MemoryStorage(), KeepLast(2))
    found = [run.save(step) for step in (1, 2, 3)]
    rot(found[-1])
    run.keeper.suspect({found[-1]: "it rots"})
    planned = run.keeper.plan()
    assert planned == run.keeper.clean_up()


@pytest.mark.guarantee("G4")
def test_when_none_is_sound_all_stay() -> None:
    run = Run(MemoryStorage(), KeepLast(1))
    found = [run.save(step) for step in (1, 2, 3)]
    rot(*found)
    run.keeper.suspect(dict.fromkeys(found, "it rots"))
    run.keeper.clean_up()
    assert run.steps == [3, 2, 1]


@pytest.mark.guarantee("G13")
def test_who_is_not_the_writer_any_more_tidies_nothing() -> None:
    run = Run(MemoryStorage(), KeepLast(1))
    run.save(1)
    run.save(2)
    lease = Lease.acquire(run.storage)
    before = dict(run.storage._values)
    with pytest.raises(RunInUseError):
        run.keeper.clean_up()
    assert run.storage._values == before
    lease.release()


def test_what_fails_behind_the_training_is_said_and_tried_again(caplog: pytest.LogCaptureFixture) -> None:
    storage = Meeting(MemoryStorage())
    run = Run(storage, KeepLast(1))
    run.save(1)
    run.save(2)

    def fail() -> None:
        raise StorageError("the disk has a bad day")

    storage.before, storage.do = f"delete {folder(1)}/rank-00000.safetensors", fail
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        run.keeper.clean_up_in_background()
        run.keeper.wait()
    assert "cleanup failed and will be retried after the next save" in caplog.text
    assert run.steps == [2]
    assert run.names == [folder(1), folder(2)]
    run.keeper.clean_up_in_background()
    run.keeper.close()
    assert run.names == [folder(2)]


@pytest.mark.guarantee("G4")
def test_a_rollback_while_others_are_being_removed_keeps_what_it_went_back_to() -> None:
    storage = Meeting(MemoryStorage())
    manager = holdfast.CheckpointManager(
        "run", {"part": Part()}, storage=storage, mode="sync", rng=False, keep=KeepLast(1)
    )
    manager.save(1)
    manager._run.housekeeper.wait()
    planned, restored = threading.Event(), threading.Event()

    def hold() -> None:
        planned.set()
        restored.wait(300)

    def hold_second() -> None:
        storage.before, storage.do = "list lease", hold  # the plan is made, and nothing is removed yet

    storage.before, storage.do = "list readers", lambda: None

    # Behind the training: once for the sweep, once for the plan; then the look whether this is still the writer.
    def after_sweep() -> None:
        storage.before, storage.do = "list readers", hold_second

    storage.before, storage.do = "list readers", after_sweep
    manager.save(2)
    assert planned.wait(300)
    going_back = threading.Thread(target=lambda: manager.restore(1))
    going_back.start()
    going_back.join(30)  # it may have to wait for the cleanup, and then finds what is there
    restored.set()
    going_back.join(60)
    manager._run.housekeeper.wait()
    # Before the save: the cleanup that follows on it may remove its parent.
    there = {found.digest for found in manager.checkpoints()}
    assert manager.save(3).wait().parent in there | {None}
    manager._run.housekeeper.wait()
    newest = manager.checkpoints()[0]
    assert (newest.step, newest.manifest.line) == (3, ((1, 1),))
    manager.close()


# What abandoned attempts leave


@pytest.mark.parametrize(
    ("who", "left"),
    [
        (GONE, []),
        (HERE, ["attempt.json", "manifest.json"]),
        (FAR, ["attempt.json", "manifest.json"]),
        (None, []),
    ],
    ids=["dead", "alive", "elsewhere", "has not said who he is"],
)
def test_a_closed_attempt_is_cleared_and_goes_when_its_writer_is_seen_to_be_dead(
    who: Identity | None, left: list[str]
) -> None:
    run = Run(MemoryStorage(), None)
    name = attempt(run, 7, who)
    run.save(1)  # who becomes the writer closes what others began
    run.keeper.clean_up()
    assert [entry.name for entry in run.storage.entries(name)] == left
    assert run.steps == [1]


def test_a_writer_process_is_dead_only_when_its_trainer_is_too() -> None:
    run = Run(MemoryStorage(), None)
    orphan = attempt(run, 7, GONE, trainer=HERE.process, trainer_birth=HERE.birth)
    lost = attempt(run, 8, GONE, trainer=1, trainer_birth=(birth_of(1) or 0) + 1)
    run.save(1)
    run.keeper.clean_up()
    assert run.names == [f"{folder(1)}.2", orphan]
    assert lost not in run.names


def test_an_attempt_of_this_writer_is_left_alone() -> None:
    run = Run(MemoryStorage(), KeepLast(1))
    run.save(1)
    name = attempt(run, 7, GONE, lease=run.saver.lease)
    run.keeper.clean_up()
    assert len(run.storage.entries(name)) == 3


@pytest.mark.guarantee("G4")
def test_what_is_being_read_is_not_cleared_by_the_next_writer_either() -> None:
    first = Run(MemoryStorage(), KeepLast(1))
    first.save(1)
    with reading(first.storage, folder(1)):
        first.catalog.uncommit(folder(1))  # here the first one died
        second = Run(first.storage, KeepLast(1))
        second.save(2)
        second.keeper.clean_up()
        assert "rank-00000.safetensors" in {entry.name for entry in first.storage.entries(folder(1))}
    second.keeper.clean_up()
    assert "rank-00000.safetensors" not in {entry.name for entry in first.storage.entries(folder(1))}


# A crash anywhere


def bury(storage: Any) -> None:
    """The process that wrote all this is dead."""
    mine, gone = (msgspec.json.encode(identity)[1:-1] for identity in (HERE, GONE))
    for entry in storage.entries(""):
        key = f"{entry.name}/attempt.json"
        if entry.is_folder and "attempt.json" in {inner.name for inner in storage.entries(entry.name)}:
            record = storage.read(key, 1 << 20)
            storage.delete(key)
            storage.put(key, signed_again(record.replace(mine, gone)))


def prepare(storage: Any) -> None:
    """Three checkpoints: one that goes, with a note, one with a tag, and the newest."""
    run = Run(storage, KeepLast(1))
    for step in (1, 2, 3):
        run.save(step, tags=("gold",) if step == 2 else ())
    run.catalog.annotations.add(run.catalog.read(folder(1)), metrics={"loss": 1.0})
    run.die()


def prune(storage: Any) -> bool:
    """Whether it came to its end."""
    run = Run(storage, KeepLast(1))
    try:
        run.keeper.clean_up()
        return True
    except SimulatedCrash:
        return False
    finally:
        run.die()


def wrong_after_a_crash(storage: Any) -> list[str]:
    """What is wrong with a run whose pruning was cut short, at first, and after the cleanup of the next writer."""
    wrong = []
    scan = Catalog(storage).scan()
    wrong += [f"{skipped}" for skipped in scan.damaged]
    wrong += [f"{found.folder}: {problem}" for found in scan.checkpoints for problem in verify(found).problems]
    if not {2, 3} <= {found.step for found in scan.checkpoints}:
        wrong.append(f"only {scan.checkpoints} are left")
    bury(storage)
    run = Run(storage, KeepLast(1))
    run.save(4)
    run.keeper.clean_up()
    run.die()
    if run.steps != [4, 2]:
        wrong.append(f"then there are {run.steps}")
    left = [name for name in run.names if name not in (folder(2), folder(4))]
    # Of one whose record went first nobody can say whose it was: only the word that it is closed stays.
    wrong += [f"{name} is left" for name in left if [e.name for e in storage.entries(name)] != ["manifest.json"]]
    return wrong


@pytest.mark.slow
@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("kind", ["object store", "folder"])
def test_a_crash_at_any_operation_of_a_prune_leaves_what_the_next_writer_finishes(
    kind: str, after: bool, tmp_path: Path
) -> None:
    point, whole = 0, False
    while not whole:
        point += 1
        inner = MemoryStorage() if kind == "object store" else LocalStorage(tmp_path / str(point))
        prepare(inner)
        storage = CrashingStorage(inner, point, after=after)
        whole = prune(storage)
        assert wrong_after_a_crash(inner) == [], f"{point}: {storage.operations[-1]}"
    assert point > 8


@pytest.mark.slow
@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G4")
def test_a_power_cut_at_any_call_of_a_prune_leaves_what_the_next_writer_finishes(tmp_path: Path) -> None:
    whole = PowerLossStorage(tmp_path / "whole")
    prepare(whole)
    first = whole.calls
    assert prune(whole)
    assert whole.calls > first + 15
    for point in range(first + 1, whole.calls + 1):
        storage = PowerLossStorage(tmp_path / f"{point}", crash_at=point)
        prepare(storage)
        assert not prune(storage)
        for seed in (0, 1, 3, 5, 6):
            disk = storage.after_power_loss(seed, tmp_path / f"{point}-{seed}")
            assert wrong_after_a_crash(disk) == [], f"{point}: {storage.log[-1]}, seed {seed}"


@pytest.mark.guarantee("G4")
def test_a_checkpoint_whose_removal_failed_can_still_be_tagged_and_stays(tmp_path: Path) -> None:
    class Stuck(LocalStorage):
        stuck = False

        def delete(self, key: str) -> None:
            if self.stuck and key.endswith("manifest.json"):
                raise StorageError("not now", file=key)
            super().delete(key)

    storage = Stuck(tmp_path)
    state = {"model": torch.nn.Linear(2, 2)}
    with holdfast.CheckpointManager(tmp_path, state, storage=storage, keep=KeepLast(1), mode="sync") as manager:
        manager.save(1)
        storage.stuck = True
        manager.save(2)
        with pytest.raises(StorageError, match="not now"):
            manager.prune()
        storage.stuck = False
        manager.tag(1, "precious")
        manager.save(3)
        manager.prune()
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [3, 1]
