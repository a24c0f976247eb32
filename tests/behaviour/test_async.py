"""Saving behind the training: what is committed, who hears of failures and when, and that nothing is left behind."""

from __future__ import annotations

import gc
import os
import re
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import holdfast
from holdfast.errors import ClosedError, SaveFailedError, StorageError, UsageError
from holdfast.saving.writer.client import start_writer
from holdfast.saving.writer.messages import Committed
from holdfast.testing import MemoryStorage, SlowStorage
from tests import leftovers
from tests.leftovers import arenas
from tests.sizes import DEEP

pytestmark = pytest.mark.slow


class Holder:
    """Some tensors and a value, as a component."""

    def __init__(self, *tensors: torch.Tensor, value: Any = None) -> None:
        self.tensors, self.value = list(tensors), value

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value, **{f"t{index}": tensor for index, tensor in enumerate(self.tensors)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]
        self.tensors = [state[f"t{index}"] for index in range(len(self.tensors))]


def restored(run: Any, step: int, *like: torch.Tensor) -> Holder:
    holder = Holder(*[torch.zeros_like(tensor) for tensor in like])
    with holdfast.CheckpointManager(
        "run" if not isinstance(run, Path) else run,
        {"h": holder},
        rng=False,
        storage=None if isinstance(run, Path) else run,
    ) as manager:
        manager.restore(step)
    return holder


def wait_for(condition: Any, seconds: float = 300.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.01)


def writer_of(manager: holdfast.CheckpointManager) -> int:
    """The process of a manager's writer."""
    (found,) = writers()
    return found


def belongings() -> tuple[int, int, int]:
    """What this process holds: open handles, and of this test the mapped arenas and the living writer processes."""
    gc.collect()
    return len(os.listdir("/proc/self/fd")), len(arenas() - _of_others), len(writers())


def writers() -> list[int]:
    """The writer processes of this test."""
    return [writer for writer in leftovers.writers() if writer not in _writers_of_others]


_of_others: set[str] = set()
_writers_of_others: set[int] = set()


@pytest.fixture(autouse=True)
def of_others() -> None:
    """Note what there is before the test, so that it looks at what it made."""
    gc.collect()
    _of_others.clear()
    _of_others.update(arenas())
    _writers_of_others.clear()
    _writers_of_others.update(leftovers.writers())


