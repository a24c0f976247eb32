"""The life of a run on two real ranks: who stops it and when, who was killed in between, whose it is, who reads it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import holdfast
from holdfast import At, Every, KeepEvery, KeepLast, OnSignal, TimeLimit
from holdfast.errors import CheckpointNotFoundError, RankError, UsageError
from holdfast.runs.process_identity import seconds_since_birth
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import values
from tests.distributed.life import Life, is_said, net, said, say, wait_for, weights_of
from tests.distributed.scenes import Holder, Play, bits, caught, meet, run_scenes, the_same_error
from tests.distributed.test_async_ranks import die, is_gone, steps_of
from tests.distributed.test_failures import FailingStorage, sharded_model
from tests.ranks import run_ranks
from tests.sizes import some

ROOT = Path(__file__).parents[2]
# Far more than anything here takes on a busy machine.
TIMEOUT_SECONDS = 200.0
# Where a rank is dead, or ranks call different things, and the others must notice.
SHORT_TIMEOUT_SECONDS = 8.0
# Followers wait this much longer than the leader, so that its word can reach them.
GRACE_SECONDS = 5.0


def manager_of(run: Path | str, state: dict[str, Any], **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, state, rng=False, **{"timeout": TIMEOUT_SECONDS, "mode": "sync", **options})


def folders(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob("step-*"))


# Launchers


class Launcher:
    """One torchrun of two ranks, from outside."""

    def __init__(self, life: Life) -> None:
        self.notes = Path(life.notes)
        self.notes.mkdir(parents=True, exist_ok=True)
        self.log = self.notes / "log"
        launch = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.distributed.life"]
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *launch, life.text()],
                stdout=log,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def wait_until(self, *names: str) -> None:
        """Until all these were said, as long as the launcher lives."""
        wait_for(lambda: is_said(self.notes, *names) or self.process.poll() is not None)
        assert is_said(self.notes, *names), self.log.read_text()

    @property
    def trainers(self) -> list[int]:
        """The processes of the ranks, once they are at work."""
        return [said(self.notes, f"process-{rank}") for rank in (0, 1)]

    def kill(self) -> None:
        """End what is left of it, by its own numbers: the launcher and what it started."""
        children = _children(self.process.pid)
        self.process.kill()
        self.process.wait()
        for child in children:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        wait_for(lambda: all(map(is_gone, children)))


def _children(process: int) -> list[int]:
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{process}/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):
                found += map(int, (task / "children").read_text().split())
    return found


@contextmanager
def launched(life: Life) -> Iterator[Launcher]:
    launcher = Launcher(life)
    try:
        yield launcher
    finally:
        launcher.kill()


# Signals

STRUCK = ["the leader", "the other one", "all ranks", "the launcher", "the other one, and the ranks go their own pace"]


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("struck", some(STRUCK, 2))
def test_a_signal_saves_one_step_on_all_ranks_and_ends_the_training(struck: str, tmp_path: Path) -> None:
    """And again and again, as long as the save takes: nothing else happens by that."""
    life = Life(str(tmp_path / "run"), str(tmp_path / "notes"), together="own pace" not in struck)
    with launched(life) as launcher:
        launcher.wait_until("process-0", "process-1")
        targets = {"the leader": [0], "all ranks": [0, 1], "the launcher": [0, 1]}.get(struck, [1])
        if struck == "the launcher":
            launcher.process.send_signal(signal.SIGTERM)
            wait_for(lambda: is_said(life.notes, "stopped-0", "stopped-1") or launcher.process.poll() is not None)
        else:
            strike_until_stopped(launcher, [launcher.trainers[rank] for rank in targets])
        launcher.wait_until("stopped-0", "stopped-1")
        say(life.notes, "may-end", True)
        code = launcher.process.wait(300)
        trainers = launcher.trainers
    assert code == 0 or struck == "the launcher", launcher.log.read_text()
    ends = [said(life.notes, f"end-{rank}") for rank in (0, 1)]
    assert all(map(is_gone, trainers))
    step = ends[0]["stopped_at"]
    assert step is not None
    assert [end["stopped_at"] for end in ends] == [step, step]
    assert [end["handler"] for end in ends] == [True, True], "the handlers from before are back"
    assert [end["asked"] > 0 for end in ends] == [rank in targets for rank in (0, 1)], "and were called meanwhile"
    check_newest(tmp_path / "run", step, ends[0]["weights"])
    assert os.readlink(tmp_path / "run" / "latest") == f"step-{step:09d}"


def strike_until_stopped(launcher: Launcher, trainers: list[int]) -> None:
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not is_said(launcher.notes, "stopped-0", "stopped-1"):
        assert time.monotonic() < deadline, launcher.log.read_text()
        assert launcher.process.poll() is None, launcher.log.read_text()
        for trainer in trainers:
            with suppress(ProcessLookupError):
                os.kill(trainer, signal.SIGTERM)
        time.sleep(0.002)


def check_newest(run: Path, step: int, weights: list[float]) -> None:
    """The newest checkpoint is of that step, sound, and holds these weights."""
    assert steps_of(run)[0] == step
    assert holdfast.verify(run).ok
    model = net()
    for parameter in model.parameters():
        parameter.data.zero_()
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}
    with manager_of(run, state) as manager:
        start = manager.restore()
    assert (start.step, start.progress) == (step, {"seen": step})
    assert weights_of(model) == weights


def signals_to_one_rank_or_both(rank: int, folder: Path) -> Any:
    """In both modes; one that comes in the middle of the save too."""
    seen: list[Any] = []
    for struck in ([0], [1], [0, 1]):
        for mode in ("sync", "async"):
            run = folder / f"{struck}-{mode}"
            holder = Striking(weight=torch.zeros(7))
            before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
            trigger = Every(steps=1000) | OnSignal("SIGTERM")
            with manager_of(run, {"h": holdfast.Shared(holder)}, mode=mode, save=trigger) as manager:
                stopped_at = None
                for step in range(10_000):
                    meet_often(f"{run} {step}")
                    if step == 5 and rank in struck:
                        os.kill(os.getpid(), signal.SIGTERM)
                    holder.state["weight"].fill_(float(step))
                    if manager.step(step):
                        stopped_at = step
                        break
                pending, steps = manager.is_pending, steps_of(run)
            handler = signal.signal(signal.SIGTERM, before)
            seen.append((stopped_at, pending, steps, handler == signal.SIG_IGN, holdfast.verify(run).ok))
    return seen


class Striking(Holder):
    """A component in whose `state_dict` the process gets the signal again."""

    def state_dict(self) -> dict[str, Any]:
        os.kill(os.getpid(), signal.SIGTERM)
        return super().state_dict()


def meet_often(name: str) -> None:
    """What a step's exchange of gradients does for the pace of the ranks."""
    dist.barrier()


