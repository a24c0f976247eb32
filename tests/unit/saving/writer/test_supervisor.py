"""When a writer is started, and what becomes of one that has exited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.saving.staging.arena import Arena
from holdfast.saving.writer.messages import Layout
from holdfast.saving.writer.supervisor import WriterSupervisor
from holdfast.storage.local.local import LocalStorage

LAYOUT = Layout(1, (), None)


@pytest.fixture
def arena() -> Iterator[Arena]:
    arena = Arena.make(4096)
    yield arena
    arena.close()


def test_a_writer_that_runs_is_used_again_and_one_that_has_exited_is_replaced(
    tmp_path: Path, arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = WriterSupervisor(LocalStorage(tmp_path))
    first = supervisor.ready_writer(arena, LAYOUT)
    assert supervisor.ready_writer(arena, LAYOUT) is first
    assert not supervisor.discard_dead_writer(3)
    first.kill()
    assert not supervisor.discard_dead_writer(3), "a process that was killed reads nothing any more"
    assert "after step 3; a new one is started" in caplog.text
    assert supervisor.writer is None
    assert supervisor.ready_writer(arena, LAYOUT) is not first
    supervisor.shut_down()
    assert supervisor.writer is None
