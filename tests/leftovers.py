"""Look at the end of each file of tests for what it has left: threads, arenas and processes, and who made them.

What is left fails that file, and not one that comes later in the same process.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.testing.processes import descendants
from tests.limits import command_of

__all__ = ["Leftovers", "arenas", "own_writer", "threads", "writers"]

_WAIT_SECONDS = 20.0
# They serve later tests, too.
_SERVERS = ("multiprocessing.forkserver", "multiprocessing.resource_tracker", "attacks._server")


def threads() -> set[str]:
    """Return the threads of Holdfast in this process, each as "thread NAME (ID)"."""
    return {f"thread {one.name} ({one.native_id})" for one in threading.enumerate() if one.name.startswith("holdfast-")}


def arenas() -> set[str]:
    """Return the staging memory of asynchronous saves that is mapped into this process, as "arena ADDRESSES"."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {f"arena {line.split()[0]}" for line in lines if "holdfast-arena" in line}


def writers() -> list[int]:
    """Return the writer processes that this process has started."""
    return [one for one in descendants(os.getpid()) if "holdfast.saving.writer" in command_of(one)]


def own_writer() -> int:
    """Return the only one of them."""
    (found,) = writers()
    return found


class Leftovers:
    """What the tests of the current file have made and not ended, with the first test after which it was there."""

    def __init__(self) -> None:
        self._path: Path | None = None
        self._before: set[str] = set()
        self._makers: dict[str, str] = {}
        self._ends: list[tuple[float, str]] = []
        self._mapped = ""

    @pytest.hookimpl(wrapper=True, trylast=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        if item.path != self._path:
            self._path, self._before, self._makers, self._ends = item.path, _found(), {}, []
        return (yield)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_teardown(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        result = yield
        # All processes are looked at once, at the end of the file: they know when they were started.
        self._ends.append((time.clock_gettime(time.CLOCK_BOOTTIME), item.name))
        mapped = Path("/proc/self/statm").read_text().split()[0]
        # A list of all mappings takes long: only where this process has another size than after the test before.
        made = threads() if mapped == self._mapped else threads() | arenas()
        self._mapped = mapped
        for one in made - self._before:
            self._makers.setdefault(one, item.name)
        if nextitem is None or nextitem.path != item.path:
            # What the last test was given is not dropped before this has returned.
            getattr(item, "funcargs", {}).clear()
            self._check()
        return result

    def _check(self) -> None:
        left = _settled(self._before)
        lines = [f"{one}, of {self._maker_of(one)}" for one in sorted(left)]
        for one in left:
            if one.startswith("process "):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(one.split()[1]), signal.SIGKILL)
        if left:
            pytest.fail("this file left behind:\n" + "\n".join(lines), pytrace=False)

    def _maker_of(self, one: str) -> str:
        if one.startswith("process "):
            begin = _begin_of(int(one.split()[1]))
            return next((name for end, name in self._ends if begin < end), "a test of the file")
        return self._makers.get(one, "a fixture of the file")


def _found() -> set[str]:
    processes = {process: command_of(process) for process in descendants(os.getpid())}
    others = {
        f"process {process} {command:.200}"
        for process, command in processes.items()
        # Frameworks have servers of their own, which are no Python.
        if Path(command.partition(" ")[0]).name.startswith("python")
        and not any(server in command for server in _SERVERS)
    }
    return threads() | arenas() | others


def _begin_of(process: int) -> float:
    """Return when a process was started, in seconds since the start of the machine; 0 if it has ended."""
    with contextlib.suppress(OSError):
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _settled(before: set[str]) -> set[str]:
    """Return what is still there after it had time to end by itself."""
    end = time.monotonic() + _WAIT_SECONDS
    while left := _found() - before:
        gc.collect()
        if time.monotonic() > end:
            break
        time.sleep(0.05)
    return left
