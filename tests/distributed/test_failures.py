"""What goes wrong on one rank goes wrong on all, in the same way and in bounded time, and costs nothing older."""

from __future__ import annotations

import errno
import itertools
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import holdfast
from holdfast.errors import (
    CorruptCheckpointError,
    RankError,
    SaveFailedError,
    StateMismatchError,
    StorageError,
    UsageError,
)
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import values
from tests.distributed.scenes import Holder, Play, bits, caught, hash_tree, meet, run_scenes, the_same_error
from tests.ranks import run_ranks

# Far more than anything here takes on a busy machine: what is known at once must not need it.
TIMEOUT_SECONDS = 200.0
# Where a rank is dead and the others must notice; long enough for a slow machine to bring the living ones there.
DEATH_TIMEOUT_SECONDS = 10.0
# Followers wait this much longer than the leader, so that its word can reach them.
GRACE_SECONDS = 5.0


class FailingStorage(LocalStorage):
    """A disk on which one operation on keys that end in a suffix fails, while `armed`."""

    def __init__(self, root: Path, operation: str, suffix: str = "") -> None:
        super().__init__(root)
        self.operation, self.suffix, self.armed = operation, suffix, False

    def create(self, key: str, size_bytes: int) -> Any:
        self._strike("create", key)
        return _FailingSink(self, key, super().create(key, size_bytes))

    def sync(self, folder: str) -> None:
        self._strike("sync", folder)
        super().sync(folder)

    def put(self, key: str, data: bytes) -> None:
        self._strike("put", key)
        super().put(key, data)

    def _strike(self, operation: str, key: str) -> None:
        if self.armed and operation == self.operation and key.endswith(self.suffix):
            self.fail(key)

    def fail(self, key: str) -> None:
        raise StorageError("no room for it [ENOSPC]", errno=errno.ENOSPC, file=key)


class _FailingSink:
    def __init__(self, storage: FailingStorage, key: str, sink: Any) -> None:
        self.storage, self.key, self.sink = storage, key, sink

    def write(self, data: Any) -> None:
        self.storage._strike("write", self.key)
        self.sink.write(data)

    def __enter__(self) -> _FailingSink:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None:
            self.storage._strike("close", self.key)
        self.sink.__exit__(kind, error, trace)


class RemovingStorage(LocalStorage):
    """A storage of which the tensors of one rank are removed, or cut short, when that rank has looked at them."""

    doomed = harm = ""

    def _stamp(self, key: str) -> tuple[int, str]:
        found = super()._stamp(key)
        if self.doomed and key.startswith(self.doomed) and key.endswith(".safetensors"):
            path, self.doomed = Path(self.url) / key, ""
            if self.harm == "removed":
                path.unlink()
            else:
                os.truncate(path, 100)
        return found


