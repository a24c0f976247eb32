"""When a writer is started, and what becomes of one that has exited."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast.saving.staging.arena import Arena
from holdfast.saving.writer.client import Writer, start_writer
from holdfast.saving.writer.messages import Layout
from holdfast.saving.writer.supervisor import WriterSupervisor
from holdfast.storage.base import Storage
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import MemoryStorage

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


def test_a_writer_that_was_started_early_is_the_one_that_a_save_gets(tmp_path: Path, arena: Arena) -> None:
    started: list[Writer] = []

    def start(storage: Storage) -> Writer:
        started.append(start_writer(storage))
        return started[-1]

    supervisor = WriterSupervisor(LocalStorage(tmp_path), start)
    supervisor.start_early()
    supervisor.start_early()
    assert supervisor.ready_writer(arena, LAYOUT) is started[0]
    assert len(started) == 1
    supervisor.shut_down()
    assert started[0].is_gone()


def test_a_writer_that_would_be_a_thread_is_not_started_early(arena: Arena) -> None:
    supervisor = WriterSupervisor(MemoryStorage())
    supervisor.start_early()
    assert supervisor.writer is None
    assert supervisor.ready_writer(arena, LAYOUT).process_id is None
    supervisor.shut_down()


def test_a_writer_that_exits_before_the_first_save_is_replaced_without_a_warning(
    tmp_path: Path, arena: Arena, caplog: pytest.LogCaptureFixture
) -> None:
    supervisor = WriterSupervisor(LocalStorage(tmp_path))
    supervisor.start_early()
    first = supervisor.writer
    assert first is not None
    first.kill()
    assert not supervisor.discard_dead_writer(None)
    assert supervisor.ready_writer(arena, LAYOUT) is not first
    assert caplog.text == ""
    supervisor.shut_down()
