"""A cleanup that starts from what the last one decided decides as one that looks at the whole run."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import pytest

from holdfast.manager.arguments import encoded_metrics
from holdfast.ondisk import paths
from holdfast.runs.annotations import Annotations
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.cleanup import Housekeeper
from holdfast.runs.readers import reading
from holdfast.runs.retention import KeepAll, KeepBest, KeepEvery, KeepLast, KeepPolicy, Record
from holdfast.storage.base import Entry, Source
from holdfast.testing import MemoryStorage
from holdfast.testing.storages import _Wrapper
from tests.counting import calls
from tests.sizes import DEEP
from tests.unit.runs.scene import Run, folder


class Odd(KeepPolicy):
    """A policy of a user, which states nothing about its later choices: every second checkpoint."""

    def choose(self, records: Any) -> dict[str, str]:
        return {record.folder: "odd" for record in records if record.step % 2}


POLICIES: list[KeepPolicy] = [
    KeepLast(1),
    KeepLast(3) | KeepEvery(steps=5),
    KeepBest("loss", 2) | KeepLast(2),
    KeepBest("loss", 1, "max") | KeepEvery(steps=4) | KeepLast(4),
    KeepEvery(minutes=1e-9) | KeepLast(1),
    KeepEvery(minutes=1000) | KeepLast(2),
    KeepAll(),
    Odd() | KeepLast(2),
]


class Counting(_Wrapper):
    """Counts the manifests that are read, and the listings of the run."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.manifests: list[str] = []
        self.listings = 0

    def entries(self, folder: str) -> list[Entry]:
        self.listings += folder == ""
        return super().entries(folder)

    def open(self, key: str) -> Source:
        if key.endswith(paths.MANIFEST):
            self.manifests.append(key)
        return super().open(key)


def clean_up(run: Run) -> None:
    run.keeper.clean_up_in_background()
    run.keeper.wait()
    assert [event.kind for event in run.events if event.kind == "retention_failed"] == []


def planned_afresh(run: Run, policy: KeepPolicy) -> set[str]:
    """What a housekeeper keeps that has never seen the run before."""
    fresh = Housekeeper(Catalog(run.storage), keep=policy, in_use=lambda: {run.saver.lineage.head})
    return {decision.folder for decision in fresh.plan() if decision.keep}


class Meddler:
    """What other processes and people do to a run between two cleanups."""

    def __init__(self, run: Run, chance: random.Random) -> None:
        self.run, self.chance, self.step = run, chance, 0
        self.moved: dict[str, bytes] = {}

    def save(self) -> None:
        self.step += self.chance.randint(1, 3)
        metrics = {"loss": self.chance.choice([0.5, 1.0, float("nan"), self.chance.random()])}
        tags = ("gold",) if self.chance.random() < 0.1 else ()
        self.run.save(self.step, tags=tags, **(metrics if self.chance.random() < 0.8 else {}))

    def go_back(self) -> None:
        checkpoint = self._any()
        self.run.saver.lineage.continue_from(checkpoint, self.run.catalog)
        self.step = checkpoint.step

    def step_down(self) -> None:
        """The line goes on with a step that is not higher."""
        self.step = max(self.step - self.chance.randint(2, 9), 0)

    def tag_and_save_again(self) -> None:
        """The newest step is saved again, and the earlier checkpoint of it stays, because it has a tag."""
        newest = Catalog(self.run.storage).scan().checkpoints[0]
        Annotations(self.run.storage).add(newest, tag="first")
        self.run.save(newest.step, resave=True, loss=self.chance.random())

    def annotate(self) -> None:
        note: dict[str, Any] = self.chance.choice(
            [{"tag": "late"}, {"untag": "gold"}, {"metrics": encoded_metrics({"loss": 0.1})}, {"damage": "rot"}]
        )
        Annotations(self.run.storage).add(self._any(), **note)

    def move_out(self) -> None:
        checkpoint = self._any()
        if checkpoint.digest == self.run.saver.lineage.head:
            return
        for key in [key for key in self.run.storage._values if key.startswith(f"{checkpoint.folder}/")]:
            self.moved[key] = self.run.storage._values.pop(key)

    def move_in(self) -> None:
        # Not over one that has its name since: a committed checkpoint never changes.
        taken = set(self.run.names)
        back = {key: data for key, data in self.moved.items() if key.partition("/")[0] not in taken}
        self.run.storage._values.update(back)
        self.moved = {}

    def _any(self) -> Checkpoint:
        return self.chance.choice(Catalog(self.run.storage).scan().checkpoints)


@pytest.mark.parametrize("seed", range(12 if DEEP else 3))
@pytest.mark.parametrize("policy", POLICIES, ids=map(str, range(len(POLICIES))))
def test_whatever_happens_between_two_cleanups_the_next_keeps_what_a_fresh_one_keeps(
    policy: KeepPolicy, seed: int
) -> None:
    run = Run(MemoryStorage(), policy)
    meddler = Meddler(run, random.Random(seed))
    others = [
        meddler.go_back,
        meddler.step_down,
        meddler.tag_and_save_again,
        meddler.annotate,
        meddler.move_out,
        meddler.move_in,
    ]
    for _ in range(25):
        meddler.save()
        if meddler.chance.random() < 0.3:
            meddler.chance.choice(others)()
        expected = planned_afresh(run, policy)
        clean_up(run)
        assert {found.folder for found in Catalog(run.storage).scan().checkpoints} == expected


