"""A run in order: links for people, what goes and what stays, and nothing left behind, also after a crash anywhere."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

import holdfast
from holdfast.errors import CheckpointNotFoundError, RunInUseError, StorageError
from holdfast.manager.arguments import encoded_metrics
from holdfast.ranks.single import Alone
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.cleanup import Housekeeper
from holdfast.runs.events import Event
from holdfast.runs.lease import Lease
from holdfast.runs.link_names import LinkTemplate
from holdfast.runs.process_identity import Identity, birth_of, this_process
from holdfast.runs.readers import reading
from holdfast.runs.retention import KeepAll, KeepBest, KeepEvery, KeepLast, KeepPolicy, KeepTagged
from holdfast.runs.verify import verify
from holdfast.saving.coordinator import SaveRequest
from holdfast.saving.pipeline import Saver
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import CrashingStorage, MemoryStorage, PowerLossStorage, SimulatedCrash
from holdfast.testing.storages import _Wrapper
from tests.crash.room import signed_again

HERE = this_process()
GONE = Identity(HERE.host, HERE.machine, 1, (birth_of(1) or 0) + 1)
FAR = Identity("far", "elsewhere", 1, 1)


class Part:
    def __init__(self) -> None:
        self.tensor = torch.arange(5)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


class Run:
    """A run, its writer, and a housekeeper of it."""

    def __init__(self, storage: Any, keep: KeepPolicy | None = None, links: Any = True) -> None:
        self.storage = storage
        self.catalog = Catalog(storage)
        self.saver = Saver(self.catalog, Alone(), mode="sync")
        self.events: list[Event] = []
        self.keeper = self.keep(keep, links)

    def keep(self, keep: KeepPolicy | None, links: Any = True) -> Housekeeper:
        self.keeper = Housekeeper(
            self.catalog,
            keep=keep,
            links=links,
            may_write=self.saver.hold_run,
            in_use=lambda: {self.saver.head},
            emit=self.events.append,
        )
        return self.keeper

    def save(self, step: int, *, tags: tuple[str, ...] = (), **metrics: Any) -> Checkpoint:
        request = SaveRequest(step, {"part": Part()}, metrics=encoded_metrics(metrics), tags=tags)
        return self.catalog.read(self.saver.save(step, lambda: request).result().folder)

    def die(self) -> None:
        """As a process does: without a word."""
        lease = self.saver._leader._lease
        if lease is not None:
            lease._heartbeat.stop()

    @property
    def steps(self) -> list[int]:
        return [found.step for found in Catalog(self.storage).scan().checkpoints]

    @property
    def links(self) -> dict[str, str]:
        return self.storage.features.links.targets()

    @property
    def names(self) -> list[str]:
        return [entry.name for entry in self.storage.entries("") if entry.name.startswith("step-")]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(LocalStorage(tmp_path / "run"))


def folder(step: int) -> str:
    return f"step-{step:09d}"


def rot(*checkpoints: Checkpoint) -> None:
    """One byte of each is not what it was."""
    for checkpoint in checkpoints:
        storage, key = checkpoint.storage, checkpoint.key("rank-00000.safetensors")
        data = storage.read(key, 1 << 20)
        storage.delete(key)
        storage.put(key, data[:-1] + bytes([data[-1] ^ 1]))


# Links


def test_latest_leads_to_the_newest_also_when_it_was_lost_or_moved(run: Run) -> None:
    run.save(1)
    run.save(2)
    run.keeper.clean_up()
    assert run.links == {"latest": folder(2)}
    run.storage.features.links.remove("latest")
    run.keeper.clean_up()
    assert run.links == {"latest": folder(2)}
    run.storage.features.links.point("latest", folder(1))
    run.keeper.clean_up()
    assert run.links == {"latest": folder(2)}


def test_best_leads_to_the_best_by_the_one_metric_that_is_kept_by(run: Run) -> None:
    run.keep(KeepLast(9) | KeepBest("loss", 2))
    for step, loss in enumerate([0.5, 0.25, float("nan"), 0.25, 3]):
        run.save(step, loss=loss)
    run.keeper.clean_up()
    assert run.links == {"latest": folder(4), "best": folder(3)}


def test_with_several_metrics_each_has_a_link_and_the_first_is_the_best(run: Run) -> None:
    run.keep(KeepAll() | KeepBest("val/loss") | KeepBest("acc@1", mode="max") | KeepBest("never seen"))
    run.save(1, **{"val/loss": 0.5, "acc@1": 0.5})
    run.save(2, **{"val/loss": 0.75, "acc@1": 0.75})
    run.keeper.clean_up()
    assert run.links == {
        "latest": folder(2),
        "best": folder(1),
        "best-val_loss": folder(1),
        "best-acc_1": folder(2),
    }


def test_links_to_a_best_that_nobody_asks_for_any_more_go(run: Run) -> None:
    run.keep(KeepBest("loss") | KeepBest("acc"))
    run.save(1, loss=1, acc=1)
    run.keeper.clean_up()
    assert set(run.links) == {"latest", "best", "best-loss", "best-acc"}
    run.keep(KeepBest("acc"))
    run.keeper.clean_up()
    assert set(run.links) == {"latest", "best"}
    run.keep(KeepLast(1))
    run.keeper.clean_up()
    assert set(run.links) == {"latest"}


def test_late_metrics_move_the_best(run: Run) -> None:
    run.keep(KeepAll() | KeepBest("loss"))
    first, second = run.save(1, loss=2.0), run.save(2)
    run.keeper.clean_up()
    assert run.links["best"] == first.folder
    run.catalog.annotations.add(second, metrics={"loss": 1.0})
    run.keeper.clean_up()
    assert run.links["best"] == second.folder


def test_no_link_leads_to_a_damaged_one(run: Run) -> None:
    run.keep(KeepAll() | KeepBest("loss"))
    first, second = run.save(1, loss=2.0), run.save(2, loss=1.0)
    rot(second)
    run.keeper.suspect({second: "its bytes are not what they were"})
    run.keeper.clean_up()
    assert run.links == {"latest": first.folder, "best": first.folder}


def test_what_is_suspected_and_sound_counts(run: Run) -> None:
    run.keep(KeepAll() | KeepBest("loss"))
    run.save(1, loss=2.0)
    second = run.save(2, loss=1.0)
    run.keeper.suspect({second: "it could not be read for a moment"})
    run.keeper.clean_up()
    assert run.links == {"latest": second.folder, "best": second.folder}
    assert Catalog(run.storage).scan().checkpoints[0].damage == ""


def test_a_template_gives_each_checkpoint_a_name_and_takes_it_back(run: Run) -> None:
    run.keep(KeepLast(2), LinkTemplate("{name}--{loss:.2f}-{step}"))
    for step in (1, 2, 3):
        run.save(step, loss=step / 4)
    run.keeper.clean_up()
    assert run.links == {"latest": folder(3), "run--0.50-2": folder(2), "run--0.75-3": folder(3)}


def test_a_name_follows_the_metrics_and_one_that_cannot_be_made_is_left_out(run: Run) -> None:
    run.keep(None, LinkTemplate("{name}--{loss:.2f}-{step}"))
    first = run.save(1)
    run.save(2, loss=0.5)
    run.keeper.clean_up()
    assert set(run.links) == {"latest", "run--0.50-2"}
    run.catalog.annotations.add(first, metrics={"loss": 0.125})
    run.keeper.clean_up()
    assert set(run.links) == {"latest", "run--0.12-1", "run--0.50-2"}
    run.catalog.annotations.add(first, metrics={"loss": 8.0})
    run.keeper.clean_up()
    assert set(run.links) == {"latest", "run--8.00-1", "run--0.50-2"}


def test_what_others_made_is_never_touched(run: Run, tmp_path: Path) -> None:
    root = tmp_path / "run"
    run.keep(KeepLast(1) | KeepTagged(), LinkTemplate("{name}--{loss:.2f}-{step}"))
    run.save(1, loss=0.5, tags=("gold",))
    foreign = {
        "mine": folder(1),
        "best-of-all": "../elsewhere",
        "run--0.50-1.bak": folder(1),
        "run--0.50-77": "/somewhere",
        "bestiary": folder(1),
        "inside": f"{folder(77)}/shared.json",
        "odd": "step-77",
        "roundabout": f"./{folder(77)}",
    }
    for name, target in foreign.items():
        os.symlink(target, root / name)
    (root / "notes.txt").write_text("mine")
    run.save(2, loss=0.25)
    run.keeper.clean_up()
    assert run.steps == [2, 1]
    assert {name: target for name, target in run.links.items() if name in foreign} == foreign
    assert (root / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("links", [True, None, LinkTemplate("{name}--{step}")], ids=["true", "none", "template"])
def test_a_link_to_a_checkpoint_goes_with_it_whoever_made_it(run: Run, links: Any, tmp_path: Path) -> None:
    run.keep(KeepLast(1), links)
    run.save(1)
    run.save(2)
    for name, target in {"old": folder(1), "never": folder(77), "mine": folder(2)}.items():
        os.symlink(target, tmp_path / "run" / name)
    run.keeper.clean_up()
    assert {"old", "never", "mine"} & set(run.links) == {"mine"}


class Watched(LocalStorage):
    """A folder of which something is known when what stays is made durable: a plan is made, nothing is removed yet."""

    planned: Callable[[], object] | None = None

    def sync(self, folder: str) -> None:
        planned, self.planned = self.planned, None
        if planned is not None:
            planned()
        super().sync(folder)


def test_a_link_to_what_was_about_to_go_and_is_read_stays(tmp_path: Path) -> None:
    storage = Watched(tmp_path / "run")
    run = Run(storage, KeepLast(1))
    run.save(1)
    run.save(2)
    os.symlink(folder(1), tmp_path / "run" / "mine")
    with ExitStack() as stack:
        storage.planned = lambda: stack.enter_context(reading(storage, folder(1)))
        assert [decision.keep for decision in run.keeper.clean_up()] == [True, False]
        assert run.steps == [2, 1]
        assert "mine" in run.links
    run.keeper.clean_up()
    assert run.steps == [2]
    assert "mine" not in run.links


def test_a_link_to_what_is_gone_but_for_a_reader_of_its_bytes_goes(run: Run, tmp_path: Path) -> None:
    run.keep(KeepLast(1))
    first = run.save(1)
    run.save(2)
    os.symlink(first.folder, tmp_path / "run" / "mine")
    run.keeper._doomed[first.folder] = run.keeper._claim_of(first.folder)
    run.catalog.uncommit(first.folder)
    with reading(run.storage, first.folder):
        run.keeper.clean_up()
        assert first.folder in run.names
        assert set(run.links) == {"latest"}


def test_a_link_to_what_is_being_written_or_cannot_be_read_stays(run: Run, tmp_path: Path) -> None:
    run.keep(KeepLast(1))
    unreadable = run.save(1).folder
    run.save(2)
    (tmp_path / "run" / unreadable / "manifest.json").write_text("{")
    under_way = attempt(run, 7, HERE, lease=run.saver.lease)
    closed = attempt(run, 8, FAR)
    for name, target in {"a": unreadable, "b": under_way, "c": closed}.items():
        os.symlink(target, tmp_path / "run" / name)
    run.catalog.attempts.close_older(run.saver.lease)
    run.keeper.clean_up()
    assert {"a", "b", "c"} & set(run.links) == {"a", "b"}


@pytest.mark.parametrize("name", ["latest", "best"])
def test_a_file_in_the_place_of_a_link_stays_and_the_rest_is_done(
    run: Run, name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run.keep(KeepLast(1) | KeepBest("loss"))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / name).write_text("mine")
    run.save(1, loss=2)
    run.save(2, loss=1)
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        run.keeper.clean_up()
    assert (tmp_path / "run" / name).read_text() == "mine"
    assert "the links could not be moved" in caplog.text
    assert run.steps == [2]


def test_a_template_that_changed_leaves_no_link_that_leads_nowhere(run: Run, tmp_path: Path) -> None:
    run.keep(KeepLast(1), LinkTemplate("{name}-at-{step}"))
    run.save(1)
    run.keeper.clean_up()
    run.keep(KeepLast(1), LinkTemplate("{name}--{step:09d}"))
    run.save(2)
    run.keeper.clean_up()
    assert [name for name in run.links if not (tmp_path / "run" / name).exists()] == []


def test_without_links_none_is_made_or_moved(run: Run) -> None:
    run.keep(KeepLast(1) | KeepBest("loss"), links=False)
    run.save(1, loss=1)
    run.storage.features.links.remove("latest")
    run.storage.features.links.point("best", folder(1))
    run.storage.features.links.point("mine", folder(7))
    run.keeper.clean_up()
    assert run.links == {"best": folder(1)}, "and what would lead nowhere goes"


def test_a_storage_without_links_is_cleaned_up_all_the_same() -> None:
    run = Run(MemoryStorage(), KeepLast(1))
    run.save(1)
    run.save(2)
    run.keeper.clean_up()
    assert run.steps == [2]


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


class Meeting(_Wrapper):
    """Right before one operation something happens, once."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.before, self.do = "", lambda: None

    def _act(self, operation: str, action: Callable[[], Any], *, size_bytes: int = 0) -> Any:
        self._meet(operation)
        return action()

    def entries(self, folder: str) -> Any:
        self._meet(f"list {folder}")
        return super().entries(folder)

    def _meet(self, operation: str) -> None:
        if operation == self.before:
            self.before = ""
            self.do()