class DeadlyStorage(FailingStorage):
    """A disk at which the process dies, as the out-of-memory killer would have it."""

    def fail(self, key: str) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def sharded_model(seed: int) -> Holder:
    """A component of which each rank holds, reads and writes its own half."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.arange(4096, dtype=torch.float32).reshape(64, 64) + seed
    return Holder(weight=distribute_tensor(whole, mesh, [Shard(0)]), plain=torch.full((3,), float(seed)))


def manager_of(run: Path, state: dict[str, Any], **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, state, rng=False, **{"timeout": TIMEOUT_SECONDS, "mode": "sync", **options})


# Failing writes


def checkpoints_of(run: Path) -> dict[str, str]:
    """What is in a run, but for who writes and reads: signs of life come and go."""
    return {name: digest for name, digest in hash_tree(run).items() if not name.startswith(("lease", "readers"))}


def writes_that_fail_on_one_rank(rank: int, folder: Path) -> dict[tuple[int, str], Any]:
    """An older checkpoint, then a save that fails on one rank, then the same save again; for every kind of failure."""
    seen = {}
    cases = [(failing, operation) for failing in (0, 1) for operation in ("create", "write", "close", "sync")]
    for failing, operation in cases:
        run = folder / f"{failing}-{operation}"
        storage = FailingStorage(run, operation)
        holder = sharded_model(0)
        manager = manager_of(run, {"model": holdfast.Shared(holder)}, storage=storage)
        manager.save(1)
        holder.state = sharded_model(7).state
        before = checkpoints_of(run)
        meet(f"{run} before")
        storage.armed = rank == failing
        start = time.monotonic()
        error = caught(lambda manager=manager: manager.save(2))
        seconds = time.monotonic() - start
        meet(f"{run} after")
        after = checkpoints_of(run)
        sound = holdfast.verify(run, "latest").ok
        meet(f"{run} looked at")
        storage.armed = False
        again = manager.save(2)
        checkpoint = again.wait()
        seen[failing, operation] = (error, seconds, before == after, sound, checkpoint.step, checkpoint.folder)
        holder.state = sharded_model(99).state
        manager.restore()
        assert bits(holder.state) == bits(sharded_model(7).state)
        assert holdfast.verify(run).ok
    return seen


def commits_that_fail_on_the_leader(rank: int, folder: Path) -> Any:
    storage = FailingStorage(folder, "put", "manifest.json")
    manager = manager_of(folder, {"model": holdfast.Shared(sharded_model(0))}, storage=storage)
    manager.save(1)
    storage.armed = True
    error = caught(lambda: manager.save(2))
    storage.armed = False
    steps = [checkpoint.step for checkpoint in manager.checkpoints()]
    meet("commits")
    manager.save(2)
    return error, steps, manager.restore().step


# Failing components


def files_that_go_on_one_rank(rank: int, folder: Path) -> dict[tuple[str, str], Any]:
    """Save once, then with files of rank 1 that go before the commit, then once more, in a run for each way."""
    found = {}
    for mode, harm in itertools.product(("sync", "async"), ("removed", "cut short")):
        run = folder / f"{mode} {harm}"
        storage = RemovingStorage(run)
        storage.harm = harm
        with manager_of(
            run, {"model": holdfast.Shared(sharded_model(1))}, storage=storage, mode=mode, keep=holdfast.KeepLast(1)
        ) as manager:
            manager.save(1, wait=True)
            storage.doomed = "step-000000002/rank-00001" if rank == 1 else ""
            error = caught(lambda manager=manager: manager.save(2, wait=True))
            steps = [checkpoint.step for checkpoint in manager.checkpoints()]
            manager.save(3, wait=True)
        found[mode, harm] = error, steps
    return found


class FailingComponent(Holder):
    def state_dict(self) -> dict[str, Any]:
        raise ZeroDivisionError("in the user's own state_dict")


def a_state_dict_that_raises_on_one_rank(rank: int, folder: Path) -> list[Any]:
    errors = []
    for failing in (0, 1):
        run = folder / str(failing)
        manager_of(run, {"tracker": Holder(a=1)}).save(1)
        meet(f"{run} saved")
        before = hash_tree(run)
        meet(f"{run} hashed")
        tracker = FailingComponent() if rank == failing else Holder(a=1)
        manager = manager_of(run, {"tracker": tracker})
        errors.append(caught(lambda manager=manager: manager.save(2)))
        assert hash_tree(run) == before
        meet(f"{run} done")
        manager_of(run, {"tracker": Holder(a=3)}).save(2)
    return errors


class Strange:
    pass


class FickleComponent(Holder):
    fails = False

    def state_dict(self) -> dict[str, Any]:
        if self.fails:
            raise ZeroDivisionError("in the user's own state_dict")
        return super().state_dict()


class JointComponent(Holder):
    """Its state is made by all ranks together."""

    def state_dict(self) -> dict[str, Any]:
        dist.barrier()
        return super().state_dict()


def a_state_dict_that_raises_on_one_rank_before_others_meet(rank: int, folder: Path) -> list[Any]:
    """Save with a first component that raises on rank 1, and a second one that calls a collective."""
    failing = FickleComponent(a=1)
    with manager_of(folder / "run", {"failing": failing, "joint": JointComponent(b=2)}) as manager:
        manager.save(1)
        failing.fails = rank == 1
        error = caught(lambda: manager.save(2))
        failing.fails = False
        manager.save(3)
        return [error, [checkpoint.step for checkpoint in manager.checkpoints()]]


def a_type_outside_the_codec_on_one_rank(rank: int, folder: Path) -> list[Any]:
    errors = []
    for failing in (0, 1):
        run = folder / str(failing)
        manager_of(run, {"tracker": Holder(a=1)}).save(1)
        meet(f"{run} saved")
        before = hash_tree(run)
        meet(f"{run} hashed")
        state = {"sampler": {"items": [1, Strange() if rank == failing else 2]}}
        manager = manager_of(run, {"tracker": Holder(**state)})
        errors.append(caught(lambda manager=manager: manager.save(2)))
        meet(f"{run} failed")
        assert hash_tree(run) == before, "no file may be touched"
    return errors


def a_load_state_dict_that_raises_on_one_rank(rank: int, folder: Path) -> Any:
    class Refusing(Holder):
        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise ZeroDivisionError("not today")

    torch.manual_seed(0)
    model = nn.Linear(3, 3)
    state = {"tracker": Holder(a=1), "model": model}
    manager_of(folder, state).save(1)
    with torch.no_grad():
        model.weight.add_(1)
    live = bits(model.state_dict())
    state["tracker"] = Refusing(a=1) if rank == 1 else Holder(a=1)
    error = caught(lambda: manager_of(folder, state).restore())
    return error, bits(model.state_dict()) == live


# Restores


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


def damage_that_one_rank_reads(rank: int, folder: Path) -> Any:
    """The other rank's part is sound, so only one of them can see it."""
    seen = []
    for damaged in (0, 1):
        run = folder / str(damaged)
        holder = sharded_model(1)
        manager = manager_of(run, {"model": holdfast.Shared(holder)})
        manager.save(1)
        holder.state = sharded_model(2).state
        manager.save(2)
        name = f"rank-{damaged:05d}.safetensors"
        if rank == 0:
            record = next(file for file in holdfast.resolve(run).manifest.files if file.name == name)
            flip(run / "step-000000002" / name, record.header_bytes + 5000)
        meet(f"{run} damaged")
        holder.state = sharded_model(3).state
        live = bits(holder.state)
        manager = manager_of(run, {"model": holdfast.Shared(holder)})
        error = caught(lambda manager=manager: manager.restore(2))
        assert bits(holder.state) == live, "an error changes nothing"
        result = manager.restore()
        assert bits(holder.state) == bits(sharded_model(1).state)
        seen.append((name, error, result.step, result.next_step, result.rejected))
    return seen


