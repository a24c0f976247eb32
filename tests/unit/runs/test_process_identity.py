"""A process is seen alive, seen dead, or unknown."""

from __future__ import annotations

import os

from holdfast.runs.process_identity import Identity, birth_of, is_alive, this_process
from tests.unit.runs.scene import (
    GONE,
    HOST,
    MACHINE,
    NEIGHBOUR,
    far,
)


def test_is_alive_knows_this_machine_alone() -> None:
    assert is_alive(this_process()) is True
    assert is_alive(NEIGHBOUR) is True
    assert is_alive(GONE) is False
    assert is_alive(far()) is None
    assert is_alive(Identity(HOST, "", os.getpid(), 1)) is None


def test_a_process_that_only_waits_to_be_counted_is_dead() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0)
    birth = birth_of(child)
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
    assert is_alive(Identity(HOST, MACHINE, child, birth if birth is not None else 1)) is False
    os.waitpid(child, 0)