@pytest.mark.guarantee("G2")
def test_every_one_of_many_saves_is_what_the_state_was_at_that_step(tmp_path: Path) -> None:
    saves = 200 if DEEP else 50
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Linear(64, 1))
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    clones: list[dict[str, torch.Tensor]] = []
    with holdfast.CheckpointManager(
        tmp_path, {"model": model, "average": average, "optimizer": optimizer}, mode="async", rng=False
    ) as manager:
        for step in range(saves):
            optimizer.zero_grad()
            model(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
            average.update_parameters(model)
            manager.save(step, metrics={"step": step})
            moments = {
                f"{name}.{key}": value.clone()
                for name, parameter in model.named_parameters()
                for key, value in optimizer.state[parameter].items()
            }
            clones.append(
                {
                    **{f"model.{k}": v.clone() for k, v in model.state_dict().items()},
                    **{f"average.{k}": v.clone() for k, v in average.state_dict().items()},
                    **{f"optimizer.{k}": v for k, v in moments.items()},
                }
            )
    assert len(holdfast.checkpoints(tmp_path)) == saves
    for step in range(saves):
        state = _read(tmp_path, step)
        for name, tensor in clones[step].items():
            assert torch.equal(state[name], tensor), (step, name)


def _read(run: Path, step: int) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint, by plain safetensors."""
    from safetensors.torch import load_file

    folder = run / f"step-{step:09d}"
    found = {}
    for file in folder.glob("*.safetensors"):
        found.update(load_file(file))
    return {name.replace("optimizer.state.", "optimizer."): tensor for name, tensor in found.items()}


def test_the_call_returns_before_the_checkpoint_is_there_and_wait_brings_it() -> None:
    storage = SlowStorage(MemoryStorage(), delay_seconds=0.05)
    holder = Holder(torch.arange(1000.0))
    with holdfast.CheckpointManager("run", {"h": holder}, storage=storage, mode="async", rng=False) as manager:
        handle = manager.save(1)
        assert handle.staged()
        assert manager.is_pending
        assert not handle.done()
        holder.tensors[0].zero_()
        assert handle.wait().step == 1
        assert handle.done()
        assert not manager.is_pending
    assert torch.equal(restored(storage, 1, torch.zeros(1000)).tensors[0], torch.arange(1000.0))


def test_a_save_waits_for_the_one_before_and_says_so_once_when_that_recurs(caplog: pytest.LogCaptureFixture) -> None:
    storage = SlowStorage(MemoryStorage(), delay_seconds=0.05)
    with holdfast.CheckpointManager("run", {"h": Holder(torch.ones(10))}, storage=storage, mode="async") as manager:
        handles = [manager.save(step) for step in range(8)]
        assert all(handle.done() for handle in handles[:-1])
    warnings = [record.message for record in caplog.records if "waited" in record.message]
    assert len(warnings) == 1
    assert not any(f"the save of step {step} waited" in warnings[0] for step in range(4)), "not before it recurs"


@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("how", ["save", "wait", "poll", "close", "handle"])
def test_a_failure_is_raised_once_and_the_next_save_works(how: str) -> None:
    class Full(MemoryStorage):
        full = False

        def create(self, key: str, size_bytes: int) -> Any:
            if self.full:
                raise StorageError("the disk is full", errno=28, file=key)
            return super().create(key, size_bytes)

    storage = Full()
    manager = holdfast.CheckpointManager("run", {"h": Holder(torch.ones(10))}, storage=storage, mode="async", rng=False)
    manager.save(0, wait=True)
    storage.full = True
    handle = manager.save(1)
    wait_for(handle.done)
    storage.full = False
    with pytest.raises(StorageError, match=r"step 1.*the disk is full"):
        {
            "save": lambda: manager.save(2),
            "wait": manager.wait,
            "poll": manager.poll,
            "close": manager.close,
            "handle": handle.wait,
        }[how]()
    if how == "close":
        manager.close()
        with pytest.raises(ClosedError):
            manager.save(2)
    else:
        manager.poll()
        manager.wait()
        assert manager.save(2).wait().step == 2
        manager.close()
    assert [found.step for found in holdfast.checkpoints(storage)] == ([0] if how == "close" else [2, 0])
    assert [entry.name for entry in storage.entries("")][2:] == sorted(
        ["step-000000000"] + ([] if how == "close" else ["step-000000002"])
    )


@pytest.mark.guarantee("G6")
def test_what_goes_wrong_after_the_commit_leaves_nobody_waiting(caplog: pytest.LogCaptureFixture) -> None:
    class Odd(MemoryStorage):
        odd = False

        def open(self, key: str) -> Any:
            if self.odd and key.endswith("manifest.json") and threading.current_thread().name == "holdfast-save":
                raise MemoryError("no room to read it")
            return super().open(key)

    storage = Odd()
    with holdfast.CheckpointManager("run", {"h": Holder(torch.ones(10))}, storage=storage, mode="async") as manager:
        storage.odd = True
        handle = manager.save(1)
        wait_for(handle.done)
        storage.odd = False
        assert manager.save(2).wait().step == 2
    assert [found.step for found in holdfast.checkpoints(storage)] == [2, 1]
    assert "step 1 is committed; an action after the commit failed" in caplog.text


def test_a_failed_save_and_then_an_exception_in_the_block_shows_the_exception(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(MemoryStorage):
        def create(self, key: str, size_bytes: int) -> Any:
            raise StorageError("the disk is broken", errno=5, file=key)

    def train() -> None:
        state = {"h": Holder(torch.ones(10))}
        with holdfast.CheckpointManager("run", state, storage=Broken(), mode="async") as manager:
            manager.save(1)
            raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        train()
    assert "the disk is broken" in caplog.text


@pytest.mark.guarantee("G6")
def test_a_writer_that_was_killed_between_saves_is_replaced(tmp_path: Path) -> None:
    holder = Holder(torch.randn(1000))
    with holdfast.CheckpointManager(tmp_path, {"h": holder}, mode="async", rng=False) as manager:
        manager.save(0, wait=True)
        first = writer_of(manager)
        os.kill(first, signal.SIGKILL)
        os.waitid(os.P_PID, first, os.WEXITED | os.WNOWAIT)
        assert manager.save(1).wait().step == 1
        assert writer_of(manager) != first


@pytest.mark.guarantee("G6")
def test_a_writer_that_is_killed_while_it_writes_fails_that_save_alone(tmp_path: Path) -> None:
    holder = Holder(torch.randn(50_000_000))
    with holdfast.CheckpointManager(tmp_path, {"h": holder}, mode="async", rng=False) as manager:
        manager.save(0, wait=True)
        writer = writer_of(manager)
        os.kill(writer, signal.SIGSTOP)
        handle = manager.save(1)
        os.kill(writer, signal.SIGKILL)
        with pytest.raises(SaveFailedError, match=r"step 1: the writer process was killed by SIGKILL.*new writer"):
            handle.wait()
        manager.save(2, wait=True)
        manager.save(3)
        writer = writer_of(manager)
        wait_for(lambda: (tmp_path / "step-000000003" / "rank-00000.safetensors").exists())
        os.kill(writer, signal.SIGKILL)
        with pytest.raises(SaveFailedError, match="step 3"):
            manager.wait()
        assert not list((tmp_path / "step-000000003").glob("*")), "what it wrote is given back at once"
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [2, 0]
    assert holdfast.verify(tmp_path, 2).ok


class KilledWhenDone:
    """A writer that is killed when it has committed, before its reply is received."""

    def __init__(self, storage: Any) -> None:
        self._writer = start_writer(storage)

    def receive(self, *arguments: Any) -> Any:
        reply = self._writer.receive(*arguments)
        if isinstance(reply, Committed):
            self._writer.kill()
            return self._writer.receive(*arguments)
        return reply

    def __getattr__(self, name: str) -> Any:
        return getattr(self._writer, name)


@pytest.mark.guarantee("G6")
def test_a_writer_that_is_killed_after_its_commit_fails_nothing(tmp_path: Path) -> None:
    kinds: list[str] = []
    with holdfast.CheckpointManager(
        tmp_path,
        {"h": Holder(torch.randn(10))},
        mode="async",
        rng=False,
        on_event=lambda event: kinds.append(event.kind),
    ) as manager:
        manager._run.saver._async.supervisor.start = KilledWhenDone
        assert manager.save(0).wait().step == 0
        assert manager.save(0).skipped
        assert manager.save(1).wait().step == 1
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [1, 0]
    assert "failed" not in kinds


def in_a_child(work: Callable[[], object]) -> str:
    """What comes of it in a forked child; it must come soon."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = f"returned {work()!r}"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(writing, said.encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as end:
        ready = select.poll()
        ready.register(end, select.POLLIN)
        hangs = not ready.poll(30_000)
        if hangs:
            os.kill(child, signal.SIGKILL)
        said = end.read()
    os.waitpid(child, 0)
    return "it hangs" if hangs else said


def test_a_forked_child_is_told_that_the_manager_is_not_its_own(tmp_path: Path) -> None:
    holder = Holder(torch.randn(1000))
    with holdfast.CheckpointManager(tmp_path, {"h": holder}, mode="async", rng=False) as manager:
        manager.save(0, wait=True)
        os.kill(writer := writer_of(manager), signal.SIGSTOP)
        try:
            handle = manager.save(1)
            for act in (lambda: manager.save(2), manager.wait, manager.poll, manager.restore):
                assert re.match(rf"UsageError: .*built in process {os.getpid()}, from which", in_a_child(act))
            assert "UsageError: step 1: a forked child cannot wait" in in_a_child(handle.wait)
            assert in_a_child(manager.close) == "returned None"
        finally:
            os.kill(writer, signal.SIGCONT)
        assert handle.wait().step == 1
        assert in_a_child(lambda: handle.wait().step) == "returned 1", "what is done can be asked for"


def test_a_forked_child_has_nothing_of_the_arena(tmp_path: Path) -> None:
    def arenas_here() -> int:
        handles = []
        for handle in Path("/proc/self/fd").iterdir():
            with suppress(FileNotFoundError):  # another thread has closed it meanwhile
                handles.append(os.readlink(handle))
        maps = Path("/proc/self/maps").read_text().splitlines()
        return sum("holdfast-arena" in name for name in [*handles, *maps])

    with holdfast.CheckpointManager(tmp_path, {"h": Holder(torch.randn(1000))}, mode="async", rng=False) as manager:
        manager.save(0, wait=True)
        assert arenas_here() == 2, "its handle and its mapping"
        assert in_a_child(arenas_here) == "returned 0"
    assert arenas_here() == 0


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    def use() -> None:
        holder = Holder(torch.randn(1_000_000))
        with holdfast.CheckpointManager(tmp_path, {"h": holder}, mode="async", rng=False) as manager:
            for step in range(3):
                manager.save(len(holdfast.checkpoints(tmp_path)) + step)
            manager.wait()
            assert belongings()[1:] == (1, 1)
        manager.close()

    use()
    before = belongings()
    use()
    assert belongings() == before
    assert before[1:] == (0, 0)


def test_a_growing_state_gets_a_larger_arena_and_only_one(tmp_path: Path) -> None:
    holder = Holder(torch.randn(1000))
    with holdfast.CheckpointManager(tmp_path, {"h": holder}, mode="async", rng=False) as manager:
        manager.save(0)
        holder.tensors.append(torch.randn(2_000_000))
        manager.save(1)
        manager.wait()
        assert belongings()[1] == 1
        holder.tensors.pop()
        manager.save(2)
    for step, count in ((0, 1), (1, 2), (2, 1)):
        found = restored(tmp_path, step, *[torch.zeros(1000), torch.zeros(2_000_000)][:count])
        assert torch.equal(found.tensors[0], holder.tensors[0])


def test_a_save_over_the_staging_limit_streams_and_is_the_same(tmp_path: Path) -> None:
    holder = Holder(torch.randn(1_000_000))
    with holdfast.CheckpointManager(
        tmp_path, {"h": holder}, mode="async", rng=False, staging_limit_bytes=1_000_000
    ) as manager:
        handle = manager.save(0)
        assert handle.done()
        assert belongings()[1:] == (0, 0)
        holder.tensors[0] = torch.randn(1000)
        manager.save(1)
        manager.wait()
        assert belongings()[1:] == (1, 1)
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [1, 0]
    assert holdfast.verify(tmp_path, 0).ok


@pytest.mark.parametrize("limit", [-1, 1.5, True, "1"])
def test_a_limit_that_is_no_number_of_bytes_is_refused(limit: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="staging_limit_bytes"):
        holdfast.CheckpointManager(tmp_path, {"h": Holder()}, staging_limit_bytes=limit)


def test_events_say_what_happened_and_how_long_it_took(tmp_path: Path) -> None:
    heard: list[holdfast.Event] = []
    holder = Holder(torch.randn(1000))
    with holdfast.CheckpointManager(tmp_path, {"h": holder}, mode="async", rng=False, on_event=heard.append) as manager:
        manager.save(3)
        manager.wait()
        manager.restore()
        assert manager.events == tuple(heard)
    assert [event.kind for event in heard] == ["started", "staged", "written", "committed", "restored"]
    committed = heard[3]
    assert committed.step == 3
    assert committed.path == str(tmp_path / "step-000000003")
    assert committed.size_bytes > 4000
    assert {"capture", "agree", "stage", "write", "commit"} <= set(committed.phases)
    assert 0 < sum(committed.phases.values()) <= committed.seconds + 1


@pytest.mark.parametrize("options", [{"mode": "sync"}, {"mode": "async"}, {"mode": "async", "staging_limit_bytes": 1}])
def test_written_says_how_much(tmp_path: Path, options: dict[str, Any]) -> None:
    events: list[holdfast.Event] = []
    with holdfast.CheckpointManager(tmp_path, {"model": nn.Linear(9, 9)}, on_event=events.append, **options) as manager:
        manager.save(1)
    written, committed = events[-2:]
    assert (written.kind, committed.kind) == ("written", "committed")
    assert written.size_bytes == committed.size_bytes > 81 * 4
    assert ("staged" in [event.kind for event in events]) == (options == {"mode": "async"})


def test_an_observer_that_raises_breaks_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def observe(event: holdfast.Event) -> None:
        raise RuntimeError("the observer is broken")

    with holdfast.CheckpointManager(tmp_path, {"h": Holder(torch.ones(3))}, on_event=observe) as manager:
        assert manager.save(0).wait().step == 0
    assert "the observer is broken" in caplog.text


def test_an_observer_may_use_the_manager_but_not_wait_for_what_it_hinders(
    caplog: pytest.LogCaptureFixture,
) -> None:
    said: list[Any] = []
    made: list[Any] = []

    def observe(event: holdfast.Event) -> None:
        if event.kind == "written":
            made[0].wait()
        if event.kind == "committed":
            made[0].tag("latest", "seen")
            made[0].wait()
            said.append(made[0].peek().tags)

    storage = MemoryStorage()
    manager = holdfast.CheckpointManager(
        "run", {"h": Holder(torch.ones(10))}, storage=storage, mode="async", on_event=observe
    )
    made.append(manager)
    handle = manager.save(1)
    wait_for(handle.done)
    manager.close()
    assert said == [("seen",)]
    assert "called wait() on the save that reports this event" in caplog.text


def test_the_mode_that_auto_chose_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="holdfast")
    with holdfast.CheckpointManager(tmp_path, {"h": Holder(torch.ones(3))}) as manager:
        manager.save(0)
        manager.save(1)
    lines = [record.message for record in caplog.records if "in mode" in record.message]
    assert lines == ["saving in mode 'async': the state is in host memory"]