def a_shape_that_differs_on_one_rank(rank: int, folder: Path) -> Any:
    seen = []
    for odd in (0, 1):
        run = folder / str(odd)
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = {"model": model, "optimizer": optimizer, "tracker": Holder(a=1)}
        manager_of(run, state).save(1)
        other = nn.Linear(4, 5 if rank == odd else 3)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.7)
        state = {"model": other, "optimizer": optimizer, "tracker": Holder(a=2)}
        before = bits([other.state_dict(), optimizer.state_dict(), state["tracker"].state])
        error = caught(lambda run=run, state=state: manager_of(run, state).restore())
        after = bits([other.state_dict(), optimizer.state_dict(), state["tracker"].state])
        seen.append((error, before == after))
    return seen


# Ranks that do not do the same


def one_saves_while_the_other_restores(rank: int, folder: Path) -> Any:
    errors = []
    for saving in (0, 1):
        manager = manager_of(folder / str(saving), {"tracker": Holder(a=1)})
        start = time.monotonic()
        errors.append(caught((lambda m=manager: m.save(1)) if rank == saving else (lambda m=manager: m.restore())))
        assert time.monotonic() - start < TIMEOUT_SECONDS, "it is known at once"
        manager.save(5)
        assert manager.restore().step == 5
    return errors


