"""Each event has a real cause: a damaged file, a killed process, a deleted claim, a disk that refuses."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import RunInUseError, StorageError, UsageError
from holdfast.manager.triggers import Every
from holdfast.runs.events import EventLog
from holdfast.runs.retention import KeepLast
from holdfast.storage.local.local import LocalStorage
from tests.leftovers import own_writer

# So large that its writer can be stopped between the first and the last byte.
LARGE = 32 << 20

PRELUDE = """
import os, signal, sys, threading
from pathlib import Path
import holdfast
from tests.leftovers import own_writer
from tests.unit.runs.test_events import Holder

def manager(run, size=10_000, **options):
    return holdfast.CheckpointManager(run, {"h": Holder(size)}, rng=False, **options)
"""


class Holder:
    """A component with one tensor."""

    def __init__(self, size: int = 10_000) -> None:
        self.state = {"weight": torch.ones(size)}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def opened(run: Path, seen: list[holdfast.Event], **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, {"h": Holder()}, rng=False, observers=[seen.append], **options)


def of_kind(seen: list[holdfast.Event], kind: str) -> list[holdfast.Event]:
    return [event for event in seen if event.kind == kind]


def run_and_die(script: str, run: Path) -> str:
    """Run a training in a process that ends itself by SIGKILL. Return what it printed."""
    # Into a file: a writer that outlives its training would keep a pipe open.
    output = run.with_name("output")
    with output.open("wb") as file:
        command = [sys.executable, "-c", PRELUDE + script, str(run)]
        done = subprocess.run(command, stdout=file, stderr=file, cwd=Path(__file__).parents[3], check=False)
    assert done.returncode == -signal.SIGKILL, output.read_text()
    return output.read_text()


def test_every_observer_gets_every_event_and_one_that_raises_harms_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first: list[holdfast.Event] = []
    second: list[holdfast.Event] = []

    def broken(event: holdfast.Event) -> None:
        raise RuntimeError("the observer is broken")

    state = {"h": Holder()}
    observers = [broken, second.append]
    with holdfast.CheckpointManager(
        tmp_path, state, mode="sync", on_event=first.append, observers=observers
    ) as manager:
        manager.save(1)
        assert tuple(first) == tuple(second) == manager.events
    assert [event.kind for event in first] == ["started", "written", "committed"]
    assert "the observer is broken" in caplog.text


@pytest.mark.parametrize("observers", [print, [None], "print"])
def test_what_is_no_list_of_functions_is_refused(tmp_path: Path, observers: Any) -> None:
    with pytest.raises(UsageError, match="observers"):
        holdfast.CheckpointManager(tmp_path, {"h": Holder()}, observers=observers)


def test_a_restore_that_rejects_a_damaged_checkpoint_says_that_it_fell_back(tmp_path: Path) -> None:
    with opened(tmp_path, [], mode="sync") as manager:
        manager.save(1)
        manager.save(2)
    file = tmp_path / "step-000000002" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    seen: list[holdfast.Event] = []
    with opened(tmp_path, seen) as manager:
        assert manager.restore().step == 1
    (event,) = of_kind(seen, "fell_back")
    assert (event.step, event.path) == (1, holdfast.resolve(tmp_path, 1).path)
    assert "step-000000002" in event.error
    assert [event.kind for event in seen if event.kind in ("fell_back", "restored")] == ["fell_back", "restored"]


def test_a_restore_beside_an_attempt_or_an_older_damaged_one_did_not_fall_back(tmp_path: Path) -> None:
    with opened(tmp_path, [], mode="sync") as manager:
        manager.save(1)
        manager.save(2)
    (tmp_path / "step-000000001" / "manifest.json").write_text("{")
    (tmp_path / "step-000000003").mkdir()
    seen: list[holdfast.Event] = []
    with opened(tmp_path, seen) as manager:
        assert manager.restore().step == 2
    assert not of_kind(seen, "fell_back")


@pytest.mark.slow
def test_a_run_whose_writer_was_killed_is_taken_over(tmp_path: Path) -> None:
    script = "kept = manager(sys.argv[1], mode='sync'); kept.save(1); os.kill(os.getpid(), signal.SIGKILL)"
    run = tmp_path / "run"
    run_and_die(script, run)
    seen: list[holdfast.Event] = []
    with opened(run, seen, mode="sync") as manager:
        manager.save(2)
        manager.save(3)
    (event,) = of_kind(seen, "lease_taken_over")
    assert event.step is None
    assert "process" in event.error


def test_a_run_that_was_released_is_not_taken_over(tmp_path: Path) -> None:
    seen: list[holdfast.Event] = []
    for step in (1, 2):
        with opened(tmp_path, seen, mode="sync") as manager:
            manager.save(step)
    assert not of_kind(seen, "lease_taken_over")
    assert not of_kind(seen, "lease_lost")


def test_a_manager_whose_run_another_one_took_over_reports_the_loss_once(tmp_path: Path) -> None:
    first_seen: list[holdfast.Event] = []
    second_seen: list[holdfast.Event] = []
    first = opened(tmp_path, first_seen, mode="sync", save=Every(steps=1))
    first.step(1)
    with opened(tmp_path, second_seen, mode="sync", save=Every(steps=1)) as second:
        second.restore()
        for step in (2, 3):
            with pytest.raises(RunInUseError):
                first.step(step)
    first.close()
    assert len(of_kind(first_seen, "lease_lost")) == 1
    assert len(of_kind(second_seen, "lease_taken_over")) == 1


def test_a_claim_that_was_deleted_is_reported_as_lost_and_an_observer_may_use_the_manager(tmp_path: Path) -> None:
    seen: list[holdfast.Event] = []
    made: list[holdfast.CheckpointManager] = []

    def prune(event: holdfast.Event) -> None:
        if event.kind == "lease_lost":
            made[0].retention()
            made[0]._run.saver.hold_run()

    with opened(tmp_path, seen, mode="sync", on_event=prune) as manager:
        made.append(manager)
        manager.save(1)
        shutil.rmtree(tmp_path / "lease")
        manager.save(2)
    (event,) = of_kind(seen, "lease_lost")
    assert "deleted or damaged" in event.error


def test_a_writer_that_was_killed_between_saves_is_reported_when_it_is_restarted(tmp_path: Path) -> None:
    seen: list[holdfast.Event] = []
    with opened(tmp_path, seen, mode="async") as manager:
        manager.save(1, wait=True)
        writer = own_writer()
        os.kill(writer, signal.SIGKILL)
        os.waitid(os.P_PID, writer, os.WEXITED | os.WNOWAIT)
        manager.save(2, wait=True)
        manager.save(3, wait=True)
    (event,) = of_kind(seen, "writer_restarted")
    assert event.step == 1
    assert "SIGKILL" in event.error


class Continue(logging.Handler):
    """Wakes a stopped process when a message is logged."""

    def __init__(self, text: str, wake: Callable[[], None]) -> None:
        super().__init__()
        self._text, self._wake = text, wake

    def emit(self, record: logging.LogRecord) -> None:
        if self._text in record.getMessage():
            self._wake()


@pytest.mark.slow
def test_a_checkpoint_that_a_writer_without_its_training_commits_is_reported(tmp_path: Path) -> None:
    script = f"""