@pytest.mark.guarantee("G5")
def test_a_signal_in_the_middle_of_the_save_that_another_one_asked_for_changes_nothing(play: Play) -> None:
    cases = list(zip(*play("signals_to_one_rank_or_both"), strict=True))
    assert len(cases) == 6
    for ours, theirs in cases:
        assert ours == theirs
        stopped_at, pending, steps, handlers_are_back, sound = ours
        assert stopped_at >= 5
        assert (pending, steps, handlers_are_back, sound) == (False, [stopped_at], True, True)


def a_failure_that_nobody_heard_of_before_the_signal(rank: int, folder: Path) -> Any:
    """Behind the training, on rank 1 alone; the signal comes to rank 0. There is no other time to save this."""
    storage = FailingStorage(folder, "create", ".safetensors")
    state = {"model": holdfast.Shared(sharded_model(0))}
    trigger = At(2) | OnSignal("SIGTERM")
    before = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with manager_of(folder, state, mode="async", storage=storage, save=trigger) as manager:
        storage.armed = rank == 1
        manager.step(2)
        wait_for(lambda: not manager.is_pending)
        storage.armed = False
        if rank == 0:
            os.kill(os.getpid(), signal.SIGTERM)
        meet("struck")
        returned = manager.step(3)
        steps = steps_of(folder)
    signal.signal(signal.SIGTERM, before)
    failed = [event.step for event in manager.events if event.kind == "failed"]
    return returned, steps, failed