def ranks_save_different_steps(rank: int, folder: Path) -> Any:
    manager = manager_of(folder, {"tracker": Holder(a=1)})
    error = caught(lambda: manager.save(1 + rank))
    meet("different steps")
    return error, [checkpoint.step for checkpoint in manager.checkpoints()]


def ranks_build_managers_in_another_order(rank: int, folder: Path) -> Any:
    runs = [folder / "one", folder / "two"]
    errors = []
    for run in runs if rank == 0 else reversed(runs):
        errors.append(caught(lambda run=run: manager_of(run, {"tracker": Holder(a=rank)}).save(1)))
    meet("both orders")
    return errors, [holdfast.verify(run).ok for run in runs if holdfast.is_restart(run)]


def arguments_that_are_wrong_on_one_rank(rank: int, folder: Path) -> Any:
    manager = manager_of(folder, {"tracker": Holder(a=1)})
    start = time.monotonic()
    error = caught(lambda: manager.save(1, extra={"value": Strange() if rank == 1 else 1}))
    return error, time.monotonic() - start


SCENES = [
    writes_that_fail_on_one_rank,
    commits_that_fail_on_the_leader,
    files_that_go_on_one_rank,
    a_state_dict_that_raises_on_one_rank,
    a_state_dict_that_raises_on_one_rank_before_others_meet,
    a_type_outside_the_codec_on_one_rank,
    a_load_state_dict_that_raises_on_one_rank,
    damage_that_one_rank_reads,
    a_shape_that_differs_on_one_rank,
    one_saves_while_the_other_restores,
    ranks_save_different_steps,
    ranks_build_managers_in_another_order,
    arguments_that_are_wrong_on_one_rank,
]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    return run_scenes(2, SCENES, tmp_path_factory.mktemp("failures"))


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G6")
def test_a_write_that_fails_on_one_rank_fails_on_all_and_costs_nothing(play: Play) -> None:
    seen = play("writes_that_fail_on_one_rank")
    assert len(seen[0]) == 8
    for case in seen[0]:
        failing = case[0]
        error = the_same_error([of_rank[case][0] for of_rank in seen])
        assert isinstance(error, StorageError), case
        assert isinstance(error, OSError)
        assert (error.errno, error.rank, error.step) == (errno.ENOSPC, failing, 2), case
        for _, seconds, as_before, sound, step, _ in (of_rank[case] for of_rank in seen):
            assert seconds < TIMEOUT_SECONDS, f"{case}: nobody waits for the time limit"
            assert as_before, f"{case}: the older checkpoint is untouched, the attempt's files are gone"
            assert sound, case
            assert step == 2, f"{case}: the next save works"


@pytest.mark.guarantee("G6")
def test_a_commit_that_fails_is_an_error_on_all_and_the_next_works(play: Play) -> None:
    seen = play("commits_that_fail_on_the_leader")
    error = the_same_error([error for error, _, _ in seen])
    assert isinstance(error, StorageError)
    assert [(steps, restored) for _, steps, restored in seen] == [([1], 2)] * 2


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G4")
@pytest.mark.guarantee("G6")
def test_files_of_any_rank_that_go_before_the_commit_fail_the_save_and_cost_no_checkpoint(play: Play) -> None:
    of_ranks = play("files_that_go_on_one_rank")
    for way in of_ranks[0]:
        error = the_same_error([found[way][0] for found in of_ranks])
        assert isinstance(error, SaveFailedError), error
        assert "rank-00001.safetensors of rank 1" in str(error), way
        assert [found[way][1] for found in of_ranks] == [[1], [1]], way


@pytest.mark.guarantee("G5")
def test_a_state_dict_that_raises_on_one_rank_fails_the_save_on_all_before_a_file_is_touched(play: Play) -> None:
    for failing, errors in enumerate(zip(*play("a_state_dict_that_raises_on_one_rank"), strict=True)):
        error = the_same_error(errors)
        assert isinstance(error, SaveFailedError)
        assert "ZeroDivisionError" in error.problem
        assert "in the user's own state_dict" in error.problem
        assert (error.rank, error.step) == (failing, 2)


