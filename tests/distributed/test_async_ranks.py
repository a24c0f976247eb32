"""Saves behind the training on several ranks: what they hold, who hears of failures, and what survives whose death."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.errors import RankError, SaveFailedError, StorageError, UsageError
from holdfast.ranks.base import Ranks
from holdfast.ranks.torch_store import torch_ranks
from holdfast.runs.catalog import Catalog
from holdfast.saving.pipeline import Saver
from holdfast.saving.request import SaveRequest
from holdfast.state.budget import ranks_here
from holdfast.storage.base import Links, StorageFeatures
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import Outcome, values
from tests.distributed.scenes import Holder, Play, bits, caught, hash_tree, meet, run_scenes, the_same_error
from tests.distributed.test_failures import FailingStorage, sharded_model
from tests.distributed.training import build
from tests.leftovers import own_writer
from tests.ranks import run_ranks
from tests.sizes import if_deep

# Far more than anything here takes on a busy machine: what is known at once must not need it.
TIMEOUT_SECONDS = 200.0
# Where a rank is dead and the others must notice; long enough for a slow machine to bring the living ones there.
DEATH_TIMEOUT_SECONDS = 4.0
# Followers wait this much longer than the leader, so that its word can reach them.
GRACE_SECONDS = 5.0
STEPS = 20


def manager_of(run: Path | str, state: dict[str, Any], **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, state, rng=False, **{"timeout": TIMEOUT_SECONDS, "mode": "async", **options})


def wait_for(condition: Callable[[], Any], seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


def steps_of(run: Path) -> list[int]:
    return [checkpoint.step for checkpoint in holdfast.checkpoints(run)]


# Writers, and how to kill them


def is_gone(process: int) -> bool:
    """Whether a process has ended, be it that nobody has asked for its end yet."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def is_stopped(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "tT"


def stop(process: int) -> None:
    """Hold a process where it is."""
    os.kill(process, signal.SIGSTOP)
    wait_for(lambda: is_stopped(process))


def note(folder: Path, name: str, number: int) -> None:
    """Say a number to whoever looks at a folder."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.tmp").write_text(str(number))
    (folder / f"{name}.tmp").rename(folder / name)


def noted(folder: Path, name: str) -> int:
    return int((folder / name).read_text())


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


# What is saved


def train_and_save_at_every_step(rank: int, folder: Path) -> Any:
    """FSDP2 and AdamW: each checkpoint against the state as it was just before its save, and a resume from one."""
    torch.use_deterministic_algorithms(True)
    training = build("fsdp", rank, 2)
    losses, states = [], []
    with holdfast.CheckpointManager(folder, training.state, mode="async", timeout=TIMEOUT_SECONDS) as manager:
        for step in range(STEPS):
            losses += training.steps(1)
            states.append(state_of(training))
            manager.save(step, metrics={"loss": losses[-1]})
    wrong = []
    again = build("fsdp", rank, 2, seed=77)
    with holdfast.CheckpointManager(folder, again.state, mode="async", timeout=TIMEOUT_SECONDS) as manager:
        for step in reversed(range(STEPS)):
            manager.restore(step)
            wrong += [step] if state_of(again) != states[step] else []
    third = build("fsdp", rank, 2, seed=78)
    torch.manual_seed(31337 + rank)
    with holdfast.CheckpointManager(folder, third.state, mode="async", timeout=TIMEOUT_SECONDS) as manager:
        start = manager.restore(STEPS // 2 - 1)
        resumed = third.steps(STEPS // 2)
        manager.save(start.next_step)
    return wrong, losses[STEPS // 2 :], resumed, steps_of(folder)


def state_of(training: Any) -> Any:
    parts = (training.model, training.optimizer, training.scheduler, training.loader)
    return [bits(part.state_dict()) for part in parts]


def tensors_that_change_while_they_are_written(rank: int, folder: Path) -> list[int]:
    """Large enough that the writer is at work when the next step changes everything."""
    holder = large_model(0)
    with manager_of(folder, {"model": holdfast.Shared(holder)}) as manager:
        for step in range(4):
            for tensor in holder.state.values():
                tensor.add_(1)
            manager.save(step)
            for tensor in holder.state.values():
                tensor.mul_(1.0)
    wrong = []
    with manager_of(folder, {"model": holdfast.Shared(holder)}) as manager:
        for step in range(4):
            manager.restore(step)
            wrong += [step] if bits(holder.state) != bits(large_model(step + 1).state) else []
    return wrong


def large_model(seed: int) -> Holder:
    """Some tens of megabytes, of which each rank holds its own half."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(8_000_000, dtype=torch.float32).reshape(2000, 4000) + seed
    return Holder(weight=distribute_tensor(whole, mesh, [Shard(0)]), plain=torch.full((3,), float(seed)))


