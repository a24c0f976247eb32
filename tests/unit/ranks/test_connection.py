"""A connection to a store whose host is stopped: calls end in time, fail at once then, and work when it continues."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore

from holdfast.errors import RankError
from holdfast.ranks.connection import Connection
from tests.sizes import some

TIMEOUT_SECONDS = 0.5
# Far more than anything here takes on a busy machine, and far less than the store's own limit of 300 s.
PATIENCE_SECONDS = 60.0
HOST = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def host() -> Iterator[tuple[int, int]]:
    """A process that hosts a store: its number and its port."""
    process = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    yield process.pid, int(process.stdout.readline())
    os.kill(process.pid, signal.SIGCONT)
    process.communicate("")


def stop(process: int) -> None:
    """Stop a process, and return when each of its threads is."""
    os.kill(process, signal.SIGSTOP)
    tasks = list(Path(f"/proc/{process}/task").iterdir())
    while not all((task / "stat").read_text().rpartition(")")[2].split()[0] in "tT" for task in tasks):
        time.sleep(0.001)


def connecting_threads() -> set[threading.Thread]:
    """Return the threads that open a connection."""
    return {thread for thread in threading.enumerate() if thread.name == "holdfast-connect"}


def seconds_of_failure(work: Callable[[], Any]) -> tuple[RankError, float]:
    begin = time.monotonic()
    with pytest.raises(RankError) as caught:
        work()
    return caught.value, time.monotonic() - begin


def eventually(work: Callable[[], Any]) -> Any:
    """Return what the work returns as soon as it is done in time: a busy machine may take longer than the limit."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return work()
        except RankError:
            assert time.monotonic() < deadline


def connected(store: Any, timeout_seconds: float = TIMEOUT_SECONDS) -> Connection:
    """Return a connection with a short limit that has set a key."""
    connection: Connection = eventually(lambda: Connection(store, timeout_seconds))
    eventually(lambda: connection.call("set", "a", b"1"))
    return connection


CALLS: dict[str, Callable[[Connection], Any]] = {
    "a question": lambda connection: connection.call("compare_set", "a", "x", "x"),
    "a check": lambda connection: connection.call("check", ["a"]),
    "a value": lambda connection: connection.call("get", "a"),
    "a counter": lambda connection: connection.call("add", "b", 1),
    "a deletion": lambda connection: connection.call("delete_key", "c"),
    # More than the buffers between two processes hold.
    "large values": lambda connection: [connection.call("set", f"d{number}", b"x" * (4 << 20)) for number in range(8)],
}


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("call", some(CALLS.values(), 2), ids=some(CALLS, 2))
def test_a_host_that_is_stopped_is_named_in_time_and_calls_work_again_when_it_continues(
    call: Callable[[Connection], Any], host: tuple[int, int]
) -> None:
    process, port = host
    connection = connected(PrefixStore("x", TCPStore("127.0.0.1", port, is_master=False)))
    eventually(lambda: connection.call("set", "c", b"1"))
    before = connecting_threads()
    stop(process)
    try:
        error, seconds = seconds_of_failure(lambda: call(connection))
        assert TIMEOUT_SECONDS / 2 < seconds < PATIENCE_SECONDS
        assert error.ranks == (0,)
        assert "rank 0" in str(error)
        assert f"127.0.0.1:{port}" in str(error)
        for _ in range(3):
            assert seconds_of_failure(lambda: call(connection))[1] < PATIENCE_SECONDS
        started = connecting_threads() - before
        assert len(started) == 1, "later calls start no more of them"
    finally:
        os.kill(process, signal.SIGCONT)
    for thread in started:
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive()
    assert eventually(lambda: connection.call("get", "a")) == b"1"
    eventually(lambda: call(connection))


@pytest.mark.guarantee("G5")
@pytest.mark.parametrize("call", some(CALLS.values(), 2), ids=some(CALLS, 2))
def test_a_host_that_is_gone_is_named_in_time(call: Callable[[Connection], Any]) -> None:
    process = subprocess.Popen([sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    # It fails at once, and not by its limit, which a busy machine must not reach.
    connection = connected(PrefixStore("x", TCPStore("127.0.0.1", port, is_master=False)), 10.0)
    process.kill()
    process.communicate()
    for _ in range(3):
        error, seconds = seconds_of_failure(lambda: call(connection))
        assert seconds < PATIENCE_SECONDS
        assert error.ranks == (0,)
        assert "which rank 0 hosts, cannot be reached: " in str(error)
        assert f"127.0.0.1:{port}" in str(error)
        assert "\n" not in str(error)
    for thread in connecting_threads():
        thread.join(PATIENCE_SECONDS)
        assert not thread.is_alive(), "torch's own limit is not waited for"


@pytest.mark.guarantee("G5")
def test_a_connection_to_a_host_that_is_stopped_is_given_up_in_time(host: tuple[int, int]) -> None:
    process, port = host
    original = TCPStore("127.0.0.1", port, is_master=False)
    stop(process)
    try:
        assert seconds_of_failure(lambda: Connection(original, TIMEOUT_SECONDS))[1] < PATIENCE_SECONDS
    finally:
        os.kill(process, signal.SIGCONT)


def test_the_training_s_own_connection_keeps_its_time_limit(host: tuple[int, int]) -> None:
    _, port = host
    original = TCPStore("127.0.0.1", port, is_master=False)
    before = original.timeout
    connected(original)
    assert original.timeout == before


def test_under_torchrun_the_agent_is_what_is_named(host: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    process, port = host
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    connection = connected(TCPStore("127.0.0.1", port, is_master=False))
    stop(process)
    try:
        error, _ = seconds_of_failure(lambda: connection.call("check", ["a"]))
    finally:
        os.kill(process, signal.SIGCONT)
    assert "the agent of torchrun" in str(error)


def test_a_store_without_a_host_is_called_as_it_is() -> None:
    connection = Connection(HashStore(), TIMEOUT_SECONDS)
    connection.call("set", "a", b"1")
    assert connection.call("get", "a") == b"1"