@pytest.mark.guarantee("G4")
def test_a_rollback_while_others_are_being_removed_keeps_what_it_went_back_to() -> None:
    storage = Meeting(MemoryStorage())
    manager = holdfast.CheckpointManager(
        "run", {"part": Part()}, storage=storage, mode="sync", rng=False, keep=KeepLast(1)
    )
    manager.save(1)
    manager._housekeeper.wait()
    planned, restored = threading.Event(), threading.Event()

    def hold() -> None:
        planned.set()
        restored.wait(5)

    def hold_second() -> None:
        storage.before, storage.do = "list lease", hold  # the plan is made, and nothing is removed yet

    storage.before, storage.do = "list readers", lambda: None

    # Behind the training: once for the sweep, once for the plan; then the look whether this is still the writer.
    def after_sweep() -> None:
        storage.before, storage.do = "list readers", hold_second

    storage.before, storage.do = "list readers", after_sweep
    manager.save(2)
    assert planned.wait(60)
    going_back = threading.Thread(target=lambda: manager.restore(1))
    going_back.start()
    going_back.join(1)  # it may have to wait for the housework, and then finds what is there
    restored.set()
    going_back.join(60)
    manager._housekeeper.wait()
    assert manager.save(3).wait().parent in {found.digest for found in manager.checkpoints()} | {None}
    manager._housekeeper.wait()
    newest = manager.checkpoints()[0]
    assert (newest.step, newest.manifest.line) == (3, ((1, 1),))
    manager.close()