# Agreements


class Counting:
    """Ranks that note what they were asked to agree on."""

    def __init__(self, inner: Ranks) -> None:
        self.inner, self.rank, self.size = inner, inner.rank, inner.size
        self.labels: list[str] = []

    def decide(self, label: str, *args: Any, **options: Any) -> Any:
        self.labels.append(label)
        return self.inner.decide(label, *args, **options)

    def branch(self, name: str) -> Ranks:
        return self.inner.branch(name)

    def close(self, seconds: float) -> None:
        self.inner.close(seconds)


def agreements_of_each_save(rank: int, folder: Path) -> Any:
    """The same structure twice, then one that changed on rank 1 alone, then that one twice, then the first again."""
    ranks = Counting(torch_ranks(timeout_seconds=TIMEOUT_SECONDS))
    saver = Saver(Catalog(LocalStorage(folder)), ranks, mode="async", timeout_seconds=TIMEOUT_SECONDS)
    small = sharded_model(0)
    mine = Holder(own=torch.full((5,), float(rank)))
    larger = Holder(own=torch.full((5,), float(rank)), more=torch.full((7,), 70.0 + rank))
    seen = []
    for step, part in enumerate([mine, mine, larger if rank == 1 else mine, larger if rank == 1 else mine, mine]):
        for tensor in (*small.state.values(), *part.state.values()):
            tensor.add_(1)
        expected = bits([small.state, part.state])
        ranks.labels.clear()
        components = {"model": holdfast.Shared(small), "mine": holdfast.PerRank(part)}
        saver.save(step, lambda step=step, components=components: SaveRequest(step, components))
        seen.append((list(ranks.labels), expected))
        saver.wait()
    saver.close()
    right = []
    for step, (_, expected) in enumerate(seen):
        found = sharded_model(99), Holder()
        components = {"model": holdfast.Shared(found[0]), "mine": holdfast.PerRank(found[1])}
        with manager_of(folder, components) as manager:
            manager.restore(step)
        right.append(bits([found[0].state, found[1].state]) == expected)
    return [labels for labels, _ in seen], right


def ranks_with_different_modes(rank: int, folder: Path) -> Any:
    return caught(lambda: manager_of(folder, {"h": Holder(a=1)}, mode="async" if rank else "sync"))


def checkpointers_with_different_modes(rank: int, folder: Path) -> Any:
    """The same without a manager. Both are made anew afterwards, so that one that was made does not matter."""
    start = time.monotonic()

    def use() -> None:
        mode = "async" if rank else "sync"
        with holdfast.AsyncCheckpointer(folder, mode=mode, timeout=DEATH_TIMEOUT_SECONDS) as checkpointer:
            checkpointer.save(0, {"t": torch.ones(3)}, wait=True)

    return caught(use), time.monotonic() - start, steps_of(folder)


# Failures


def writers_that_are_killed_on_one_rank(rank: int, folder: Path) -> Any:
    """Stopped before the save, so that it cannot be through; killed after it."""
    seen = []
    for victim in (0, 1):
        run = folder / str(victim)
        holder = sharded_model(0)
        manager = manager_of(run, {"model": holdfast.Shared(holder)})
        manager.save(1, wait=True)
        if rank == victim:
            stop(own_writer())
        meet(f"{run} stopped")
        holder.state = sharded_model(7).state
        handle = manager.save(2)
        if rank == victim:
            os.kill(own_writer(), signal.SIGKILL)
        start = time.monotonic()
        error = caught(handle.wait)
        seconds = time.monotonic() - start
        manager.poll()
        manager.wait()
        meet(f"{run} failed")
        steps = steps_of(run)
        meet(f"{run} looked at")
        again = manager.save(2).wait().step
        manager.close()
        holder.state = sharded_model(99).state
        with manager_of(run, {"model": holdfast.Shared(holder)}) as manager:
            manager.restore()
        same = bits(holder.state) == bits(sharded_model(7).state)
        seen.append((error, seconds, steps, again, same, holdfast.verify(run).ok))
    return seen


