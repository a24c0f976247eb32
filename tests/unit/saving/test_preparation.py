"""What a thread gets ready before the first save, in which order, when it stops, and what it never takes."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.errors import StorageError
from holdfast.saving.preparation import Preparation, Waits
from holdfast.state.budget import ranks_here
from holdfast.storage.threads import HelperThread

AT_ONCE = Waits(begin=0.0, growing=0.0, look=0.0)
LONG = 3600.0
PLENTY = 1 << 40


class FakeStager:
    """Notes what is asked of it. `pieces`: how many pieces an arena has. `on_piece` is called after each of them."""

    def __init__(self, pieces: int = 3) -> None:
        self.calls: list[Any] = []
        self.size_bytes = self.taken = 0
        self.pieces = pieces
        self.on_piece: Callable[[], None] = lambda: None

    @property
    def held_bytes(self) -> int:
        return self.size_bytes * self.taken // self.pieces

    @property
    def missing_bytes(self) -> int:
        return self.size_bytes - self.held_bytes

    def is_short_of(self, size_bytes: int, tensors: int) -> bool:
        return self.size_bytes < size_bytes

    def reserve(self, size_bytes: int, tensors: int, limit_bytes: int) -> bool:
        if size_bytes > limit_bytes:
            self.calls.append("refused")
            return False
        self.calls.append(("reserve", size_bytes))
        self.size_bytes, self.taken = size_bytes, 0
        return True

    def take_more(self) -> bool:
        self.taken += 1
        self.calls.append("piece")
        self.on_piece()
        return self.taken < self.pieces

    def page_lock(self, devices: Any) -> None:
        self.calls.append(("page_lock", set(devices)))

    def close(self) -> None:
        self.calls.append("close")
        self.size_bytes = self.taken = 0


class FakeSupervisor:
    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls

    def start_early(self) -> None:
        self.calls.append("writer")


def preparation_of(stager: FakeStager, waits: Waits = AT_ONCE, **options: Any) -> Preparation:
    fakes: Any = stager, FakeSupervisor(stager.calls)
    return Preparation(*fakes, waits=waits, **{"ranks": 1, "free_bytes": lambda: PLENTY, **options})


class Looks:
    """Returns the components of each look, one after the other, and None after the last: the preparation ends then."""

    def __init__(self, *states: Mapping[str, Any]) -> None:
        self.states = list(states)

    def __call__(self) -> Mapping[str, Any] | None:
        return self.states.pop(0) if self.states else None


def finish(preparation: Preparation, components: Callable[[], Mapping[str, Any] | None]) -> None:
    """Let the thread come to its own end."""
    preparation.start(components)
    wait_for(lambda: not preparation.is_running)
    preparation.stop()


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline, "it did not come to be"
        time.sleep(0.001)


def model(size: int = 10) -> nn.Module:
    return nn.Linear(size, size)


MODEL_BYTES = 440
CPU = {torch.device("cpu")}
READY = ["writer", ("reserve", MODEL_BYTES), "piece", "piece", "piece", ("page_lock", CPU)]


def test_the_writer_comes_first_then_the_arena_piece_by_piece_then_its_page_lock() -> None:
    stager = FakeStager()
    finish(preparation_of(stager), Looks({"model": model()}, {"model": model()}))
    assert stager.calls == READY, "and nothing more at the second look"


def test_nothing_is_made_for_a_manager_that_is_closed_soon() -> None:
    stager = FakeStager()
    preparation = preparation_of(stager, Waits(begin=LONG))
    preparation.start(Looks({"model": model()}))
    assert preparation.is_running
    preparation.stop()
    assert not preparation.is_running
    assert stager.calls == []


def test_stopping_in_the_middle_returns_when_the_piece_is_done_and_keeps_what_there_is() -> None:
    stager = FakeStager(pieces=10**9)
    reached, go_on = threading.Event(), threading.Event()

    def on_piece() -> None:
        if stager.taken == 5:
            reached.set()
            go_on.wait(120)

    stager.on_piece = on_piece
    preparation = preparation_of(stager)
    preparation.start(Looks({"model": model()}))
    assert reached.wait(120)
    stopping = threading.Thread(target=preparation.stop)
    stopping.start()
    stopping.join(0.2)
    assert stopping.is_alive(), "the thread still works on the arena"
    go_on.set()
    stopping.join(120)
    assert stager.calls == [*READY[:2], *["piece"] * 5]
    assert stager.held_bytes < stager.size_bytes


def test_a_wait_that_was_interrupted_does_not_let_the_next_save_go_ahead() -> None:
    """Ctrl-C in `stop`, and then a save of what there is: the thread may still be at work on the arena."""
    stager = FakeStager()
    reached, go_on = threading.Event(), threading.Event()
    stager.on_piece = lambda: (reached.set(), go_on.wait(120))[0]  # type: ignore[func-returns-value]
    preparation = preparation_of(stager)
    preparation.start(Looks({"model": model()}))
    assert reached.wait(120)

    class Interrupted(HelperThread):
        def wait(self) -> None:
            raise KeyboardInterrupt

    thread = preparation._thread
    assert thread is not None
    thread.__class__ = Interrupted
    with pytest.raises(KeyboardInterrupt):
        preparation.stop()
    thread.__class__ = HelperThread
    assert preparation.is_running
    go_on.set()
    preparation.stop()
    assert not thread.is_alive()
    assert stager.calls.count("piece") == 1


def test_stopping_twice_or_before_the_start_or_in_the_thread_itself_does_no_harm() -> None:
    stager = FakeStager()
    preparation = preparation_of(stager)
    preparation.stop()
    stager = FakeStager()
    preparation = preparation_of(stager)
    stager.on_piece = preparation.stop
    preparation.start(Looks({"model": model()}))
    wait_for(lambda: not any(thread.name == "holdfast-prepare" for thread in threading.enumerate()))
    preparation.stop()
    preparation.stop()
    assert stager.calls.count("piece") == 1


def test_an_optimizer_without_state_is_waited_for() -> None:
    one = model()
    optimizer = torch.optim.AdamW(one.parameters())
    state = {"model": one, "optimizer": optimizer}
    looks: list[int] = []

    def components() -> Mapping[str, Any] | None:
        looks.append(len(stager.calls))
        if len(looks) == 4:
            one(torch.ones(10)).sum().backward()
            optimizer.step()
        return state if len(looks) < 6 else None

    stager = FakeStager()
    finish(preparation_of(stager, Waits(begin=0.0, growing=LONG, look=0.0)), components)
    assert looks[:4] == [1] * 4, "nothing but the writer before the first step"
    assert stager.calls[1] == ("reserve", 3 * MODEL_BYTES + 8)


def test_an_optimizer_that_gets_no_state_is_not_waited_for_long_and_a_late_one_gets_a_larger_arena() -> None:
    one = model()
    optimizer = torch.optim.AdamW(one.parameters())
    state = {"model": one, "optimizer": optimizer}
    looks: list[int] = []

    def components() -> Mapping[str, Any] | None:
        looks.append(len(stager.calls))
        if len(looks) == 3:
            one(torch.ones(10)).sum().backward()
            optimizer.step()
        return state if len(looks) < 5 else None

    stager = FakeStager()
    finish(preparation_of(stager), components)
    assert stager.calls == [*READY, ("reserve", 3 * MODEL_BYTES + 8), *READY[2:]]


def test_a_component_that_is_attached_later_gets_room() -> None:
    first, second = {"model": model()}, {"model": model(), "ema": model(20)}
    stager = FakeStager()
    finish(preparation_of(stager), Looks(first, second))
    assert stager.calls[6] == ("reserve", MODEL_BYTES + 1680)


def test_a_state_of_no_tensors_needs_no_arena_and_is_looked_at_again() -> None:
    stager = FakeStager()
    finish(preparation_of(stager), Looks({}, {"loader": object()}, {"model": model()}))
    assert stager.calls == READY


class Changing(nn.Module):
    """A model whose parameters cannot be walked through now and then, as while the training changes a dict."""

    def __init__(self, fails: list[bool]) -> None:
        super().__init__()
        self.inner, self.fails = model(), fails

    def parameters(self, recurse: bool = True) -> Any:
        if self.fails.pop(0):
            raise RuntimeError("dictionary changed size during iteration")
        return super().parameters(recurse)


def test_a_state_that_changes_at_the_moment_is_looked_at_again() -> None:
    state = {"model": Changing([True, True, False])}
    stager = FakeStager()
    finish(preparation_of(stager), Looks(state, state, state))
    assert stager.calls == READY


@pytest.mark.parametrize("options", [{"limit_bytes": 100}, {"free_bytes": lambda: 100}])
def test_an_arena_over_the_limit_or_the_memory_that_is_free_is_not_made(options: dict[str, Any]) -> None:
    stager = FakeStager()
    looks = Looks({"model": model()}, {"model": model()})
    finish(preparation_of(stager, **options), looks)
    assert stager.calls == ["writer", "refused"]
    assert len(looks.states) == 1, "it looks no more"


def test_the_ranks_of_a_machine_share_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    share = ranks_here()
    assert share >= 4
    for free, calls in ((share * MODEL_BYTES - 1, ["writer", "refused"]), (share * MODEL_BYTES, READY)):
        stager = FakeStager()
        finish(preparation_of(stager, free_bytes=lambda free=free: free), Looks({"model": model()}))
        assert stager.calls == calls


def test_memory_that_is_held_counts_when_a_larger_arena_takes_its_place() -> None:
    stager = FakeStager()
    later_bytes = 1680
    finish(
        # What is free is shared out, and a test before this one may have counted ranks of this machine.
        preparation_of(stager, free_bytes=lambda: ranks_here() * (later_bytes - stager.held_bytes)),
        Looks({"model": model()}, {"model": model(20)}),
    )
    assert stager.calls == [*READY, ("reserve", later_bytes), *READY[2:]]


def test_an_arena_is_given_back_when_the_training_takes_the_memory_meanwhile() -> None:
    stager = FakeStager()
    finish(
        preparation_of(stager, free_bytes=lambda: 300 if stager.taken else PLENTY, limit_bytes=PLENTY),
        Looks({"model": model(11)}),
    )
    assert stager.calls == ["writer", ("reserve", 528), "piece", "close"]


def test_each_rank_gets_ready_for_its_share() -> None:
    stager = FakeStager()
    finish(preparation_of(stager, ranks=4), Looks({"model": model()}))
    assert stager.calls[1] == ("reserve", MODEL_BYTES // 4)


def test_it_looks_no_more_after_some_time() -> None:
    stager = FakeStager()
    finish(preparation_of(stager, Waits(begin=0.0, growing=0.0, look=0.0, last_look=0.0)), lambda: {"model": model()})
    assert stager.calls == ["writer"]


def test_what_fails_ends_it_and_nothing_is_raised(caplog: pytest.LogCaptureFixture) -> None:
    def fail() -> None:
        raise StorageError("no memory is left")

    caplog.set_level("DEBUG", logger="holdfast")
    stager = FakeStager()
    stager.on_piece = fail
    finish(preparation_of(stager), Looks({"model": model()}, {"model": model()}))
    assert stager.calls == READY[:3]
    (record,) = caplog.records
    assert record.levelname == "DEBUG"
    assert "StorageError: no memory is left" in record.message


def test_the_objects_are_not_held_between_two_looks() -> None:
    one = model()
    gone = weakref.ref(one)
    state: dict[str, Any] = {"model": one}
    looked = threading.Event()

    class Held:
        live: Mapping[str, Any] = state

    holder: list[Held] = [Held()]
    weak = weakref.ref(holder[0])

    def components() -> Mapping[str, Any] | None:
        held = weak()
        return held.live if held is not None else None

    stager = FakeStager()
    stager.on_piece = looked.set
    preparation = preparation_of(stager, Waits(begin=0.0, growing=0.0, look=0.05))
    preparation.start(components)
    assert looked.wait(120)
    Held.live = {}
    holder.clear()
    state.clear()
    del one
    gc.collect()
    wait_for(lambda: not preparation.is_running)
    assert gone() is None
    preparation.stop()


def test_cancel_ends_the_thread_without_waiting_for_it() -> None:
    preparation = preparation_of(FakeStager(), Waits(begin=LONG))
    preparation.start(Looks())
    preparation.cancel()
    wait_for(lambda: not preparation.is_running)


def test_a_forked_child_waits_for_no_thread() -> None:
    stager = FakeStager()
    preparation = preparation_of(stager, Waits(begin=LONG))
    preparation.start(Looks())
    child = os.fork()
    if child == 0:
        preparation.cancel()
        preparation.stop()
        os._exit(7)
    wait_for(lambda: os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert preparation.is_running
    preparation.stop()


def test_a_thread_that_cannot_be_started_is_no_failure() -> None:
    """As at the end of a process."""
    code = """