kept = manager(sys.argv[1], {LARGE}, mode="async")
kept.save(1, wait=True)
writer = own_writer()
begun = Path(sys.argv[1], "step-000000002", "attempt.json")

def stop_writer():
    while not begun.exists():
        pass
    os.kill(writer, signal.SIGSTOP)

stopping = threading.Thread(target=stop_writer)
stopping.start()
kept.save(2)
stopping.join()
print(writer, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    run = tmp_path / "run"
    writer = int(run_and_die(script, run).split()[-1])
    handler = Continue("waiting for step-000000002", lambda: os.kill(writer, signal.SIGCONT))
    logging.getLogger("holdfast").addHandler(handler)
    seen: list[holdfast.Event] = []
    try:
        state = {"h": Holder(LARGE)}
        with holdfast.CheckpointManager(run, state, rng=False, observers=[seen.append]) as manager:
            assert manager.restore().step == 2
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(writer, signal.SIGCONT)
        logging.getLogger("holdfast").removeHandler(handler)
    (event,) = of_kind(seen, "orphan_committed")
    assert (event.step, event.path) == (2, holdfast.resolve(run, 2).path)


class Refusing(LocalStorage):
    """A disk from which no tensor file can be deleted."""

    def delete(self, key: str) -> None:
        if key.endswith(".safetensors"):
            raise StorageError("the disk refuses", file=key)
        super().delete(key)


def test_a_cleanup_that_fails_is_reported(tmp_path: Path) -> None:
    seen: list[holdfast.Event] = []
    with opened(tmp_path, seen, storage=Refusing(tmp_path), mode="sync", keep=KeepLast(1)) as manager:
        manager.save(1)
        manager.save(2)
    failed = of_kind(seen, "retention_failed")
    assert failed
    assert "the disk refuses" in failed[0].error
    assert failed[0].step is None


def test_only_the_last_events_are_kept() -> None:
    log = EventLog()
    for step in range(1000):
        log.emit(holdfast.Event("started", step, 0))
    assert [event.step for event in log.recent] == list(range(1000 - len(log.recent), 1000))
    assert len(log.recent) < 1000