FAILURES = [
    (failing, operation, suffix, way)
    for failing, (operation, suffix), way in zip(
        (0, 1, 0, 1, 0, 1, 0, 1, 0, 1),
        [
            *(("create", ".safetensors"), ("write", ".safetensors"), ("close", ".safetensors"), ("sync", "")),
            *(("create", ""), ("put", ".receipt.json"), ("put", "manifest.json"), ("create", "")),
            *(("put", "attempt.json"), ("close", "")),
        ],
        ("save", "wait", "close", "handle", "wait", "save", "handle", "close", "save", "wait"),
        strict=True,
    )
]


def disks_that_fail_on_one_rank(rank: int, folder: Path) -> Any:
    """An older checkpoint, a save that fails on one rank behind the training, and the next; heard in every way."""
    seen = []
    for failing, operation, suffix, way in FAILURES:
        run = folder / f"{failing}-{operation}-{suffix}-{way}"
        storage = FailingStorage(run, operation, suffix)
        holder = sharded_model(0)
        manager = manager_of(run, {"model": holdfast.Shared(holder)}, storage=storage)
        manager.save(1, wait=True)
        before = hash_tree(run)
        meet(f"{run} before")
        storage.armed = rank == failing
        handle = manager.save(2)
        wait_for(handle.done)
        storage.armed = False
        meet(f"{run} failed")
        after = hash_tree(run)
        meet(f"{run} looked at")
        ways = {
            "save": lambda m=manager: m.save(3),
            "wait": manager.wait,
            "close": manager.close,
            "handle": handle.wait,
        }
        error = caught(ways[way])
        silent = [caught(work) for work in ((manager.close,) if way == "close" else (manager.poll, manager.wait))]
        holder.state = sharded_model(7).state
        if way == "close":
            manager = manager_of(run, {"model": holdfast.Shared(holder)}, storage=storage)
        step = manager.save(4).wait().step
        manager.close()
        seen.append((error, before == after, silent, step, holdfast.verify(run).ok, steps_of(run)))
        meet(f"{run} done")
    return seen


def a_failure_that_rank_0_polls_first(rank: int, folder: Path) -> Any:
    storage = FailingStorage(folder, "create", ".safetensors")
    manager = manager_of(folder, {"model": holdfast.Shared(sharded_model(0))}, storage=storage)
    said = Said()
    logging.getLogger("holdfast").addHandler(said)
    storage.armed = rank == 1
    handle = manager.save(1)
    wait_for(handle.done)
    storage.armed = False
    polled = caught(manager.poll) if rank == 0 else None
    meet("polled")
    start = time.monotonic()
    raised = caught(lambda: manager.save(2))
    seconds = time.monotonic() - start
    later = [caught(manager.poll), caught(manager.wait), caught(lambda: manager.save(3)), caught(manager.close)]
    logging.getLogger("holdfast").removeHandler(said)
    return polled, raised, seconds, later, [line for line in said.lines if "no room for it" in line], steps_of(folder)


