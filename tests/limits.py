"""End a test that takes too long: print the stacks of all its processes, end them, and let it alone fail.

A test has 60 s, or what `@pytest.mark.limit(seconds)` says; what its fixtures do before and after it has 180. On a busy
machine a test takes longer: one whose processes still work gets up to 180 s. One thread looks at the time. It raises in
the main thread, where the test runs, by a signal of its own; a main thread that does not answer, because it stands
still outside of Python, is ended with its process, and pytest-xdist goes on with another one.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.testing.processes import descendants

__all__ = ["TimeLimits", "command_of"]

_TEST_SECONDS = 60.0
_FIXTURES_SECONDS = 180.0
_LOOK_SECONDS = 0.5
_GRACE_SECONDS = 10.0
_LAST_GRACE_SECONDS = 60.0
# A test that uses less processor time than this in ten seconds stands still.
_WORK_SECONDS = 0.5
_SIGNAL = signal.SIGRTMIN + 7
_EXIT_CODE = 97


class TimeLimits:
    """The time limits of one process that runs tests."""

    def __init__(self) -> None:
        self._deadline: float | None = None
        # When a test that works is ended, too, and the processor time that its processes had used at the last look.
        self._last = self._worked = 0.0
        self._what = ""
        self._stacks = ""
        # What pytest captures is lost where the process must be ended.
        self._output = os.dup(2)
        signal.signal(_SIGNAL, self._fail)
        threading.Thread(target=self._watch, name="time-limits", daemon=True).start()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> Iterator[None]:
        with self._limited(f"the fixtures of {item.nodeid}", _FIXTURES_SECONDS):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        mark = item.get_closest_marker("limit")
        seconds = float(mark.args[0]) if mark else _TEST_SECONDS
        # For code that keeps the GIL, so that the thread cannot look. Nothing but the stacks of this process is shown.
        limit = max(seconds, _FIXTURES_SECONDS) + 6 * _GRACE_SECONDS
        faulthandler.dump_traceback_later(limit, exit=True, file=self._output)
        try:
            with self._limited(item.nodeid, seconds):
                return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_teardown(self, item: pytest.Item) -> Iterator[None]:
        with self._limited(f"the fixtures of {item.nodeid}", _FIXTURES_SECONDS):
            return (yield)

    @contextlib.contextmanager
    def _limited(self, what: str, seconds: float) -> Iterator[None]:
        self._what = f"{what} took more than {seconds:g} s"
        self._last = time.monotonic() + max(seconds, _FIXTURES_SECONDS)
        self._worked = 0.0
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None

    def _watch(self) -> None:
        while True:
            time.sleep(_LOOK_SECONDS)
            deadline = self._deadline
            if deadline is None or time.monotonic() < deadline:
                continue
            worked = _processor_seconds()
            if worked - self._worked > _WORK_SECONDS and time.monotonic() < self._last:
                self._worked = worked
                # Another test may have begun: its deadline is later than this one.
                self._deadline = deadline + _GRACE_SECONDS if self._deadline == deadline else self._deadline
            else:
                self._end(deadline)

    def _end(self, deadline: float) -> None:
        processes = descendants(os.getpid())
        self._stacks = "\n".join([_own_stacks(), *map(_stacks_of, processes)])
        if self._deadline != deadline:
            return  # it has ended meanwhile
        for process in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
        end = time.monotonic() + _LAST_GRACE_SECONDS
        while self._deadline == deadline:
            if time.monotonic() > end:
                os.write(self._output, f"{self._what}, and does not end\n{self._stacks}\n".encode())
                os._exit(_EXIT_CODE)
            time.sleep(_LOOK_SECONDS)

    def _fail(self, number: int, frame: Any) -> None:
        if self._deadline is not None:
            pytest.fail(f"{self._what}\n{self._stacks}", pytrace=False)


def command_of(process: int) -> str:
    """Return the command line of a process, empty where it has ended."""
    command = b""
    with contextlib.suppress(OSError):
        # In the moment in which a process begins another program it has none. One that has ended stays without.
        while not command and _is_running(process):
            command = Path(f"/proc/{process}/cmdline").read_bytes()
    return command.replace(b"\0", b" ").decode(errors="replace").strip()


def _is_running(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"


def _processor_seconds() -> float:
    """Return the processor time that this process and all that it has started have used."""
    ticks = 0
    for process in [os.getpid(), *descendants(os.getpid())]:
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def _own_stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return f"--- process {os.getpid()}, of the test\n{file.read()}"


def _stacks_of(process: int) -> str:
    head = f"--- process {process}: {command_of(process):.200}"
    viewer = shutil.which("py-spy", path=f"{Path(sys.executable).parent}:{os.environ.get('PATH', '')}")
    if viewer is None:
        return f"{head}\n(py-spy is not installed: no stack)"
    with contextlib.suppress(subprocess.TimeoutExpired):
        shown = subprocess.run([viewer, "dump", "--pid", str(process)], capture_output=True, text=True, timeout=10)
        return f"{head}\n{shown.stdout or shown.stderr}"
    return f"{head}\n(no stack within 10 s)"