# Notes on what is gone


def note_on(run: Run, checkpoint: Checkpoint, **said: Any) -> None:
    """By another process, which does not know what is being removed."""
    Catalog(run.storage).annotations.add(checkpoint, **said)


def test_notes_go_with_what_they_are_about_also_those_that_came_too_late() -> None:
    run = Run(MemoryStorage(), KeepLast(1))
    first, second = run.save(1), run.save(2)
    note_on(run, first, metrics={"loss": 1.0})
    note_on(run, second, metrics={"loss": 2.0})
    run.keeper.clean_up()
    note_on(run, first, tag="gold")
    assert len(run.catalog.annotations.names()) == 2
    run.keeper.clean_up()
    (left,) = run.catalog.scan().checkpoints
    assert (left.step, left.metrics) == (2, {"loss": 2.0})
    assert [name[: len(second.folder)] for name in run.catalog.annotations.names()] == [second.folder]


def test_a_note_on_the_one_that_had_the_folder_before_goes_and_its_successors_stays() -> None:
    run = Run(MemoryStorage(), KeepAll())
    first = run.save(1)
    second = replace(run.save(2), digest=first.digest)  # as if another had been committed there before
    note_on(run, second, tag="stale")
    note_on(run, run.catalog.read(folder(2)), tag="gold")
    run.keeper.clean_up()
    assert run.catalog.scan().checkpoints[0].tags == ("gold",)
    assert len(run.catalog.annotations.names()) == 1