class Said(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def assets_that_cannot_be_staged(rank: int, folder: Path) -> Any:
    """Only the leader takes them, and when it does, the other ranks have begun."""
    assets = folder.parent / f"assets-of-{rank}"
    assets.mkdir()
    manager = manager_of(folder, {"h": holdfast.Shared(sharded_model(0))}, assets=[assets])
    (assets / ".tmp-no-key").write_text("a")
    returned = caught(lambda: manager.save(1))
    error = caught(manager.wait)
    (assets / ".tmp-no-key").unlink()
    (assets / "good").write_text("a")
    step = manager.save(2).wait().step
    kinds = [event.kind for event in manager.events if event.step == 1]
    manager.close()
    return returned, error, step, kinds, steps_of(folder)


class SlowDisk(LocalStorage):
    """A disk that takes long for each piece, and never stands still."""

    def create(self, key: str, size_bytes: int) -> Any:
        sink = super().create(key, size_bytes)
        write = sink.write

        def write_slowly(data: Any) -> None:
            time.sleep(SLOW_SECONDS)
            write(data)

        sink.write = write_slowly
        return sink


# Seven pieces take longer than the leader, and after it the followers, wait.
SLOW_SECONDS = 2.5


def a_disk_that_is_slow_on_one_rank(rank: int, folder: Path) -> Any:
    """One rank writes for longer than the others wait, piece after piece."""
    seen = []
    for slow in (0, 1):
        run = folder / str(slow)
        storage = (SlowDisk if rank == slow else LocalStorage)(run)
        mine = Holder(own=torch.ones(14_000_000 if rank == slow else 3))
        with manager_of(
            run, {"mine": holdfast.PerRank(mine)}, storage=storage, timeout=DEATH_TIMEOUT_SECONDS
        ) as manager:
            handle = manager.save(1)
            error = caught(handle.wait)
            meet(f"{run} ended")
            seen.append((error, steps_of(run)))
    return seen


# State dicts without a manager


def a_state_dict_of_dcp(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = nn.Sequential(nn.Linear(10, 7), nn.Linear(7, 3))
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "numbers": {"step": 3 + seed, "rate": 0.1 * seed, "name": f"run {seed}", "none": None, "list": [1, seed]},
        "top": torch.randn(5),
        "count": 17 + seed,
        "flat.first.weight": distribute_tensor(torch.randn(6, 4), mesh, [Shard(0)]),
        "flat.second": torch.randn(3).bfloat16(),
    }


def state_dicts_that_dcp_reads_back(rank: int, folder: Path) -> Any:
    import torch.distributed.checkpoint as dcp

    with holdfast.AsyncCheckpointer(folder, mode="async", timeout=TIMEOUT_SECONDS) as checkpointer:
        saved = [a_state_dict_of_dcp(seed) for seed in (1, 2)]
        for step, state in enumerate(saved):
            checkpointer.save(step, state)
        checkpointer.wait()
    same = []
    for step, state in enumerate(saved):
        found = a_state_dict_of_dcp(9)
        dcp.load(found, storage_reader=holdfast.HoldfastReader(folder, step))
        same.append(bits(found) == bits(state))
    return same, [holdfast.verify(folder, step).ok for step in (0, 1)]


SCENES = [
    train_and_save_at_every_step,
    tensors_that_change_while_they_are_written,
    agreements_of_each_save,
    ranks_with_different_modes,
    writers_that_are_killed_on_one_rank,
    disks_that_fail_on_one_rank,
    a_failure_that_rank_0_polls_first,
    assets_that_cannot_be_staged,
    state_dicts_that_dcp_reads_back,
    a_disk_that_is_slow_on_one_rank,
    checkpointers_with_different_modes,
]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    return run_scenes(2, SCENES, tmp_path_factory.mktemp("async"), timeout_seconds=400)


@pytest.mark.guarantee("G2")
@pytest.mark.guarantee("G8")
def test_each_save_of_a_sharded_training_is_what_the_state_was_and_resumes_exactly(play: Play) -> None:
    for wrong, uninterrupted, resumed, steps in play("train_and_save_at_every_step"):
        assert wrong == []
        assert resumed == uninterrupted
        assert steps == [STEPS // 2, *reversed(range(STEPS))], "the line that goes on from the middle is the latest"


@pytest.mark.guarantee("G2")
def test_a_training_that_goes_on_changes_nothing_of_what_is_being_written(play: Play) -> None:
    assert play("tensors_that_change_while_they_are_written") == [[], []]


def test_a_known_structure_takes_one_agreement_and_a_new_one_on_any_rank_takes_two(play: Play) -> None:
    for labels, right in play("agreements_of_each_save"):
        assert labels == [
            ["save of step 0", "plan of step 0", "first look at the run"],
            ["save of step 1"],
            ["save of step 2", "plan of step 2"],
            ["save of step 3"],
            ["save of step 4", "plan of step 4"],
        ]
        assert right == [True] * 5


@pytest.mark.guarantee("G5")
def test_managers_with_different_modes_are_refused_at_construction(play: Play) -> None:
    error = the_same_error(play("ranks_with_different_modes"))
    assert isinstance(error, UsageError)
    assert "mode" in error.problem
    assert "sync" in error.problem


@pytest.mark.guarantee("G5")
def test_checkpointers_with_different_modes_are_told_so_on_all_ranks(play: Play) -> None:
    seen = play("checkpointers_with_different_modes")
    error = the_same_error([error for error, _, _ in seen])
    assert isinstance(error, UsageError)
    assert [steps for _, _, steps in seen] == [[], []]


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G6")
def test_a_writer_that_is_killed_on_one_rank_fails_that_save_on_all_and_the_next_works(play: Play) -> None:
    for victim, cases in enumerate(zip(*play("writers_that_are_killed_on_one_rank"), strict=True)):
        error = the_same_error([case[0] for case in cases])
        assert isinstance(error, SaveFailedError)
        assert "SIGKILL" in error.problem
        assert (error.rank, error.step) == (victim, 2)
        for _, seconds, steps, again, same, sound in cases:
            assert seconds < TIMEOUT_SECONDS
            assert (steps, again, same, sound) == ([1], 2, True, True)


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("case", range(len(FAILURES)), ids=[" ".join(map(str, failure)) for failure in FAILURES])
def test_a_disk_that_fails_on_one_rank_fails_that_save_once_on_all_and_the_next_works(case: int, play: Play) -> None:
    failing, _, suffix, _ = FAILURES[case]
    seen = [of_rank[case] for of_rank in play("disks_that_fail_on_one_rank")]
    error = the_same_error([error for error, *_ in seen])
    assert isinstance(error, StorageError)
    assert (error.errno, error.step) == (errno.ENOSPC, 2)
    # The commit is the decision itself, and no rank's part of it.
    assert error.rank == (None if suffix == "manifest.json" else failing)
    for _, as_before, silent, step, sound, steps in seen:
        # Once the manifest may be there, nobody may remove anything.
        assert as_before or suffix == "manifest.json", "the attempt's files are gone"
        assert not any(silent), "it is raised once"
        assert (step, sound, steps) == (4, True, [4, 1])


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G6")
def test_a_failure_that_one_rank_polled_is_raised_there_once_and_parts_nobody(play: Play) -> None:
    (polled, raised_0, seconds_0, later_0, _, steps), (_, raised_1, seconds_1, later_1, said_1, _) = play(
        "a_failure_that_rank_0_polls_first"
    )
    assert isinstance(polled, StorageError)
    assert polled.rank == 1
    assert (raised_0, raised_1) == (None, None)
    assert not any(later_0 + later_1)
    assert max(seconds_0, seconds_1) < TIMEOUT_SECONDS
    assert len(said_1) == 1, "the rank that did not poll says it"
    assert steps == [3, 2]


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G6")
def test_what_fails_on_one_rank_in_staging_is_heard_on_all_at_the_next_call(play: Play) -> None:
    seen = play("assets_that_cannot_be_staged")
    error = the_same_error([error for _, error, *_ in seen])
    assert error.rank == 0
    for returned, _, step, kinds, steps in seen:
        assert returned is None, "the other ranks could not know it yet"
        assert (step, steps) == (2, [2])
        assert kinds.count("failed") == 1


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("slow", [0, 1])
def test_a_disk_that_is_slow_on_one_rank_ends_in_the_same_way_on_all(slow: int, play: Play) -> None:
    """Committed on all, or failed on all: what is slow on the leader must not be a failure for the others alone."""
    (error_0, steps_0), (error_1, steps_1) = [of_rank[slow] for of_rank in play("a_disk_that_is_slow_on_one_rank")]
    assert (error_0 is None) == (error_1 is None), (error_0, error_1)
    assert steps_0 == steps_1 == ([1] if error_0 is None else [])


def test_state_dicts_saved_by_two_ranks_are_read_back_by_dcp(play: Play) -> None:
    assert play("state_dicts_that_dcp_reads_back") == [([True, True], [True, True])] * 2


# Death


def save_and_die(rank: int, run: Path, notes: Path) -> None:
    """Save once; then every trainer is killed right after a save returned, when no writer has begun to write it."""
    manager = manager_of(run, {"model": holdfast.Shared(holder := large_model(1))}, timeout=DEATH_TIMEOUT_SECONDS)
    manager.save(1, wait=True)
    holder.state = large_model(2).state
    note(notes, f"writer-{rank}", own_writer())
    stop(own_writer())
    manager.save(2)
    meet("saved")
    die()


def restore_and_compare(rank: int, run: Path, step: int) -> bool:
    """Whether a new start finds that step as it was; then it goes on."""
    holder = large_model(0)
    with manager_of(run, {"model": holdfast.Shared(holder)}) as manager:
        assert manager.restore().step == step
        same = bits(holder.state) == bits(large_model(step).state)
        manager.save(3)
    return same


@pytest.mark.guarantee("G1")
def test_all_trainers_are_killed_right_after_a_save_and_the_writers_commit_it(tmp_path: Path) -> None:
    run, notes = tmp_path / "run", tmp_path / "notes"
    outcomes = run_ranks(2, save_and_die, run, notes)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2, outcomes
    assert steps_of(run) == [1]
    writers = [noted(notes, f"writer-{rank}") for rank in (0, 1)]
    for writer in reversed(writers):
        os.kill(writer, signal.SIGCONT)
    wait_for(lambda: steps_of(run) == [2, 1])
    assert holdfast.verify(run, 2).ok
    wait_for(lambda: all(map(is_gone, writers)))
    assert not list(run.rglob("*.receipt.json"))
    assert values(run_ranks(2, restore_and_compare, run, 2)) == [True, True]


class Deadly(Holder):
    """A component in whose `state_dict` the process dies, while `armed`."""

    armed = False

    def state_dict(self) -> dict[str, Any]:
        if self.armed:
            die()
        return super().state_dict()


def die_before_all_is_staged(rank: int, run: Path, notes: Path, moment: str) -> tuple[Any, float]:
    """Rank 1 dies in a save before it has staged anything: when it is captured, or after the ranks agreed."""

    def on_event(event: holdfast.Event) -> None:
        if rank == 1 and event.step == 2 and event.kind == moment:
            die()

    mine = Deadly(a=rank)
    state = {"model": holdfast.Shared(large_model(1)), "mine": holdfast.PerRank(mine)}
    manager = manager_of(run, state, timeout=DEATH_TIMEOUT_SECONDS, on_event=on_event)
    manager.save(1, wait=True)
    note(notes, f"writer-{rank}", own_writer())
    mine.armed = rank == 1 and moment == "capture"
    start = time.monotonic()
    error = caught(lambda: manager.save(2))
    seconds = time.monotonic() - start
    if moment != "capture":
        die()
    return error, seconds


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("moment", ["started", *if_deep("capture")])
def test_trainers_that_are_killed_before_all_is_staged_commit_nothing_and_nothing_hangs(
    moment: str, tmp_path: Path
) -> None:
    run, notes = tmp_path / "run", tmp_path / "notes"
    leader, follower = run_ranks(2, die_before_all_is_staged, run, notes, moment)
    assert follower.exit_code == -signal.SIGKILL
    if moment == "capture":
        error, seconds = leader.unwrap()
        assert isinstance(error, RankError)
        assert error.ranks == (1,)
        assert seconds < DEATH_TIMEOUT_SECONDS + 60
    else:
        assert leader.exit_code == -signal.SIGKILL
    writers = [noted(notes, f"writer-{rank}") for rank in (0, 1)]
    wait_for(lambda: all(map(is_gone, writers)), DEATH_TIMEOUT_SECONDS + 50)
    assert steps_of(run) == [1]
    assert holdfast.verify(run).ok
    assert not list((run / "step-000000002").glob("*")), "nothing of it is left"
    assert holdfast.resolve(run).step == 1


def die_after_staging_while_the_other_lives(rank: int, run: Path, notes: Path, victim: int) -> Any:
    """One trainer is killed after its save returned, before its writer has begun; the other one goes on."""
    manager = manager_of(run, {"model": holdfast.Shared(holder := large_model(1))}, timeout=DEATH_TIMEOUT_SECONDS)
    manager.save(1, wait=True)
    holder.state = large_model(2).state
    note(notes, f"writer-{rank}", own_writer())
    note(notes, f"trainer-{rank}", os.getpid())
    if rank == victim:
        stop(own_writer())
    meet("stopped")
    handle = manager.save(2)
    meet("saved")
    if rank == victim:
        die()
    wait_for(lambda: is_gone(noted(notes, f"trainer-{victim}")))
    os.kill(noted(notes, f"writer-{victim}"), signal.SIGCONT)
    start = time.monotonic()
    return caught(handle.wait), time.monotonic() - start


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("victim", [0, *if_deep(1)])
def test_a_trainer_that_is_killed_after_staging_loses_nothing_though_the_other_lives(
    victim: int, tmp_path: Path
) -> None:
    run, notes = tmp_path / "run", tmp_path / "notes"
    outcomes = run_ranks(2, die_after_staging_while_the_other_lives, run, notes, victim)
    assert outcomes[victim].exit_code == -signal.SIGKILL
    outcome, seconds = outcomes[1 - victim].unwrap()
    if victim == 0 and outcome is not None:
        # Only where the leader's writer needs longer than the follower waits for the leader.
        assert isinstance(outcome, RankError), outcome
        assert outcome.ranks == (victim,)
        assert "not committed so far, and may still be" in str(outcome)
    else:
        assert outcome is None, "the leader's writer found all parts"
    assert seconds < 2 * DEATH_TIMEOUT_SECONDS + GRACE_SECONDS + 60
    wait_for(lambda: all(is_gone(noted(notes, f"writer-{rank}")) for rank in (0, 1)))
    assert steps_of(run) == [2, 1], "the writers wrote it, and the leader's committed it"
    for step in steps_of(run):
        assert holdfast.verify(run, step).ok
    assert values(run_ranks(2, restore_and_compare, run, steps_of(run)[0])) == [True, True]
    assert steps_of(run)[0] == 3


class EndsAfterCommit(LocalStorage):
    """A disk of a leader whose process gets a signal right after its second commit, before it can answer anybody."""

    signal_number = signal.SIGKILL

    @property
    def features(self) -> StorageFeatures:
        features = super().features
        assert features.links is not None
        return dataclasses.replace(features, links=EndingLinks(features.links, self.signal_number))


@dataclasses.dataclass
class EndingLinks:
    inner: Links
    signal_number: int

    def point(self, name: str, target: str) -> None:
        self.inner.point(name, target)
        if target == "step-000000002":
            os.kill(os.getpid(), self.signal_number)
            signal.pause()

    def remove(self, name: str) -> None:
        self.inner.remove(name)

    def targets(self) -> dict[str, str]:
        return self.inner.targets()


def leader_that_ends_after_its_commit(rank: int, run: Path, notes: Path, mode: str, end: int, hosted: bool) -> Any:
    if hosted:
        dist.init_process_group("gloo")
    storage = EndsAfterCommit(run) if rank == 0 else LocalStorage(run)
    storage.signal_number = end
    note(notes, f"trainer-{rank}", os.getpid())
    state = {"model": holdfast.Shared(sharded_model(1))}
    manager = manager_of(run, state, storage=storage, mode=mode, timeout=DEATH_TIMEOUT_SECONDS)
    manager.save(1, wait=True)
    error = caught(lambda: manager.save(2, wait=True))
    kinds = [event.kind for event in manager.events if event.step == 2]
    if rank == 1:
        with suppress(ProcessLookupError):  # it ended, and was not only stopped
            os.kill(noted(notes, "trainer-0"), signal.SIGKILL)
    return error, kinds


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize(
    ("mode", "end", "hosted"),
    [
        ("async", signal.SIGKILL, True),
        *if_deep(("sync", signal.SIGKILL, True), ("sync", signal.SIGSTOP, False), ("async", signal.SIGKILL, False)),
    ],
    ids=lambda value: {True: "the store ends with it", False: "the store stays"}.get(value, str(value)),
)
def test_a_leader_that_ends_right_after_its_commit_leaves_a_committed_save_to_the_others(
    mode: str, end: int, hosted: bool, tmp_path: Path
) -> None:
    backend = None if hosted else "gloo"
    arguments = (tmp_path / "run", tmp_path / "notes", mode, end, hosted)
    leader, follower = run_ranks(2, leader_that_ends_after_its_commit, *arguments, backend=backend)
    assert leader.exit_code == -signal.SIGKILL
    error, kinds = follower.unwrap()
    assert error is None, "the checkpoint is there, and the other rank looked"
    assert "committed" in kinds
    assert "failed" not in kinds
    assert steps_of(tmp_path / "run") == [2, 1]


class EndsBeforeCommit(LocalStorage):
    """A disk of a leader whose process is killed right before its second commit."""

    def put(self, key: str, data: bytes) -> None:
        if key == "step-000000002/manifest.json":
            die()
        super().put(key, data)


def leader_that_ends_before_its_commit(rank: int, run: Path, mode: str) -> Any:
    dist.init_process_group("gloo")
    storage = EndsBeforeCommit(run) if rank == 0 else LocalStorage(run)
    state = {"model": holdfast.Shared(sharded_model(1))}
    # The store ends with the leader, so the other rank knows at once and needs no short time limit.
    manager = manager_of(run, state, storage=storage, mode=mode)
    manager.save(1, wait=True)
    return caught(lambda: manager.save(2, wait=True))


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_leader_that_ends_before_its_commit_leaves_the_others_an_error_that_does_not_call_the_save_lost(
    mode: str, tmp_path: Path
) -> None:
    leader, follower = run_ranks(2, leader_that_ends_before_its_commit, tmp_path / "run", mode, backend=None)
    assert leader.exit_code == -signal.SIGKILL
    error = follower.unwrap()
    # A lost connection to the store names its host, as a leader that is silent is named.
    assert isinstance(error, RankError)
    assert error.ranks == (0,)
    assert error.step == 2
    assert "not committed so far, and may still be" in str(error)
    assert steps_of(tmp_path / "run") == [1]


def ranks_of_a_launcher_that_says_nothing(rank: int, run: Path) -> Any:
    """Start as under a launcher that sets no variable of torchrun's, save, and see what is known then."""
    del os.environ["LOCAL_WORLD_SIZE"]
    before = ranks_here()
    with manager_of(run, {"model": holdfast.Shared(sharded_model(1))}) as manager:
        manager.save(1, wait=True)
        variables = Path(f"/proc/{own_writer()}/environ").read_bytes().split(b"\0")
    return before, ranks_here(), [text for text in variables if text.startswith(b"LOCAL_WORLD_SIZE")]


def test_ranks_on_one_machine_count_each_other_where_the_launcher_does_not_say_how_many_they_are(
    tmp_path: Path,
) -> None:
    for before, after, of_writer in values(run_ranks(2, ranks_of_a_launcher_that_says_nothing, tmp_path)):
        assert (before, after) == (1, 2)
        assert of_writer == [b"LOCAL_WORLD_SIZE=2"]


# The end of the group


def close_without_the_group(rank: int, run: Path, hosted: bool) -> Any:
    """The process group is taken down while a save is under way, as scripts do that close last."""
    if hosted:
        dist.init_process_group("gloo")
    manager = manager_of(run, {"model": holdfast.Shared(sharded_model(1))}, timeout=DEATH_TIMEOUT_SECONDS)
    manager.save(1, wait=True)
    writer = own_writer()
    stop(writer)
    manager.save(2)
    dist.destroy_process_group()
    os.kill(writer, signal.SIGCONT)
    start = time.monotonic()
    error = caught(manager.close)
    return error, time.monotonic() - start


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("hosted", [False, True], ids=["the launcher has the store", "rank 0 has the store"])
def test_a_group_that_is_destroyed_before_close_costs_no_save(hosted: bool, tmp_path: Path) -> None:
    backend = None if hosted else "gloo"
    outcomes: list[Outcome] = run_ranks(2, close_without_the_group, tmp_path, hosted, backend=backend)
    for error, seconds in values(outcomes):
        assert error is None
        assert seconds < TIMEOUT_SECONDS
    assert steps_of(tmp_path) == [2, 1]
    assert holdfast.verify(tmp_path).ok


SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist, holdfast
sys.path.insert(0, sys.argv[2])
from tests.distributed.test_async_ranks import large_model, own_writer, stop

dist.init_process_group("gloo")
run, rank = Path(sys.argv[1]), dist.get_rank()
holder = large_model(1)
manager = holdfast.CheckpointManager(run / "run", {"model": holdfast.Shared(holder)}, mode="async", rng=False)
manager.save(1, wait=True)
holder.state = large_model(2).state
writer = own_writer()
stop(writer)
manager.save(2)
(run / f"{rank}.tmp").write_text(json.dumps([os.getpid(), writer]))
(run / f"{rank}.tmp").rename(run / f"{rank}.json")
while True:
    time.sleep(1)
"""


@pytest.mark.guarantee("G1")
def test_torchrun_that_is_told_to_end_right_after_a_save_loses_nothing(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    (tmp_path / "train.py").write_text(textwrap.dedent(SCRIPT))
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(
            [sys.executable, *launch, str(tmp_path / "train.py"), str(tmp_path), str(root)],
            stdout=log,
            stderr=log,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    try:
        wait_for(lambda: all((tmp_path / f"{rank}.json").exists() for rank in (0, 1)) or launcher.poll() is not None)
        assert launcher.poll() is None, (tmp_path / "log").read_text()
        trainers, writers = zip(*(json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)), strict=True)
        launcher.send_signal(signal.SIGTERM)
        launcher.wait(90)
    finally:
        launcher.kill()
        launcher.wait()
    assert all(map(is_gone, trainers))
    assert not any(map(is_gone, writers)), "who ends the training's processes does not end these"
    for writer in writers:
        os.kill(writer, signal.SIGCONT)
    wait_for(lambda: steps_of(tmp_path / "run") == [2, 1])
    assert holdfast.verify(tmp_path / "run").ok
    wait_for(lambda: all(map(is_gone, writers)))
