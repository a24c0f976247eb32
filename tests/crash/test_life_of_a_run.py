"""The life of a run, played hundreds of times: whatever happens to it, in whatever order, the guarantees hold.

`HOLDFAST_LIFE_SEQUENCES=20000 pytest tests/crash/test_life_of_a_run.py -k hold` plays that many in all; the seeds are
fixed, so a longer run begins like a shorter one. What is found is printed as the shortest sequence that shows it.
"""

from __future__ import annotations

import logging
import os
import random
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, seed, settings
from hypothesis.stateful import run_state_machine_as_test

import holdfast
from holdfast.errors import HoldfastError, RunInUseError, StorageError
from holdfast.ondisk import paths
from holdfast.runs import cleanup, lease, readers, retention
from holdfast.runs.annotations import Annotations
from holdfast.runs.attempts import Attempts
from holdfast.runs.catalog import Catalog
from holdfast.runs.retention import Record
from holdfast.saving import commit, committed_steps
from holdfast.saving.coordinator import Coordinator
from holdfast.testing import MemoryStorage, SimulatedCrash
from holdfast.testing.storages import _Wrapper
from tests.crash.life import (
    DEAD,
    Action,
    CutPower,
    Damage,
    Keep,
    Leave,
    Life,
    Manager,
    Part,
    Prune,
    Save,
    SaveBadly,
    Start,
    Violation,
    _action,
)
from tests.crash.room import Door, Fault, Room
from tests.sizes import DEEP, if_deep