def test_a_note_whose_name_is_given_again_is_read_again() -> None:
    run = Run(MemoryStorage(), KeepAll())
    first = run.save(1)
    note_on(run, replace(first, digest="0" * 64), tag="stale")
    assert run.catalog.scan().checkpoints[0].tags == ()
    (name,) = run.catalog.annotations.names()
    run.storage.delete(f"notes/{name}")
    note_on(run, first, tag="gold")
    assert run.catalog.annotations.names() == [name]
    assert run.catalog.scan().checkpoints[0].tags == ("gold",)
    run.keeper.clean_up()
    assert run.catalog.annotations.names() == [name]


def test_a_note_on_what_is_under_way_or_cannot_be_read_stays() -> None:
    run = Run(MemoryStorage(), KeepLast(1))
    damaged = run.save(1)
    second = run.save(2)
    run.storage.delete(damaged.key("manifest.json"))
    run.storage.put(damaged.key("manifest.json"), b"{")
    under_way = attempt(run, 7, HERE, lease=run.saver.lease)
    run.storage.put(f"notes/{under_way}--000008.json", b"{}")
    run.storage.put("notes/mine.json", b"{}")
    run.storage.put(f"notes/{second.folder}--000009.json", b"no note")
    note_on(run, damaged, tag="gold")
    before = run.catalog.annotations.names()
    run.keeper.clean_up()
    assert len(before) == 4
    assert run.catalog.annotations.names() == before