@pytest.mark.guarantee("G6")
def test_a_failure_that_nobody_heard_of_does_not_cost_the_last_save(play: Play) -> None:
    for returned, steps, failed in play("a_failure_that_nobody_heard_of_before_the_signal"):
        assert returned
        assert steps == [3]
        assert failed[0] == 2


# Time


class Held(LocalStorage):
    """A disk that holds a tensor file back until this process is so many seconds old."""

    until_seconds = 0.0

    def create(self, key: str, size_bytes: int) -> Any:
        if key.endswith(".safetensors"):
            wait_for(lambda: seconds_since_birth() > self.until_seconds)
        return super().create(key, size_bytes)


def a_time_limit_while_a_save_is_under_way(rank: int, folder: Path) -> Any:
    """The save of step 1 cannot end before the time is over: the leader's disk sees to that. On a busy machine the time
    may be over before the save begins, and more of it is needed."""
    outcome: Any = None
    for seconds in (2.0, 10.0, 50.0):
        outcome = run_into_a_time_limit(rank, folder / f"{seconds:.0f}", seconds)
        if outcome[0] > 1:
            break
    return outcome


def run_into_a_time_limit(rank: int, folder: Path, seconds: float) -> Any:
    storage = Held(folder)
    limit_seconds = seconds_since_birth() + seconds
    holder = Holder(weight=torch.zeros(7))
    with manager_of(
        folder,
        {"h": holdfast.Shared(holder)},
        mode="async",
        storage=storage,
        save=At(1) | TimeLimit(limit_seconds),
    ) as manager:
        storage.until_seconds = limit_seconds + 0.5 if rank == 0 else 0.0
        was_pending, returned = [], []
        for step in range(1, 1_000_000):
            holder.state["weight"].fill_(float(step))
            was_pending.append(manager.is_pending)
            returned.append(manager.step(step))
            if returned[-1]:
                break
            time.sleep(0.001)
        steps = steps_of(folder)
    return step, was_pending[-1], returned.count(True), steps, [holdfast.verify(folder, one).ok for one in steps]


@pytest.mark.guarantee("G6")
def test_a_time_limit_that_is_over_while_a_save_is_under_way_commits_both_and_stops_all(play: Play) -> None:
    ours, theirs = play("a_time_limit_while_a_save_is_under_way")
    assert ours == theirs
    step, was_pending, stops, steps, sound = ours
    assert step > 1
    assert was_pending
    assert stops == 1
    assert steps == [step, 1]
    assert sound == [True, True]


# The leader is gone


def die_between_two_steps(rank: int, run: Path) -> tuple[Any, float]:
    manager = manager_of(run, {"h": holdfast.Shared(Holder(a=1))}, save=Every(minutes=5), timeout=SHORT_TIMEOUT_SECONDS)
    for step in range(3):
        manager.step(step)
    if rank == 0:
        die()
    begin = time.monotonic()
    error = caught(lambda: [manager.step(step) for step in range(3, 1000)])
    return error, time.monotonic() - begin


@pytest.mark.guarantee("G5")
def test_a_leader_that_is_killed_between_two_steps_is_named_in_bounded_time(tmp_path: Path) -> None:
    leader, follower = run_ranks(2, die_between_two_steps, tmp_path)
    assert leader.exit_code == -signal.SIGKILL
    error, seconds = follower.unwrap()
    assert isinstance(error, RankError)
    assert error.ranks == (0,)
    assert seconds < SHORT_TIMEOUT_SECONDS + GRACE_SECONDS + 60