SHARDS = 4
STEPS = 16
# For a machine that is broken on purpose: how many sequences it may take until that is noticed.
PATIENCE = 600
# In a deep run, more than it takes to notice any protection that is taken out, so that one that goes by mistake is
# noticed, too.
SEQUENCES = int(os.environ.get("HOLDFAST_LIFE_SEQUENCES", PATIENCE + 200 if DEEP else 200))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Most of what happens here is worth a warning."""
    logger = logging.getLogger("holdfast")
    before = logger.level
    logger.setLevel(logging.CRITICAL + 1)
    yield
    logger.setLevel(before)
    for left in list(Manager.made):
        left.die()


def play(sequences: int, number: int, *, shrink: bool = True) -> None:
    machine = seed(number)(type("Life", (Life,), {}))
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=sequences,
            stateful_step_count=STEPS,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate, Phase.shrink] if shrink else [Phase.generate],
            report_multiple_bugs=False,
        ),
    )


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G4")
@pytest.mark.guarantee("G6")
@pytest.mark.guarantee("G11")
@pytest.mark.guarantee("G13")
@pytest.mark.parametrize("shard", range(SHARDS))
def test_whatever_happens_to_a_run_the_guarantees_hold(shard: int) -> None:
    play(-(-SEQUENCES // SHARDS), shard)


# What the game found, as short as it can be


class Failing(_Wrapper):
    """One operation fails, once, and one key cannot be read."""

    fails = unread = ""

    def _act(self, operation: str, action: Callable[[], Any], *, size_bytes: int = 0) -> Any:
        if operation == self.fails:
            self.fails = ""
            raise StorageError("the disk has a bad day [EIO]")
        return action()

    def read(self, key: str, limit_bytes: int) -> bytes:
        if key == self.unread:
            raise StorageError("the disk has a bad day [EIO]")
        return super().read(key, limit_bytes)


def manager(storage: Any, **options: Any) -> Manager:
    made = Manager("run", {"part": Part()}, storage=storage, mode="sync", rng=False, **options)
    assert made.behind.work == []
    return made


def save(saver: Manager, *steps: int) -> None:
    for step in steps:
        saver.save(step)
        saver.behind.wait()


def steps(storage: Any) -> list[int]:
    return [found.step for found in Catalog(storage).scan().checkpoints]


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G4")
def test_a_checkpoint_does_not_go_for_another_that_had_its_name() -> None:
    storage = Failing(MemoryStorage())
    trainer = manager(storage, keep=holdfast.KeepLast(1))
    save(trainer, 1)
    storage.fails = "sync /"  # the last thing when step 1 is removed
    save(trainer, 2)
    assert trainer.save(1).wait().sequence == 3
    trainer.behind.wait()
    assert steps(storage) == [1]


@pytest.mark.guarantee("G13")
def test_who_lost_the_run_removes_nothing_that_the_next_writer_made() -> None:
    room = Room()
    sleeper, other = Door(room, room.process("here")), Door(room, room.process("far"))
    first = manager(sleeper, keep=holdfast.KeepLast(1))
    save(first, 1)

    def take_over() -> None:
        sleeper.process.silent = True
        second = manager(other, keep=holdfast.KeepLast(1))
        second.restore()
        second.prune()
        save(second, 1)

    sleeper.on_change = lambda what, key, data: (what, key) == ("delete", "step-000000001/manifest.json") and meet()

    def meet() -> None:
        sleeper.on_change = lambda what, key, data: None
        take_over()

    save(first, 2)
    assert steps(other) == [1]


@pytest.mark.guarantee("G1")
def test_what_a_killed_process_had_not_made_durable_does_not_cost_what_was() -> None:
    room = Room()
    door = Door(room, room.process("here"))
    first = manager(door, keep=holdfast.KeepLast(1))
    save(first, 1)

    def die_next(what: str, key: str, data: bytes | None) -> None:
        if key == "step-000000002/manifest.json":
            door.arm(Fault("die", 1))

    door.on_change = die_next
    with pytest.raises(SimulatedCrash):
        first.save(2)
    first.die()
    second = manager(Door(room, room.process("here")), keep=holdfast.KeepLast(1))
    assert second.restore().step == 2
    second.prune()
    second.die()
    room.shelf.cut_power(random.Random(0), keep=0.0)
    assert steps(Door(room, room.process("here"))) != []


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("why", ["the parent was removed since", "the parent cannot be read for a moment"])
def test_a_checkpoint_knows_its_line_though_its_parent_is_not_to_be_seen(why: str) -> None:
    storage = Failing(MemoryStorage())
    save(manager(storage), 1, 2, 3)
    trainer = manager(storage)
    trainer.restore(2)
    if why == "the parent was removed since":
        other = manager(storage, keep=holdfast.KeepLast(1))
        other.restore()
        other.prune()
        other.close()
    else:
        storage.unread = "step-000000002/manifest.json"
    with suppress(StorageError):
        save(trainer, 4)
    storage.unread = ""
    save(trainer, 4)
    newest = Catalog(storage).scan().checkpoints[0]
    assert (newest.step, newest.manifest.line) == (4, ((1, 2),))


@pytest.mark.guarantee("G6")
def test_to_wait_for_a_save_that_was_removed_since_is_no_error() -> None:
    trainer = manager(MemoryStorage(), keep=holdfast.KeepLast(1))
    handle = trainer.save(1)
    save(trainer, 2)
    assert handle.wait().step == 1


def test_a_report_is_of_the_checkpoint_that_has_the_name_now() -> None:
    storage = MemoryStorage()
    save(manager(storage), 1)
    evaluator = manager(storage)
    assert evaluator.peek() is not None
    save(manager(storage, keep=holdfast.KeepLast(1)), 2, 1)
    assert evaluator.report(1, {"loss": 0.5})
    assert dict(Catalog(storage).scan().checkpoints[0].metrics) == {"loss": 0.5}


@pytest.mark.guarantee("G13")
def test_who_lost_the_run_is_not_told_that_the_next_writers_checkpoint_is_his() -> None:
    storage = MemoryStorage()
    first = manager(storage, keep=holdfast.KeepLast(1))
    save(first, 1, 2)
    second = manager(storage, keep=holdfast.KeepLast(1))
    save(second, 1)
    with pytest.raises(RunInUseError):
        first.save(1)


def test_a_number_is_never_given_twice() -> None:
    storage = Failing(MemoryStorage())
    save(manager(storage), 1, 2)
    trainer = manager(storage)
    storage.unread = "step-000000002/manifest.json"
    with suppress(StorageError):
        trainer.save(3)
    storage.unread = ""
    numbers = [found.sequence for found in Catalog(storage).scan().checkpoints]
    assert len(numbers) == len(set(numbers))


@pytest.mark.guarantee("G3")
def test_what_could_not_be_read_once_is_not_damaged_for_ever() -> None:
    storage = Failing(MemoryStorage())
    save(manager(storage), 1, 2)
    trainer = manager(storage)
    storage.unread = "step-000000002/shared.json"
    with suppress(HoldfastError):
        trainer.restore()
    storage.unread = ""
    save(trainer, 3)
    assert [found.damage for found in Catalog(storage).scan().checkpoints] == ["", "", ""]


def test_a_step_that_the_line_has_is_not_written_again_though_its_head_is_gone() -> None:
    storage = MemoryStorage()
    first = manager(storage)
    first.save(1, tag="gold")
    save(first, 2)
    first.close()
    trainer = manager(storage)
    trainer.restore()
    other = manager(storage, keep=holdfast.KeepLast(1))
    other.restore()
    save(other, 3, 4)
    other.close()
    assert steps(storage) == [4, 1]
    assert trainer.save(1).skipped


# The game can be lost: each protection that is taken out is missed


def noticed(*guarantees: str) -> None:
    """Sooner or later, when all kinds of things happen."""
    with pytest.raises(Violation) as caught:
        play(PATIENCE, 7, shrink=False)
    assert any(guarantee in str(caught.value) for guarantee in guarantees), caught.value
    let_go(caught.value)


def noticed_in(scenes: Iterable[Sequence[Action]], *guarantees: str) -> None:
    """When exactly this happens. Without what was taken out, nothing is noticed: see `test_in_these_scenes...`."""
    with pytest.raises(Violation) as caught:
        act_out(scenes)
    assert any(guarantee in str(caught.value) for guarantee in guarantees), caught.value
    let_go(caught.value)


def let_go(error: BaseException | None) -> None:
    """Drop what the frames of an error hold: the game keeps the error, and threads end with their managers."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__context__