def reads_of_a_commit(kept: int) -> int:
    storage = Counting(MemoryStorage())
    run = Run(storage, KeepLast(2) | KeepEvery(steps=2) | KeepBest("loss", 2))
    for step in range(2, 2 * kept, 2):
        run.save(step, loss=1 / step)
    clean_up(run)
    for step in (2 * kept, 2 * kept + 1, 2 * kept + 2):
        storage.manifests.clear()
        run.save(step, loss=1.0)
        clean_up(run)
    assert len(run.steps) == kept + 2
    return len(storage.manifests) - len(set(run.names))


def test_a_commit_reads_no_more_manifests_in_a_run_of_many_checkpoints() -> None:
    # Those that `Run.steps` reads are left out.
    assert reads_of_a_commit(5) == reads_of_a_commit(60)


def test_a_commit_lists_the_run_once_and_its_cleanup_once() -> None:
    storage = Counting(MemoryStorage())
    run = Run(storage, KeepLast(2) | KeepEvery(steps=2))
    for step in range(6):
        run.save(step)
        clean_up(run)
    storage.listings = 0
    run.save(6)
    assert storage.listings == 1
    clean_up(run)
    assert storage.listings == 2


def damage(run: Run, step: int) -> None:
    key = paths.key(folder(step), paths.MANIFEST)
    data = run.storage._values[key]
    run.storage._values[key] = data[:-20] + b"x" + data[-19:]


def calls_of_a_cleanup(kept: int) -> int:
    run = Run(MemoryStorage(), KeepLast(2) | KeepEvery(steps=2) | KeepBest("loss", 2))
    for step in range(2, 2 * kept, 2):
        run.save(step, loss=1 / step)
    clean_up(run)
    run.save(2 * kept, loss=0.0)
    return calls(run.keeper._take_turn)


def test_a_cleanup_decides_about_what_is_new_alone() -> None:
    # All that grows is the listing of names, which makes no call for each of them.
    assert calls_of_a_cleanup(60) == calls_of_a_cleanup(10)


@pytest.mark.parametrize("step", [10, 13, 14])
def test_nothing_is_removed_on_account_of_a_checkpoint_whose_manifest_was_damaged_since(step: int) -> None:
    run = Run(MemoryStorage(), KeepLast(3) | KeepEvery(steps=10))
    for saved in (10, 11, 12, 13):
        run.save(saved)
        clean_up(run)
    assert run.steps == [13, 12, 11, 10]
    if step == 14:
        run.save(14)
    damage(run, step)
    if step != 14:
        run.save(14)
    expected = planned_afresh(run, KeepLast(3) | KeepEvery(steps=10))
    clean_up(run)
    assert set(map(folder, run.steps)) == expected
    assert 11 in run.steps


def test_nothing_is_removed_in_favour_of_one_before_it_whose_manifest_was_damaged_since() -> None:
    policy = KeepLast(5) | KeepEvery(steps=3)
    run = Run(MemoryStorage(), policy)
    for saved in range(3, 12):
        run.save(saved)
        clean_up(run)
    assert run.steps == [11, 10, 9, 8, 7, 6, 3]
    damage(run, 6)
    run.save(12)
    expected = planned_afresh(run, policy)
    clean_up(run)
    assert set(map(folder, run.steps)) == expected
    assert 7 in run.steps


def test_the_policies_state_what_they_may_still_change() -> None:
    records = [Record(folder(step), step, step, 60.0 * step, {}) for step in (30, 25, 20, 10)]
    assert KeepLast(2).open_choice(records[:2]) == records[:2]
    assert KeepBest("loss").open_choice(records[:1]) == records[:1]
    assert list(KeepEvery(steps=10).open_choice(records)) == records[:1]
    assert list(KeepEvery(minutes=5).open_choice(records)) == records[:1]
    assert list(KeepAll().open_choice(records)) == []
    assert Odd().open_choice(records) is None