@pytest.mark.parametrize("mode", ["async_pinned", "async_device"])
def test_the_modes_for_gpus_work_without_one(mode: Any, tmp_path: Path) -> None:
    holder = Holder(torch.randn(1000), torch.randn(3).bfloat16(), torch.empty(0), torch.tensor(3 + 4j))
    with holdfast.CheckpointManager(tmp_path, {"h": holder}, mode=mode, rng=False) as manager:
        manager.save(0)
        manager.wait_for_staging()
    found = restored(tmp_path, 0, *holder.tensors)
    assert all(map(torch.equal, found.tensors, holder.tensors))


SCRIPT = """
import os, signal, sys, threading
import torch, holdfast

class Holder:
    def __init__(self): self.t = torch.arange({count}.0)
    def state_dict(self): return {{"t": self.t}}
    def load_state_dict(self, state): self.t = state["t"]

manager = holdfast.CheckpointManager(sys.argv[1], {{"h": Holder()}}, mode="async", rng=False)
manager.save(0, wait=True)
{body}
"""


def run_script(run: Path, body: str, count: int = 100_000) -> subprocess.CompletedProcess[str]:
    code = SCRIPT.format(count=count, body=textwrap.dedent(body))
    return subprocess.run([sys.executable, "-c", code, str(run)], capture_output=True, text=True, timeout=120)