class Nth(Meeting):
    """Right before the nth operation something happens, once. While the lease is looked at nobody can save."""

    left = 0

    def _meet(self, operation: str) -> None:
        self.left -= "lease" not in operation
        if self.left == 0 and "lease" not in operation:
            self.do()


def test_a_note_on_what_is_committed_at_any_moment_of_a_cleanup_stays() -> None:
    moment, happened = 0, True
    while happened:
        moment += 1
        storage = Nth(MemoryStorage())
        run = Run(storage, KeepLast(2))
        first = run.save(1)
        run.save(2)
        note_on(run, replace(first, digest="0" * 64), tag="stale")
        storage.left, storage.do = moment, lambda run=run: note_on(run, run.save(3), tag="gold")
        run.keeper.clean_up()
        happened = storage.left < 0
        if happened:
            run.keeper.clean_up()
            assert run.catalog.scan().checkpoints[0].tags == ("gold",), moment
            assert len(run.catalog.annotations.names()) == 1, moment
    assert moment > 8


def test_what_is_said_of_one_that_was_removed_meanwhile_names_its_step(run: Run) -> None:
    run.keep(KeepLast(1))
    first = run.save(1)
    run.save(2)
    run.keeper.clean_up()
    with pytest.raises(CheckpointNotFoundError, match="step 1: step-000000001 was removed meanwhile") as caught:
        run.keeper.annotate(first, tag="gold")
    assert caught.value.step == 1
    assert run.catalog.annotations.names() == []


# What abandoned attempts leave


def attempt(run: Run, step: int, who: Identity | None, *, lease: int = 0, **more: Any) -> str:
    """An attempt with some bytes in it, by somebody."""
    name = folder(step)
    if who is not None:
        record = {"claim": "x", **msgspec.to_builtins(who), "lease": lease, **more}
        run.storage.put(f"{name}/attempt.json", json.dumps(record).encode())
    run.storage.put(f"{name}/rank-00000.safetensors", b"bytes")
    run.storage.put(f"{name}/assets/deep/config.yaml", b"more")
    return name


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
