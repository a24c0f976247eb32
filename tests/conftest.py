"""Make every start of the suite alike: from a terminal, in the background, with one worker or several."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable

import pytest

from tests.leftovers import Leftovers
from tests.limits import TimeLimits
from tests.sizes import DEEP

# Of the order of the files in a deep run.
_SEED = "HOLDFAST_ORDER_SEED"


def pytest_configure(config: pytest.Config) -> None:
    """Let SIGINT interrupt the processes that tests start, and watch over the time and the leftovers of tests.

    A shell that runs a job in the background makes it ignore SIGINT, and every process that it starts inherits that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    # TCPStore looks up the name of every address that connects to it, in the thread that answers all ranks. A lost
    # answer of the name server stops that thread for five seconds, which is longer than some time limits of tests.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    if DEEP:
        # Here, in the first process: all workers must have the same order.
        os.environ.setdefault(_SEED, str(random.SystemRandom().randrange(1 << 32)))
    config.pluginmanager.register(TimeLimits())
    config.pluginmanager.register(Leftovers())


def pytest_report_header() -> list[str]:
    return [f"deep run, order of files by {_SEED}={os.environ[_SEED]}"] if DEEP else []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is for a deep run; run the many short files last, or, in a deep run, shuffle the files.

    A worker that gets a long file at the end leaves the others without work.
    """
    if not DEEP:
        deep = [item for item in items if item.get_closest_marker("deep")]
        config.hook.pytest_deselected(items=deep)
        items[:] = [item for item in items if not item.get_closest_marker("deep")]
        items.sort(key=lambda item: "unit" in item.path.parts)
        return
    files = sorted({item.path for item in items})
    random.Random(int(os.environ[_SEED])).shuffle(files)
    places = {path: place for place, path in enumerate(files)}
    items.sort(key=lambda item: places[item.path])


@pytest.fixture
def new_threads() -> Callable[[], list[str]]:
    """The names of the threads of Holdfast that began since the test did: those of other tests may still be here."""
    before = set(threading.enumerate())
    return lambda: [one.name for one in threading.enumerate() if one not in before and one.name.startswith("holdfast-")]