# Killed between the commit and the end of its housework


def process_of(rank: int) -> int:
    """The process of each rank, which all of them say when they start."""
    store = dist.distributed_c10d._get_default_store()
    return int(store.get(f"process of {rank}"))


def say_process(rank: int) -> None:
    dist.distributed_c10d._get_default_store().set(f"process of {rank}", str(os.getpid()))
    dist.barrier()


def kill_all() -> None:
    """All trainers, this one last."""
    os.kill(process_of(1), signal.SIGKILL)
    die()


def train_until_killed(rank: int, run: Path, mode: str, moment: str) -> None:
    """Save at every step and keep one; at step 3 all trainers are killed at that moment of the leader's."""
    say_process(rank)
    storage = Deadly(run) if moment != "committed" else None

    def on_event(event: holdfast.Event) -> None:
        if rank == 0 and event.step == 3 and event.kind == "committed":
            if storage is None:
                kill_all()
            storage.moment = moment  # type: ignore[union-attr]

    holder = sharded_model(0)
    manager = manager_of(
        run,
        {"model": holdfast.Shared(holder)},
        mode=mode,
        storage=storage,
        save=Every(steps=1),
        keep=KeepLast(1),
        on_event=on_event,
    )
    for step in (1, 2, 3):
        holder.state = sharded_model(step).state
        manager.step(step)
        if step == 2:
            manager.prune()
    # The removal is done beside the training: no further step may be committed before the trainers die of it.
    threading.Event().wait(60)
    raise AssertionError("still alive")


class Deadly(LocalStorage):
    """A disk at which all trainers die in the middle of the removal of step 2."""

    moment = ""
    deleted = 0

    def delete(self, key: str) -> None:
        super().delete(key)
        if self.moment and key.startswith("step-000000002/"):
            self.deleted += 1
            # The first is the manifest: from there on it is no checkpoint. Then come the bytes.
            if self.moment == "un-committed" or (self.moment == "half removed" and self.deleted == 3):
                kill_all()


def go_on(rank: int, run: Path) -> Any:
    """The next start: what it finds, and what is there when it has done its housework."""
    holder = sharded_model(99)
    with manager_of(run, {"model": holdfast.Shared(holder)}, save=Every(steps=1), keep=KeepLast(1)) as manager:
        start = manager.restore()
        same = bits(holder.state) == bits(sharded_model(3).state)
        manager.step(start.next_step)
    return start.step, same


MOMENTS = [("async", "committed"), ("sync", "committed"), ("sync", "un-committed"), ("sync", "half removed")]


@pytest.mark.guarantee("G1")
@pytest.mark.guarantee("G4")
@pytest.mark.parametrize(("mode", "moment"), some(MOMENTS, 2))
def test_trainers_that_are_killed_between_commit_and_removal_lose_nothing_and_leave_nothing(
    mode: str, moment: str, tmp_path: Path
) -> None:
    outcomes = run_ranks(2, train_until_killed, tmp_path, mode, moment)
    assert [outcome.exit_code for outcome in outcomes] == [-signal.SIGKILL] * 2, outcomes
    assert steps_of(tmp_path) == ([3, 2] if moment == "committed" else [3])
    assert "step-000000002" in folders(tmp_path), "its bytes, or what is left of them"
    assert all(holdfast.verify(tmp_path, step).ok for step in steps_of(tmp_path))
    assert values(run_ranks(2, go_on, tmp_path)) == [(3, True)] * 2
    assert folders(tmp_path) == ["step-000000004"]
    assert os.readlink(tmp_path / "latest") == "step-000000004"
    assert holdfast.verify(tmp_path).ok


# Whose run it is