def act_out(scenes: Iterable[Sequence[Action]]) -> None:
    for scene in scenes:
        machine = Life()
        try:
            for action in scene:
                machine.act(action=action)
        finally:
            machine.teardown()


def start(*keep: Keep, restores: bool = False) -> Start:
    return Start("here", keep or None, True, False, restores, None)


def saves(*losses: float) -> list[Action]:
    return [Save(0, 0, {"loss": loss}, False) for loss in losses]


def badly(kind: str, at: int, *, after: bool = False, behind: bool = False) -> SaveBadly:
    return SaveBadly(0, -1, {}, None, Fault(kind, at, after, behind))


def while_it_goes(at: int) -> SaveBadly:
    """Somebody takes over while the housework is under way."""
    return badly("meet", at, after=True, behind=True)


DIES = Leave(0, "kill")
LAST = Keep("last", 1)
SCENES: dict[str, list[list[Action]]] = {
    "who has not restored prunes by tags alone": [
        [start(Keep("tagged")), *saves(1, 1), DIES, start(Keep("tagged")), Prune(0, True, None)]
    ],
    "the best one is the first": [[start(Keep("best")), *saves(0.25, 0.5, 1)]],
    "the best one is damaged": [
        [start(), *saves(0.5, 0.25), DIES, Damage(0, False), start(Keep("best"), restores=True), *saves(1, 1)]
    ],
    "somebody comes to read what is about to go": [
        [start(LAST), *saves(1), badly("meet", at, behind=True)] for at in range(1, 6)
    ],
    "the power is cut while something goes": [
        [start(LAST), *saves(1), badly("die", at, behind=True), CutPower(seed)]
        for seed in range(9)
        for at in range(1, 9)
    ],
    "somebody takes over in the middle of a save": [
        [start(LAST), *saves(1), badly("meet", at, after=True), *saves(1)] for at in range(1, 20)
    ],
    "what somebody is about to remove is removed, and saved again, by the next": [
        # The steps of one line may go down: what goes has the highest step of all.
        [
            start(),
            Save(0, 2, {}, False),
            SaveBadly(0, 2, {}, None, None),
            DIES,
            start(LAST, restores=True),
            while_it_goes(at),
        ]
        for at in range(1, 24)
    ],
}


def test_in_these_scenes_all_is_well_as_long_as_nothing_is_taken_out() -> None:
    for scenes in SCENES.values():
        act_out(scenes)


