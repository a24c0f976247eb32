"""A save or a close that an interrupt ends: what was handed over goes on, and the next call finds all in order."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import ClosedError
from holdfast.runs.process_identity import parent_of


class Holder:
    """A component that is one tensor, full of the number of its step."""

    def __init__(self) -> None:
        self.tensor = torch.zeros(50_000)

    def state_dict(self) -> dict[str, Any]:
        return {"tensor": self.tensor}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.tensor = state["tensor"]


def content(run: Path, step: int) -> set[float]:
    holder = Holder()
    with holdfast.CheckpointManager(run, {"holder": holder}, mode="sync", rng=False) as manager:
        manager.restore(step)
    return set(holder.tensor.tolist())


def interrupt_once(call: Callable[..., Any], *, before: bool) -> Callable[..., Any]:
    """Return a function that does what another does, and is interrupted the first time, as by Ctrl-C."""
    left = [True]

    def interrupted(*arguments: Any, **named: Any) -> Any:
        interrupts = left.pop() if left else False
        if interrupts and before:
            signal.raise_signal(signal.SIGINT)
        answer = call(*arguments, **named)
        if interrupts:
            signal.raise_signal(signal.SIGINT)
        return answer

    return interrupted


@pytest.mark.guarantee("G2")
@pytest.mark.guarantee("G6")
@pytest.mark.parametrize("before", [True, False], ids=["before", "after"])
def test_an_interrupt_when_a_save_is_handed_over_harms_neither_that_save_nor_the_next(
    before: bool, tmp_path: Path
) -> None:
    holder = Holder()
    with holdfast.CheckpointManager(tmp_path, {"holder": holder}, mode="async", rng=False, timeout=60) as manager:
        manager.save(0).wait()
        worker: Any = manager._saver._async.worker
        worker.submit = interrupt_once(worker.submit, before=before)
        for step in (1, 2, 3):
            holder.tensor.fill_(step)
            try:
                manager.save(step)
            except KeyboardInterrupt:
                assert step == 1
            else:
                assert step != 1, "no interrupt came"
        manager.wait()
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [3, 2, 1, 0]
    for step in range(4):
        assert holdfast.verify(tmp_path, step).ok
        assert content(tmp_path, step) == {float(step)}


def test_a_writer_that_an_interrupt_left_with_a_job_is_replaced(tmp_path: Path) -> None:
    holder = Holder()
    with holdfast.CheckpointManager(tmp_path, {"holder": holder}, mode="async", rng=False, timeout=60) as manager:
        manager.save(0).wait()
        worker: Any = manager._saver._async.worker
        writer: Any = manager._saver._async.supervisor.writer
        worker.start = interrupt_once(worker.start, before=True)
        with pytest.raises(KeyboardInterrupt):
            manager.save(1)
        holder.tensor.fill_(2)
        manager.save(2).wait()
        assert writer.is_gone()
    assert [found.step for found in holdfast.checkpoints(tmp_path)] == [2, 0]
    assert holdfast.verify(tmp_path, 2).ok
    assert content(tmp_path, 2) == {2.0}


def test_an_interrupt_in_the_middle_of_a_message_ends_the_writer_and_the_next_save_works(tmp_path: Path) -> None:
    holder = Holder()
    with holdfast.CheckpointManager(tmp_path, {"holder": holder}, mode="async", rng=False, timeout=60) as manager:
        manager.save(0).wait()
        writer: Any = manager._saver._async.supervisor.writer
        channel = writer._channel._socket

        class Half:
            """A socket of which the first message is cut off."""

            def __getattr__(self, name: str) -> Any:
                return getattr(channel, name)

            def sendall(self, data: Any) -> None:
                channel.sendall(data[: len(data) // 2])
                signal.raise_signal(signal.SIGINT)

        writer._channel._socket = Half()
        with pytest.raises(KeyboardInterrupt):
            manager.save(1)
        holder.tensor.fill_(2)
        manager.save(2).wait()
    assert content(tmp_path, 2) == {2.0}


@pytest.mark.parametrize("where", ["drain", "release"])
def test_a_close_that_was_interrupted_is_finished_by_the_next_one(where: str, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    manager = holdfast.CheckpointManager(tmp_path, {"holder": Holder()}, mode="async", rng=False)
    handle = manager.save(1)
    heartbeats = [thread for thread in set(threading.enumerate()) - before if thread.name == "holdfast-lease"]
    assert len(heartbeats) == 1
    writer: Any = manager._saver._async.supervisor.writer
    if where == "drain":
        manager._saver.drain = interrupt_once(manager._saver.drain, before=True)  # type: ignore[method-assign]
    else:
        writer.shut_down = interrupt_once(writer.shut_down, before=True)
    with pytest.raises(KeyboardInterrupt):
        manager.close()
    with pytest.raises(ClosedError):
        manager.save(2)
    manager.close()
    assert handle.done()
    assert parent_of(writer.process_id) is None, "the writer has ended"
    heartbeats[0].join(60)
    assert not heartbeats[0].is_alive(), "the heartbeat was stopped"
    manager.close()
    with holdfast.CheckpointManager(tmp_path, {"holder": Holder()}, mode="sync", rng=False) as other:
        other.restore()
        other.save(2)