def take_over(rank: int, run: Path) -> Any:
    begin = time.monotonic()
    model = net()
    state = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=1.0)}
    with manager_of(run, state, save=Every(steps=1)) as manager:
        seconds = time.monotonic() - begin
        start = manager.restore()
        manager.step(start.next_step)
    return start.step, seconds


@pytest.mark.guarantee("G5")
@pytest.mark.guarantee("G13")
def test_a_second_launcher_on_one_run_is_refused_on_all_its_ranks_until_the_first_is_gone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    first = Life(str(run), str(tmp_path / "first"), save_steps=20, signals=False)
    second = Life(str(run), str(tmp_path / "second"), signals=False)
    with launched(first) as trainer:
        trainer.wait_until("process-0", "process-1")
        wait_for(lambda: steps_of(run))
        with launched(second) as refused:
            assert refused.process.wait(300) != 0
            told = [said(second.notes, f"refused-{rank}") for rank in (0, 1)]
        assert trainer.process.poll() is None
        newest = steps_of(run)[0]
        wait_for(lambda: steps_of(run)[0] > newest + 40)
        leader = trainer.trainers[0]
        trainer.kill()
    for rank, error in enumerate(told):
        assert error["type"] == "RunInUseError", rank
        assert (error["fields"]["host"], error["fields"]["process"]) == (socket.gethostname(), leader)
        assert 0 <= error["fields"]["age_seconds"] < 60
        assert str(leader) in error["text"]
        assert error["seconds"] < 45, "its heartbeat is not waited for, which takes a minute"
    assert told[0]["text"] == told[1]["text"]
    newest = steps_of(run)[0]
    for step, seconds in values(run_ranks(2, take_over, run)):
        assert step >= newest, "what its writer still committed counts"
        assert seconds < 45, "this machine can see that it is dead: its heartbeat is not waited for"
    assert holdfast.verify(run).ok


# Who reads it


class Blocked(Holder):
    """A component that takes its state only when it may, and says that it is being given it."""

    def __init__(self, notes: Path, name: str, **state: Any) -> None:
        super().__init__(**state)
        self.notes, self.name = notes, name

    def load_state_dict(self, state: dict[str, Any]) -> None:
        say(self.notes, f"{self.name}-reads", os.getpid())
        wait_for(lambda: is_said(self.notes, f"{self.name}-may-go-on"))
        super().load_state_dict(state)


def read_slowly(run: Path, notes: Path, name: str, selector: int) -> None:
    """A process that has nothing to do with the training, such as an evaluation."""
    holder = Blocked(notes, name, weight=torch.zeros(64, 64), plain=torch.zeros(3))
    with manager_of(run, {"model": holdfast.Shared(holder)}) as manager:
        manager.restore(selector)
    say(notes, f"{name}-has-read", {key: value.tolist() for key, value in holder.state.items()})


def train_beside_readers(rank: int, run: Path, notes: Path) -> Any:
    holder = sharded_model(1)
    seen = []
    with manager_of(run, {"model": holdfast.Shared(holder)}, mode="async", keep=KeepLast(1)) as manager:
        for step, moment in ((1, "first-reads"), (2, "first-has-read"), (3, "second-reads"), (4, "second-is-dead")):
            holder.state = sharded_model(step).state
            manager.save(step, wait=True)
            manager.prune()
            meet(f"pruned {step}")
            seen.append(folders(run))
            if rank == 0:
                say(notes, f"saved-{step}", step)
            wait_for(lambda moment=moment: is_said(notes, moment))
            # In between nothing is saved: what the reader has left goes when the run is tidied up next.
            manager.prune()
            meet(f"pruned {step} again")
            seen.append(folders(run))
    return seen