def blind_to(**fields: Any) -> Callable[..., list[Record]]:
    """Retention that does not see something about the checkpoints."""
    records_of = cleanup.records_of
    return lambda *args, **more: [record._replace(**fields) for record in records_of(*args, **more)]


@pytest.mark.guarantee("G4")
@pytest.mark.parametrize("unseen", [{"tags": ()}, *if_deep({"shield": ""}, {"on_line": True})], ids=str)
def test_retention_that_does_not_see_something_is_noticed(unseen: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "records_of", blind_to(**unseen))
    noticed("G4")


@pytest.mark.guarantee("G4")
def test_retention_that_does_not_see_metrics_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "records_of", blind_to(metrics={}))
    noticed_in(SCENES["the best one is the first"], "G4")


@pytest.mark.guarantee("G4")
def test_retention_that_counts_damaged_ones_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup, "records_of", blind_to(counts=True))
    noticed_in(SCENES["the best one is damaged"], "G4")


@pytest.mark.guarantee("G4")
def test_retention_that_may_remove_the_newest_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "_never_deleted", lambda ordered: {})
    noticed_in(SCENES["who has not restored prunes by tags alone"], "G4")


@pytest.mark.guarantee("G4")
def test_a_housekeeper_that_does_not_look_for_readers_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers.Readers, "folders", lambda self: set())
    noticed("G4")