@pytest.mark.guarantee("G5")
def test_a_state_dict_that_raises_before_others_meet_leaves_no_rank_waiting(play: Play) -> None:
    seen = play("a_state_dict_that_raises_on_one_rank_before_others_meet")
    assert the_same_error([error for error, _ in seen]).rank == 1
    assert [steps for _, steps in seen] == [[3, 1]] * 2


@pytest.mark.guarantee("G5")
def test_a_type_outside_the_codec_on_one_rank_is_named_on_all_and_no_file_is_touched(play: Play) -> None:
    for failing, errors in enumerate(zip(*play("a_type_outside_the_codec_on_one_rank"), strict=True)):
        error = the_same_error(errors)
        assert isinstance(error, UsageError)
        assert (error.rank, error.step) == (failing, 2)
        assert "tracker.sampler.items" in str(error)
        assert "Strange" in str(error)


def test_a_load_state_dict_that_raises_on_one_rank_is_an_error_on_all(play: Play) -> None:
    seen = play("a_load_state_dict_that_raises_on_one_rank")
    error = the_same_error([error for error, _ in seen])
    assert isinstance(error, StateMismatchError)
    assert (error.rank, error.component) == (1, "tracker")
    assert seen[1][1], "where it failed, no tensor was changed"


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G5")
def test_damage_that_only_one_rank_reads_is_damage_for_all(play: Play) -> None:
    for cases in zip(*play("damage_that_one_rank_reads"), strict=True):
        error = the_same_error([error for _, error, *_ in cases])
        assert isinstance(error, CorruptCheckpointError)
        name = cases[0][0]
        assert any(name in problem and "weight" in problem for problem in error.problems), error
        for _, _, step, next_step, rejected in cases:
            assert (step, next_step) == (1, 2), "all fall back together"
            assert len(rejected) == 1
            assert "step-000000002" in rejected[0]
            assert name in rejected[0]
        assert len({case[4] for case in cases}) == 1


@pytest.mark.guarantee("G7")
@pytest.mark.guarantee("G5")
def test_a_shape_that_differs_on_one_rank_is_an_error_on_all_and_changes_nothing(play: Play) -> None:
    for cases in zip(*play("a_shape_that_differs_on_one_rank"), strict=True):
        error = the_same_error([error for error, _ in cases])
        assert isinstance(error, StateMismatchError)
        assert any("model.weight" in text and "[5, 4]" in text for text in error.mismatched)
        assert all(unchanged for _, unchanged in cases)


@pytest.mark.guarantee("G5")
def test_a_rank_that_saves_while_another_restores_is_told_so_on_both(play: Play) -> None:
    for errors in zip(*play("one_saves_while_the_other_restores"), strict=True):
        assert [type(error) for error in errors] == [RankError, RankError]
        # Who saves says the step, too.
        assert len({(error.problem, error.ranks) for error in errors}) == 1
        assert "'save of step 1'" in errors[0].problem
        assert "'restore'" in errors[0].problem


@pytest.mark.guarantee("G5")
def test_ranks_that_save_different_steps_are_told_so_and_nothing_is_committed(play: Play) -> None:
    seen = play("ranks_save_different_steps")
    assert [type(error) for error, _ in seen] == [RankError, RankError]
    # Each says its own step.
    assert {error.problem for error, _ in seen} == {"rank 1 is in 'save of step 2' while rank 0 is in 'save of step 1'"}
    assert [steps for _, steps in seen] == [[], []]


@pytest.mark.guarantee("G5")
def test_managers_that_are_built_in_another_order_never_share_a_checkpoint(play: Play) -> None:
    seen = play("ranks_build_managers_in_another_order")
    for errors, sound in seen:
        assert all(isinstance(error, RankError | UsageError) for error in errors), errors
        assert all(sound)