import threading
from holdfast.saving.preparation import Preparation

def refuse(*arguments, **named):
    raise RuntimeError("can't start new thread")

threading._start_new_thread = threading._start_joinable_thread = refuse
preparation = Preparation(None, None, ranks=1)
preparation.start(lambda: {})
assert not preparation.is_running
preparation.stop()
print("went on")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("went on\n", 0), done.stderr


def test_a_pause_keeps_the_thread_from_the_arena_and_it_goes_on_afterwards() -> None:
    stager = FakeStager()
    preparation = preparation_of(stager)
    preparation.pause()
    preparation.start(Looks({"model": model()}, {"model": model()}))
    wait_for(lambda: "writer" in stager.calls)
    time.sleep(0.2)
    assert stager.calls == ["writer"]
    preparation.resume()
    wait_for(lambda: not preparation.is_running)
    assert stager.calls == READY


def test_a_pause_waits_for_the_piece_that_is_being_taken() -> None:
    stager, taking, goes_on = FakeStager(), threading.Event(), threading.Event()

    def take() -> None:
        taking.set()
        goes_on.wait(30)

    stager.on_piece = take
    preparation = preparation_of(stager)
    preparation.start(Looks({"model": model()}))
    assert taking.wait(30)
    paused = threading.Event()

    def pause() -> None:
        preparation.pause()
        paused.set()

    pausing = threading.Thread(target=pause)
    pausing.start()
    assert not paused.wait(0.2)
    goes_on.set()
    assert paused.wait(30)
    pausing.join()
    preparation.stop()


def test_a_thread_that_is_paused_can_be_stopped() -> None:
    stager = FakeStager()
    preparation = preparation_of(stager)
    preparation.pause()
    preparation.start(Looks({"model": model()}))
    wait_for(lambda: "writer" in stager.calls)
    preparation.stop()
    assert stager.calls == ["writer"]