@pytest.mark.guarantee("G4")
def test_what_a_reader_has_open_stays_until_it_is_done_or_dead(tmp_path: Path) -> None:
    run, notes = tmp_path / "run", tmp_path / "notes"
    readers = multiprocessing.get_context("spawn")
    first = readers.Process(target=read_slowly, args=(run, notes, "first", 1))
    second = readers.Process(target=read_slowly, args=(run, notes, "second", 3))
    outcomes: list[Any] = []

    def watch() -> None:
        """The readers' part, in step with the training."""
        wait_for(lambda: is_said(notes, "saved-1"))
        first.start()
        wait_for(lambda: is_said(notes, "saved-2"))
        say(notes, "first-may-go-on", True)
        wait_for(lambda: is_said(notes, "saved-3"))
        second.start()
        wait_for(lambda: is_said(notes, "saved-4"))
        os.kill(said(notes, "second-reads"), signal.SIGKILL)
        second.join(30)
        say(notes, "second-is-dead", True)

    watcher = _thread(watch, outcomes)
    trained = run_ranks(2, train_beside_readers, run, notes)
    watcher.join(30)
    first.join(30)
    assert outcomes == [None]
    one, two, three, four = (f"step-00000000{step}" for step in (1, 2, 3, 4))
    expected = [[one], [one], [one, two], [two], [three], [three], [three, four], [four]]
    assert values(trained) == [expected, expected]
    assert second.exitcode == -signal.SIGKILL
    read = said(notes, "first-has-read")
    weight = torch.arange(4096, dtype=torch.float32).reshape(64, 64) + 1
    assert read == {"weight": weight.tolist(), "plain": [1.0, 1.0, 1.0]}, "bit for bit"
    assert list((run / "readers").glob("*")) == []


def _thread(work: Any, outcomes: list[Any]) -> Any:
    import threading

    def run() -> None:
        try:
            outcomes.append(work())
        except BaseException as error:
            outcomes.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread


# Tiers, lines and damage


def two_tiers(rank: int, folder: Path) -> Any:
    """Rolling: every 2 steps, the last one stays. Persistent: every 6 steps, all stay."""
    seen = []
    for mode in ("sync", "async"):
        run = folder / mode
        holder = sharded_model(0)
        with manager_of(
            run,
            {"model": holdfast.Shared(holder)},
            mode=mode,
            save=Every(steps=2) | Every(steps=6),
            keep=KeepLast(1) | KeepEvery(steps=6),
        ) as manager:
            for step in range(15):
                manager.step(step)
            manager.wait()
        meet(f"{run} done")
        events = [(event.kind, event.step) for event in manager.events if event.kind in ("committed", "pruned")]
        seen.append(([step for kind, step in events if kind == "committed"], folders(run)))
    return seen


def test_two_tiers_of_one_run_write_once_where_both_fall_on_one_step(play: Play) -> None:
    for of_rank in play("two_tiers"):
        for committed, left in of_rank:
            assert committed == [2, 4, 6, 8, 10, 12, 14]
            assert left == ["step-000000006", "step-000000012", "step-000000014"]


def ways_to_come_back(rank: int, folder: Path) -> Any:
    holder = sharded_model(0)
    state = {"model": holdfast.Shared(holder)}
    with manager_of(folder, state, resume="required") as manager:
        nothing = manager.should_load(), caught(manager.restore)
    with manager_of(folder, state, save=Every(steps=1)) as manager:
        for step in (1, 2):
            holder.state = sharded_model(step).state
            manager.step(step)
    with manager_of(folder, state, resume="required") as manager:
        something = manager.should_load(), manager.restore().step
    holder.state = sharded_model(50).state
    with manager_of(folder, state, resume="never", save=Every(steps=1)) as manager:
        start = manager.restore()
        untouched = bits(holder.state) == bits(sharded_model(50).state)
        never = manager.should_load(), start.resumed, start.next_step, untouched
        manager.step(1)
    meet("all done")
    return nothing, something, never, [found.folder for found in holdfast.checkpoints(folder)]