@pytest.mark.guarantee("G5")
def test_an_argument_that_is_wrong_on_one_rank_is_an_error_on_all(play: Play) -> None:
    seen = play("arguments_that_are_wrong_on_one_rank")
    error = the_same_error([error for error, _ in seen])
    assert isinstance(error, UsageError)
    assert "Strange" in str(error)
    assert max(seconds for _, seconds in seen) < TIMEOUT_SECONDS


# Death


def three_parts(value: float) -> nn.ParameterList:
    """The same on every rank; each of three ranks writes one of the parts."""
    return nn.ParameterList([nn.Parameter(torch.full((1000,), value + part)) for part in range(3)])


def die_while_saving(rank: int, run: Path, victim: int) -> tuple[Any, float]:
    """Save once; then one rank is killed in the middle of writing its part of the next."""
    storage = DeadlyStorage(run, "write", ".safetensors")
    model = three_parts(1.0)
    manager = manager_of(run, {"model": model}, storage=storage, timeout=DEATH_TIMEOUT_SECONDS)
    manager.save(1)
    with torch.no_grad():
        model[0].fill_(50.0)
    storage.armed = rank == victim
    start = time.monotonic()
    error = caught(lambda: manager.save(2))
    return error, time.monotonic() - start


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_killed_during_a_save_is_named_on_the_others_and_the_run_goes_on(
    victim: int, tmp_path: Path
) -> None:
    outcomes = run_ranks(3, die_while_saving, tmp_path, victim)
    killed = outcomes.pop(victim)
    assert killed.exit_code == -signal.SIGKILL
    error = the_same_error([outcome.unwrap()[0] for outcome in outcomes])
    assert isinstance(error, RankError)
    assert error.ranks == (victim,)
    for outcome in outcomes:
        assert outcome.value[1] < DEATH_TIMEOUT_SECONDS + GRACE_SECONDS + 60
    files = {file.name for file in holdfast.resolve(tmp_path).manifest.files}
    assert {f"rank-{rank:05d}.safetensors" for rank in range(3)} <= files, "every rank has a part"
    model = three_parts(99.0)
    with manager_of(tmp_path, {"model": model}) as manager:
        assert [checkpoint.step for checkpoint in manager.checkpoints()] == [1]
        result = manager.restore()
        assert (result.step, result.rejected) == (1, ("step-000000002: was never committed",))
        assert bits(model.state_dict()) == bits(three_parts(1.0).state_dict())
        assert manager.save(2).wait().folder == "step-000000002.2"
    assert holdfast.verify(tmp_path, 1).ok
    assert holdfast.verify(tmp_path, 2).ok


def save_to_a_disk_of_its_own(rank: int, folder: str, mode: Any) -> tuple[str, str, list[str]]:
    """The same path on every machine, and on each of them another disk: a storage that says the same of itself."""

    class Elsewhere(LocalStorage):
        @property
        def url(self) -> str:
            return "/the/same/path"

    torch.manual_seed(0)
    state = {"model": torch.nn.Linear(2, 2)}
    storage = Elsewhere(f"{folder}/{rank}")
    with holdfast.CheckpointManager("run", state, storage=storage, timeout=30, mode=mode) as manager:
        try:
            manager.save(1)
            manager.wait()
        except holdfast.HoldfastError as error:
            return type(error).__name__, str(error), [event.kind for event in manager.events]
    return "", "", []


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_ranks_whose_path_is_not_shared_are_told_so_before_anything_is_committed(mode: str, tmp_path: Path) -> None:
    first, second = values(run_ranks(2, save_to_a_disk_of_its_own, str(tmp_path), mode))
    assert first == second
    assert first[0] == "UsageError"
    assert "rank 1" in first[1]
    assert "run /the/same/path" in first[1]
    assert "on storage that all of them share" in first[1]
    assert not list(tmp_path.rglob("manifest.json"))
    assert "written" not in first[2]
    if mode == "async":
        assert not list(tmp_path.rglob("*.safetensors")), "nothing is written before all ranks see the same run"