def writers_left() -> list[str]:
    """Return the writers that trainers of this test have left behind."""
    ours = f"PYTEST_CURRENT_TEST={os.environ['PYTEST_CURRENT_TEST']}".encode()
    found = []
    for process in Path("/proc").iterdir():
        if process.name.isdigit():
            try:
                command = (process / "cmdline").read_bytes()
                parent = (process / "stat").read_text().rpartition(")")[2].split()[1]
                environment = (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            # Other tests, and other checkouts, run at the same time.
            if ours in environment and b"holdfast.saving.writer" in command and parent == "1":
                found.append(process.name)
    return found


def test_a_program_that_ends_without_close_keeps_its_last_save(tmp_path: Path) -> None:
    done = run_script(tmp_path, "manager.save(1)", count=10_000_000)
    assert done.returncode == 0, done.stderr
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [1, 0]


def test_an_exception_in_the_loop_keeps_the_last_save(tmp_path: Path) -> None:
    done = run_script(tmp_path, "manager.save(1)\nraise RuntimeError('the loop is broken')", count=10_000_000)
    assert "the loop is broken" in done.stderr
    assert done.returncode == 1
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [1, 0]


def test_a_failure_that_nobody_asked_for_is_told_at_the_end(tmp_path: Path) -> None:
    body = """
    children = [manager._saver._async.supervisor.writer.process_id]
    os.kill(int(children[0]), signal.SIGSTOP)
    manager.save(1)
    os.kill(int(children[0]), signal.SIGKILL)
    """
    done = run_script(tmp_path, body)
    assert "its outcome was never read" in done.stderr
    assert "SIGKILL" in done.stderr
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [0]


def test_a_program_with_more_than_1100_open_descriptors_saves_and_notices_a_killed_writer(tmp_path: Path) -> None:
    before = """
    import resource
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, most) if most > 0 else 4096, most))
    held = [os.open("/dev/null", os.O_RDONLY) for _ in range(1200)]
    """
    body = """
    children = [manager._saver._async.supervisor.writer.process_id]
    assert len(os.listdir("/proc/self/fd")) > 1200, "the descriptors are open"
    os.kill(int(children[0]), signal.SIGSTOP)
    handle = manager.save(1)
    os.kill(int(children[0]), signal.SIGKILL)
    try:
        handle.wait()
    except holdfast.SaveFailedError as error:
        assert "SIGKILL" in str(error), error
    else:
        raise AssertionError("the writer was killed")
    assert manager.save(2).wait().step == 2
    manager.close()
    """
    code = SCRIPT.replace("import torch, holdfast\n", f"import torch, holdfast\n{textwrap.dedent(before)}")
    code = code.format(count=1000, body=textwrap.dedent(body))
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [2, 0]


@pytest.mark.guarantee("G1")
def test_a_trainer_that_is_killed_right_after_save_loses_nothing(tmp_path: Path) -> None:
    done = run_script(tmp_path, "manager.save(1)\nos.kill(os.getpid(), signal.SIGKILL)", count=30_000_000)
    assert done.returncode == -signal.SIGKILL
    wait_for(lambda: [found.step for found in holdfast.checkpoints(tmp_path)] == [1, 0])
    assert holdfast.verify(tmp_path, 1).ok
    wait_for(lambda: not writers_left())


@pytest.mark.guarantee("G1")
def test_a_restore_waits_for_the_first_save_of_a_trainer_whose_writer_was_still_starting(tmp_path: Path) -> None:
    code = """
    import os, signal, sys, torch, holdfast
    manager = holdfast.CheckpointManager(sys.argv[1], {"h": torch.nn.Linear(4, 4)}, mode="async", rng=False)
    manager.save(1)
    writer = manager._saver._async.supervisor.writer.process_id
    os.kill(writer, signal.SIGSTOP)
    print(writer, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    command = [sys.executable, "-c", textwrap.dedent(code), str(tmp_path)]
    done = subprocess.run(command, timeout=120, text=True, stdout=subprocess.PIPE)
    assert done.returncode == -signal.SIGKILL
    assert not list(tmp_path.glob("step-*")), "the writer has not claimed a folder"
    threading.Timer(1.0, os.kill, (int(done.stdout), signal.SIGCONT)).start()
    with holdfast.CheckpointManager(tmp_path, {"h": torch.nn.Linear(4, 4)}, mode="sync", rng=False) as manager:
        assert manager.restore().step == 1, "a fresh start would leave the save of step 1 behind"
    wait_for(lambda: not writers_left())


def test_a_trainer_that_is_killed_while_a_worker_of_it_lives_loses_nothing_either(tmp_path: Path) -> None:
    body = """
    if os.fork() == 0:
        import time
        time.sleep(20)
        os._exit(0)
    manager.save(1)
    if os.fork() == 0:
        import time
        time.sleep(20)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)
    """
    code = SCRIPT.format(count=10_000_000, body=textwrap.dedent(body))
    trainer = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], start_new_session=True)
    try:
        assert trainer.wait(300) == -signal.SIGKILL
        wait_for(lambda: [found.step for found in holdfast.checkpoints(tmp_path)] == [1, 0], 15)
        wait_for(lambda: not writers_left(), 15)
    finally:
        os.killpg(trainer.pid, signal.SIGKILL)


def test_forked_workers_that_live_during_a_save_hinder_nothing(tmp_path: Path) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(64.0))
    loader = torch.utils.data.DataLoader(data, batch_size=4, num_workers=2, multiprocessing_context="fork")
    holder = Holder(torch.randn(100_000))
    with holdfast.CheckpointManager(tmp_path, {"h": holder}, mode="async", rng=False) as manager:
        for epoch in range(2):
            for step, _ in enumerate(loader):
                manager.save(epoch * 100 + step)
    assert len(holdfast.checkpoints(tmp_path)) == 32
    assert belongings()[1:] == (0, 0)


def test_the_writer_brings_neither_torch_nor_numpy() -> None:
    unwanted = "{'torch', 'numpy', 'safetensors'}"
    code = f"import sys, holdfast.saving.writer.process; sys.exit(bool({unwanted} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.guarantee("G1")
def test_a_restart_waits_for_the_writer_of_the_training_that_was_killed(tmp_path: Path) -> None:
    done = run_script(tmp_path, "manager.save(1)\nos.kill(os.getpid(), signal.SIGKILL)", count=60_000_000)
    assert done.returncode == -signal.SIGKILL
    with holdfast.CheckpointManager(tmp_path, {"h": Holder(torch.zeros(1))}, rng=False, mode="sync") as manager:
        assert manager.should_load()
        with pytest.raises(holdfast.StateMismatchError):
            manager.restore()  # a Holder has other leaves than the script's
        found = manager.peek()
    assert found is not None
    assert found.step == 1


def test_a_manager_that_is_dropped_without_close_takes_its_thread_and_its_writer_along(
    tmp_path: Path, new_threads: Callable[[], list[str]]
) -> None:
    manager = holdfast.CheckpointManager(tmp_path, {"h": Holder(torch.randn(1000))}, mode="async", rng=False)
    manager.save(0, wait=True)
    assert belongings()[1:] == (1, 1)
    del manager
    wait_for(lambda: belongings()[1:] == (0, 0))
    wait_for(lambda: "holdfast-save" not in new_threads())


class Unreleasable(MemoryStorage):
    """A storage of a plug-in that fails, in its own way, when a lease is released, and when a file is created."""

    def put(self, key: str, data: bytes) -> None:
        if key.endswith(".released"):
            raise RuntimeError("the client is closed already")
        super().put(key, data)

    def create(self, key: str, size_bytes: int) -> Any:
        raise StorageError("no room for it", file=key)


def test_what_fails_in_close_keeps_nothing_else_from_being_given_back(
    caplog: pytest.LogCaptureFixture, new_threads: Callable[[], list[str]]
) -> None:
    storage = Unreleasable()
    manager = holdfast.CheckpointManager(
        "run", {"h": Holder(torch.randn(10))}, mode="async", rng=False, storage=storage
    )
    handle = manager.save(0)
    wait_for(handle.done)
    with pytest.raises(StorageError, match="no room for it"):
        manager.close()
    assert "the client is closed already" in caplog.text
    assert belongings()[1:] == (0, 0)
    wait_for(lambda: "holdfast-save" not in new_threads())


def test_a_state_that_outgrows_the_memory_that_is_left_is_streamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    holder = Holder(torch.randn(1000))
    with holdfast.CheckpointManager(tmp_path, {"h": holder}, mode="async", rng=False) as manager:
        manager.save(0, wait=True)
        # The share of one rank among very many is next to nothing.
        monkeypatch.setenv("LOCAL_WORLD_SIZE", str(10**12))
        manager.save(1, wait=True)
        assert "written in pieces" not in caplog.text, "what fitted once fits again"
        holder.tensors.append(torch.randn(10_000_000))
        assert manager.save(2).done()
    assert "written in pieces" in caplog.text
    assert holdfast.verify(tmp_path, 2).ok


def test_a_save_of_a_known_state_starts_no_collection(tmp_path: Path) -> None:
    model = nn.ParameterList([nn.Parameter(torch.randn(2)) for _ in range(3000)])
    started: list[int] = []

    def note(phase: str, _: Any) -> None:
        if phase == "start" and threading.current_thread() is threading.main_thread():
            started.append(gc.get_count()[0])

    # With a writer of its own process: what a thread of this one allocates meanwhile counts here, too.
    with holdfast.CheckpointManager(tmp_path, {"model": model}, mode="async") as manager:
        for step in range(3):
            manager.save(step, wait=True)
        gc.collect()
        gc.callbacks.append(note)
        try:
            handle = manager.save(3)
            assert gc.isenabled()
        finally:
            gc.callbacks.remove(note)
        assert not started
        handle.wait()