def test_resume_says_whether_there_must_may_or_must_not_be_something(play: Play) -> None:
    seen = play("ways_to_come_back")
    error = the_same_error([nothing[1] for nothing, *_ in seen])
    assert isinstance(error, CheckpointNotFoundError)
    for (loads, _), something, never, left in seen:
        assert loads is True
        assert something == (True, 2)
        assert never == (False, False, 0, True)
        assert left == ["step-000000001.2", "step-000000002", "step-000000001"]


def a_rollback(rank: int, folder: Path) -> Any:
    seen = []
    for mode in ("sync", "async"):
        run = folder / mode
        holder = sharded_model(0)
        state = {"model": holdfast.Shared(holder)}
        with manager_of(run, state, mode=mode, save=Every(steps=1)) as manager:
            for step in range(1, 6):
                holder.state = sharded_model(step).state
                manager.step(step)
        with manager_of(run, state, mode=mode, save=Every(steps=1)) as manager:
            start = manager.restore("2")
            back = bits(holder.state) == bits(sharded_model(2).state)
            before = holdfast.resolve(run).folder
            meet(f"{run} looked at")
            for step in (3, 4):
                holder.state = sharded_model(10 * step).state
                manager.step(step)
            manager.wait()
        meet(f"{run} done")
        lines = [found.folder for found in holdfast.checkpoints(run)]
        with manager_of(run, state, mode=mode) as manager:
            again = manager.restore().step, bits(holder.state) == bits(sharded_model(40).state)
            old = manager.restore(run / "step-000000004").step, bits(holder.state) == bits(sharded_model(4).state)
        seen.append((start.next_step, back, before, lines, again, old, os.readlink(run / "latest")))
    return seen


def test_a_rollback_goes_on_in_a_line_that_does_not_collide_with_the_old_one(play: Play) -> None:
    for of_rank in play("a_rollback"):
        for next_step, back, before, lines, again, old, latest in of_rank:
            assert (next_step, back) == (3, True)
            assert before == "step-000000005", "until the new line has something"
            assert lines[:2] == ["step-000000004.2", "step-000000003.2"]
            assert lines[2:] == [f"step-00000000{step}" for step in (5, 4, 3, 2, 1)]
            assert (again, old) == ((4, True), (4, True))
            assert latest == "step-000000004.2"


def a_damaged_newest_one(rank: int, folder: Path) -> Any:
    holder = sharded_model(0)
    state = {"model": holdfast.Shared(holder)}
    with manager_of(folder, state, save=Every(steps=1)) as manager:
        for step in (1, 2, 3):
            holder.state = sharded_model(step).state
            manager.step(step)
    if rank == 0:
        # In the other rank's part: this rank alone would not notice.
        file = folder / "step-000000003" / "rank-00001.safetensors"
        data = bytearray(file.read_bytes())
        data[-3] ^= 1
        file.write_bytes(data)
    meet("damaged")
    with manager_of(folder, state, save=Every(steps=1)) as manager:
        start = manager.restore()
        back = bits(holder.state) == bits(sharded_model(2).state)
    with manager_of(folder, state, save=Every(steps=1), keep=KeepLast(2)) as manager:
        again = manager.restore()
        for step in (3, 4):
            holder.state = sharded_model(10 * step).state
            manager.step(step)
        manager.prune()
        meet("pruned")
        latest = manager.restore().step, bits(holder.state) == bits(sharded_model(40).state)
    return start.step, back, start.rejected, again.step, again.rejected, folders(folder), latest


@pytest.mark.guarantee("G3")
@pytest.mark.guarantee("G4")
def test_a_newest_one_that_is_damaged_for_one_rank_is_passed_over_by_all_kept_aside_and_not_counted(play: Play) -> None:
    ours, theirs = play("a_damaged_newest_one")
    assert ours == theirs
    step, back, rejected, again, rejected_again, left, latest = ours
    assert (step, back, again) == (2, True, 2)
    assert [text.partition(":")[0] for text in (*rejected, *rejected_again)] == ["step-000000003"] * 2
    assert left == ["step-000000003", "step-000000003.2", "step-000000004"]
    assert latest == (4, True)