class Interrupted(_Wrapper):
    """Something happens right before one listing of the readers, which are counted from `arm` on."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.listings, self.at = 0, 0
        self.do: Callable[[], object] = lambda: None

    def arm(self, at: int, do: Callable[[], object]) -> None:
        self.listings, self.at, self.do = 0, at, do

    def entries(self, folder: str) -> list[Entry]:
        if folder == paths.READERS:
            self.listings += 1
            if self.listings == self.at:
                # The listings that it makes itself do not count.
                self.at = 0
                self.do()
        return super().entries(folder)


@pytest.mark.parametrize("looks_at", ["what is new", "the whole run"])
@pytest.mark.parametrize("reader", ["ends", "begins"])
@pytest.mark.parametrize("listing", range(1, 8))
def test_a_reader_that_ends_or_begins_during_a_cleanup_keeps_nothing_for_longer(
    listing: int, reader: str, looks_at: str
) -> None:
    storage = Interrupted(MemoryStorage())
    run = Run(storage, KeepLast(1))
    for step in (1, 2):
        run.save(step)
        clean_up(run)
    run.save(3)
    if looks_at == "the whole run":
        run.keep(KeepLast(1))
    with ExitStack() as claims:

        def begin() -> None:
            claims.enter_context(reading(storage, folder(2)))

        if reader == "ends":
            begin()
        storage.arm(listing, claims.close if reader == "ends" else begin)
        clean_up(run)
        assert 3 in run.steps
    # A cleanup that makes fewer listings has not come to that point, and later ones must not.
    storage.at = 0
    for step in (4, 5):
        run.save(step)
        clean_up(run)
    assert run.steps == [5]


@pytest.mark.parametrize("call", range(1, 6))
def test_a_training_that_goes_on_from_another_checkpoint_during_a_cleanup_keeps_nothing_for_longer(call: int) -> None:
    run = Run(MemoryStorage(), KeepLast(1))
    first = run.save(1)
    calls_made: list[int] = []

    def in_use() -> set[str | None]:
        calls_made.append(1)
        return {first.digest} if len(calls_made) <= call else set()

    run.save(2)
    run.keeper = Housekeeper(run.catalog, keep=KeepLast(1), in_use=in_use)
    clean_up(run)
    assert calls_made
    calls_made += [1] * call
    for step in (3, 4):
        run.save(step)
        clean_up(run)
    assert run.steps == [4]


def test_a_checkpoint_with_a_note_that_cannot_be_read_is_decided_about_again_once_it_can() -> None:
    run = Run(MemoryStorage(), KeepLast(1))
    noted = run.save(1)
    Annotations(run.storage).add(noted, metrics=encoded_metrics({"loss": 1.0}))
    (key,) = [key for key in run.storage._values if key.startswith(f"{paths.NOTES}/")]
    sound, run.storage._values[key] = run.storage._values[key], b"{"
    run.save(2)
    clean_up(run)
    assert run.steps == [2, 1]
    run.storage._values[key] = sound
    run.save(3)
    clean_up(run)
    assert run.steps == [3]


@pytest.mark.parametrize("looks_at", ["what is new", "the whole run"])
def test_a_checkpoint_counts_again_once_the_later_one_of_its_step_was_removed(looks_at: str) -> None:
    policy = KeepBest("loss", 2) | KeepLast(1)
    run = Run(MemoryStorage(), policy)
    run.save(1, tags=("gold",), loss=0.1)
    for step, loss in ((1, 0.5), (2, 0.2), (3, 0.3)):
        clean_up(run)
        run.save(step, resave=step == 1, loss=loss)
    if looks_at == "the whole run":
        run.keep(policy)
    clean_up(run)
    assert run.names == [folder(1), folder(2), folder(3)], "the later one of step 1 was removed"
    run.save(4, loss=0.9)
    expected = planned_afresh(run, policy)
    clean_up(run)
    assert set(run.names) == expected == {folder(1), folder(2), folder(4)}


def test_a_step_that_was_saved_again_does_not_have_the_whole_run_looked_at_each_time() -> None:
    storage = Counting(MemoryStorage())
    run = Run(storage, KeepLast(1) | KeepEvery(steps=10))
    run.save(1, tags=("gold",))
    run.save(1, tags=("gold",), resave=True)
    for step in (*range(10, 100, 10), 101, 102, 103):
        run.save(step)
        clean_up(run)
    assert run.names[:2] == [folder(1), f"{folder(1)}.2"]
    storage.listings = 0
    run.save(104)
    clean_up(run)
    assert storage.listings == 2


class Recording(_Wrapper):
    """Notes which folders are synced and which manifests are deleted, in order."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.calls: list[tuple[str, str]] = []

    def sync(self, folder: str) -> None:
        self.calls.append(("sync", folder))
        super().sync(folder)

    def delete(self, key: str) -> None:
        if key.endswith(paths.MANIFEST):
            self.calls.append(("delete", key))
        super().delete(key)


def test_all_that_stay_are_synced_before_the_first_removal_also_if_no_cleanup_removed_before() -> None:
    storage = Recording(MemoryStorage())
    run = Run(storage)
    for step in range(1, 5):
        run.save(step)
    # A process that goes on with the run: it does not know whether those before it synced what they committed.
    run.keep(KeepLast(4))
    storage.calls.clear()
    clean_up(run)
    run.save(5)
    clean_up(run)
    assert run.steps == [5, 4, 3, 2]
    removal = storage.calls.index(("delete", paths.key(folder(1), paths.MANIFEST)))
    assert {name for call, name in storage.calls[:removal] if call == "sync"} >= {folder(step) for step in range(2, 6)}