@pytest.mark.guarantee("G4")
def test_a_housekeeper_that_looks_for_readers_only_before_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between that look and the end of the manifest somebody may have come."""

    def clear(self: cleanup.Housekeeper, folder: str) -> None:
        self._catalog.remove(folder)
        self._doomed.pop(folder, None)

    monkeypatch.setattr(cleanup.Housekeeper, "_clear", clear)
    noticed_in(SCENES["somebody comes to read what is about to go"], "is being read")


@pytest.mark.guarantee("G1")
def test_bytes_that_go_before_the_manifest_are_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    uncommit = Catalog.uncommit

    def bytes_first(self: Catalog, folder: str) -> None:
        self.attempts.clear(folder)
        uncommit(self, folder)

    monkeypatch.setattr(Catalog, "uncommit", bytes_first)
    noticed_in(SCENES["the power is cut while something goes"], "G1")


@pytest.mark.guarantee("G1")
@pytest.mark.parametrize("method", ["uncommit", "add"])
def test_without_the_sync_of_the_folder_a_power_cut_is_noticed(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sync, original = Door.sync, getattr(Catalog, method)

    def forgetful(self: Catalog, *args: Any, **more: Any) -> Any:
        monkeypatch.setattr(Door, "sync", lambda door, folder: None)
        try:
            return original(self, *args, **more)
        finally:
            monkeypatch.setattr(Door, "sync", sync)

    monkeypatch.setattr(Catalog, method, forgetful)
    noticed_in(SCENES["the power is cut while something goes"], "G1")


@pytest.mark.guarantee("G13")
def test_a_commit_that_does_not_look_at_the_number_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "require_number", lambda storage, number, token: None)
    noticed_in(SCENES["somebody takes over in the middle of a save"], "G13")


@pytest.mark.guarantee("G13")
def test_a_writer_that_closes_no_attempts_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attempts, "close_older", lambda self, number: None)
    noticed("G13", "is left with")


@pytest.mark.guarantee("G13")
@pytest.mark.parametrize("missing", ["floors", "floors of those before"])
def test_names_that_are_used_again_are_noticed(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if missing == "floors":
        monkeypatch.setattr(paths.Floor, "first_attempt", lambda self, step: 1)
    else:
        lay = lease._lay_floor
        monkeypatch.setattr(lease, "_lay_floor", lambda storage, number, claims: lay(storage, number, ()))
    noticed_in(SCENES["what somebody is about to remove is removed, and saved again, by the next"], "G1, G4")


@pytest.mark.guarantee("G13")
def test_a_lease_that_is_given_to_all_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "_require_free", lambda *args: None)
    noticed("G13")


@pytest.mark.guarantee("G13")
def test_a_housekeeper_that_does_not_ask_whose_run_it_is_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cleanup.Housekeeper.__init__

    def init(self: cleanup.Housekeeper, *args: Any, **more: Any) -> None:
        made(self, *args, **{**more, "may_write": lambda: None})

    monkeypatch.setattr(cleanup.Housekeeper, "__init__", init)
    noticed("G13", "G4")


@pytest.mark.guarantee("G11")
def test_a_missing_step_that_starts_afresh_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = Manager.restore

    def lenient(self: Manager, *args: Any, **more: Any) -> Any:
        try:
            return restore(self, *args, **more)
        except holdfast.CheckpointNotFoundError:
            return holdfast.RestoreResult(resumed=False)

    monkeypatch.setattr(Manager, "restore", lenient)
    noticed("G11")


@pytest.mark.guarantee("G6")
def test_a_failed_save_that_takes_an_older_one_along_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    forget = Coordinator.forget

    def forget_too_much(self: Coordinator) -> None:
        for found in self._catalog.scan().checkpoints[1:]:
            self._catalog.uncommit(found.folder)
        forget(self)

    monkeypatch.setattr(Coordinator, "forget", forget_too_much)
    noticed("G1", "G4")


@pytest.mark.parametrize("broken", ["next_sequence", "lineage"])
def test_numbers_that_do_not_grow_and_lines_that_are_wrong_are_noticed(
    broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if broken == "next_sequence":
        monkeypatch.setattr(Catalog, "next_sequence", lambda self: 1 + len(self.scan().checkpoints))
    else:
        for module in (committed_steps, cleanup):
            monkeypatch.setattr(module, "ancestry", lambda digest, among: list(among))
    noticed("")


@pytest.mark.guarantee("G3")
def test_damage_that_nobody_writes_down_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup.Housekeeper, "suspect", lambda self, damaged: None)
    noticed_in(SCENES["the best one is damaged"], "nobody wrote it down", "G4")


def test_notes_that_are_lost_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    add = Annotations.add
    monkeypatch.setattr(
        Annotations, "add", lambda self, found, **said: None if "metrics" in said else add(self, found, **said)
    )
    noticed("is lost")


def test_debris_that_stays_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cleanup.Housekeeper, "_collect", lambda self, scan: None)
    noticed("is left with")


class Counting(Life):
    """Counts how things ended, and what they met."""

    ends: Counter[str] = Counter()

    def _do(self, who: Any, body: Any, **more: Any) -> Any:
        outcome = super()._do(who, body, **more)
        self.ends["DEAD" if outcome is DEAD else type(outcome).__name__] += 1
        if who.door.fired and who.door.fault is not None:
            self.ends[who.door.fault.kind] += 1
        return outcome

    def _compare(self, *args: Any, **more: Any) -> None:
        before = len(self.known)
        super()._compare(*args, **more)
        self.ends["removed"] += max(before - len(self.known), 0)
        self.ends["fenced"] += any(0 < trainer.manager.number < self.settled for trainer in self.trainers)
        self.ends["being read"] += bool(self.readers)
        self.ends["damaged"] += any(kept.said.damaged for kept in self.known.values())


@pytest.mark.deep
def test_in_a_hundred_sequences_all_kinds_of_things_happen() -> None:
    Counting.ends.clear()
    for number in range(100):
        machine, chance = Counting(), random.Random(number)
        for _turn in range(STEPS):
            machine.act(action=_action(chance.getrandbits(24)))
        machine.teardown()
    wanted = {"Checkpoint", "RestoreResult", "RunInUseError", "StorageError", "CheckpointNotFoundError", "DEAD"}
    wanted |= {"CorruptCheckpointError", "die", "fail", "full", "blind", "power", "meet", "glance"}
    wanted |= {"removed", "fenced", "being read", "damaged"}
    assert {name for name in wanted if Counting.ends[name] < 6} == set(), Counting.ends


def test_the_same_numbers_play_the_same_game() -> None:
    games: list[list[str]] = []
    for _ in range(2):
        machine, chance, seen = Life(), random.Random(3), []
        for _turn in range(40):
            machine.act(action=_action(chance.getrandbits(24)))
            seen.append(repr(sorted(key for key in machine.room.shelf.values if key.startswith("step-"))))
        machine.teardown()
        games.append(seen)
    assert games[0] == games[1]
    assert sum(paths.MANIFEST in line for line in games[0]) > 20