# The same on all ranks


def decisions_on_all_ranks(rank: int, folder: Path) -> Any:
    with manager_of(folder, {"model": holdfast.Shared(sharded_model(0))}, keep=KeepLast(1)) as manager:
        manager.save(1)
        manager.save(2)
        manager.prune()
        manager.tag(2, "two")
        manager.save(3)
        meet("saved")
        with holding(folder, "step-000000003", rank):
            meet("held")
            manager.save(4)
            reported = manager.report(4, {"loss": 1.0}), manager.report(9, {"loss": 1.0})
            planned = manager.retention()
            meet("planned")
        manager.untag(2, "two")
        manager.prune()
        meet("after")
    return reported, planned, folders(folder)


@contextmanager
def holding(run: Path, folder: str, rank: int) -> Iterator[None]:
    from holdfast.runs.readers import reading

    if rank == 0:
        with reading(LocalStorage(run), folder):
            yield
    else:
        yield


@pytest.mark.guarantee("G5")
def test_reports_tags_and_plans_are_the_same_on_all_ranks(play: Play) -> None:
    ours, theirs = play("decisions_on_all_ranks")
    assert ours == theirs
    reported, planned, left = ours
    assert reported == (True, False)
    assert [(decision.step, decision.keep) for decision in planned] == [(4, True), (3, True), (2, True)]
    assert left == ["step-000000004"]


def what_prune_gives(rank: int, folder: Path) -> Any:
    with manager_of(folder, {"model": holdfast.Shared(sharded_model(0))}) as manager:
        for step in (1, 2, 3):
            manager.save(step)
    with manager_of(folder, {"model": holdfast.Shared(sharded_model(0))}, keep=KeepLast(1)) as manager:
        return manager.prune()


@pytest.mark.guarantee("G5")
def test_prune_gives_what_was_decided_on_all_ranks(play: Play) -> None:
    ours, theirs = play("what_prune_gives")
    assert [(decision.step, decision.keep) for decision in ours] == [(3, True), (2, False), (1, False)]
    assert ours == theirs


def arguments_that_are_wrong_on_one_rank(rank: int, folder: Path) -> Any:
    """Each with a manager of its own: ranks that were parted once do not come together again."""
    wrong = rank == 1
    calls = {
        "report": lambda manager: manager.report(-1 if wrong else 1, {"loss": 1.0}),
        "tag": lambda manager: manager.tag(1, "" if wrong else "one"),
        "restore": lambda manager: manager.restore(strategy=7 if wrong else None),
    }
    seen = {}
    for name, call in calls.items():
        state = {"model": holdfast.Shared(sharded_model(0))}
        manager = manager_of(folder / name, state, timeout=SHORT_TIMEOUT_SECONDS)
        manager.save(1)
        seen[name] = caught(lambda call=call, manager=manager: call(manager))
        meet(f"{name} was tried")
    return seen


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("name", ["report", "tag", "restore"])
def test_an_argument_that_is_wrong_on_one_rank_is_the_same_error_on_all(name: str, play: Play) -> None:
    error = the_same_error([of_rank[name] for of_rank in play("arguments_that_are_wrong_on_one_rank")])
    assert isinstance(error, UsageError)
    assert error.rank == 1


SCENES = [
    signals_to_one_rank_or_both,
    a_failure_that_nobody_heard_of_before_the_signal,
    a_time_limit_while_a_save_is_under_way,
    two_tiers,
    ways_to_come_back,
    a_rollback,
    a_damaged_newest_one,
    decisions_on_all_ranks,
    what_prune_gives,
    arguments_that_are_wrong_on_one_rank,
]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    return run_scenes(2, SCENES, tmp_path_factory.mktemp("life"), timeout_seconds=180)
