"""Make every start of the suite alike: from a terminal, in the background, with one worker or several."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable

import pytest


def pytest_configure() -> None:
    """Let SIGINT interrupt the processes that tests start.

    A shell that runs a job in the background makes it ignore SIGINT, and every process that it starts inherits that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # TCPStore looks up the name of every address that connects to it, in the thread that answers all ranks. A lost
    # answer of the name server stops that thread for five seconds, which is longer than some time limits of tests.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the many short files last: a worker that gets a long one at the end leaves the others without work."""
    items.sort(key=lambda item: "unit" in item.path.parts)


@pytest.fixture
def new_threads() -> Callable[[], list[str]]:
    """The names of the threads of Holdfast that began since the test did: those of other tests may still be here."""
    before = set(threading.enumerate())
    return lambda: [one.name for one in threading.enumerate() if one not in before and one.name.startswith("holdfast-")]
