"""The heartbeat of a claim goes on while it should, also after an error, and stops when the claim is lost."""

from __future__ import annotations

import itertools
import logging
import threading
from datetime import UTC, datetime
from typing import Any

import pytest

from holdfast.errors import StorageError
from holdfast.runs.heartbeat import Heartbeat
from holdfast.testing import MemoryStorage
from tests.unit.runs.scene import (
    GONE,
    acquire,
    names,
)


class FailingBeats(MemoryStorage):
    """A storage on which the first beats fail."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error: Exception | None = error
        self.failed, self.beat = threading.Event(), threading.Event()

    def put(self, key: str, data: bytes) -> None:
        if ".beat-" in key and self.error is not None:
            self.failed.set()
            raise self.error
        super().put(key, data)
        if ".beat-" in key:
            self.beat.set()


@pytest.mark.parametrize(
    "error",
    [StorageError("a bad day"), OSError("a bad day"), RuntimeError("a bad day"), ValueError("a bad day")],
    ids=lambda error: type(error).__name__,
)
def test_a_heartbeat_goes_on_after_an_error_of_any_type(error: Any, caplog: pytest.LogCaptureFixture) -> None:
    storage = FailingBeats(error)
    storage.put("lease/000000001.json", b"{}")
    heart = Heartbeat.of_lease(storage, 1, 0.06)
    heart.start()
    assert storage.failed.wait(300)
    storage.error = None
    assert storage.beat.wait(300), "without a beat another machine would take the run over"
    heart.stop()
    assert "a bad day" in caplog.text


def test_a_heart_adds_a_beat_and_takes_the_last_one_away(storage: Any) -> None:
    heart = acquire(storage)._heartbeat
    assert [heart.beat(), heart.beat(), heart.beat()] == [True, True, True]
    assert names(storage) == ["000000001.beat-000000003", "000000001.json"]
    said = storage.read("lease/000000001.beat-000000003", 100).decode().strip()
    assert abs((datetime.now(UTC) - datetime.fromisoformat(said)).total_seconds()) < 60


def test_two_who_speak_for_one_claim_do_not_disturb_each_other(storage: Any) -> None:
    acquire(storage)
    hearts = [Heartbeat.of_lease(storage, 1), Heartbeat.of_lease(storage, 1)]
    for _ in range(5):
        assert all(heart.beat() for heart in hearts)
    assert names(storage) == ["000000001.beat-000000010", "000000001.json"]


def test_a_heart_stops_when_the_claim_is_overtaken_or_gone(storage: Any) -> None:
    heart = acquire(storage, GONE)._heartbeat
    acquire(storage)
    before = names(storage)
    assert heart.beat() is False
    assert names(storage) == before
    assert Heartbeat.of_lease(storage, 9).beat() is False


def test_a_heart_beats_while_it_lives_and_only_if_it_should(storage: Any) -> None:
    acquire(storage)
    may, beaten = threading.Event(), threading.Event()

    class Watched(Heartbeat):
        def beat(self) -> bool:
            beaten.set()
            return super().beat()

    heart = Watched.of_lease(storage, 1, timeout_seconds=0.03, only_if=may.is_set)
    heart.start()
    assert not beaten.wait(0.1)
    may.set()
    assert beaten.wait(300)
    heart.stop()


def test_a_heart_survives_a_storage_that_fails_for_a_while(storage: Any, caplog: pytest.LogCaptureFixture) -> None:
    acquire(storage)
    beaten, failures = threading.Event(), itertools.count()

    class Stumbling(Heartbeat):
        def beat(self) -> bool:
            if next(failures) < 3:
                raise StorageError("the disk has a bad day")
            beaten.set()
            return super().beat()

    with caplog.at_level(logging.WARNING, logger="holdfast"):
        heart = Stumbling.of_lease(storage, 1, timeout_seconds=0.03)
        heart.start()
        assert beaten.wait(300)
        heart.stop()
    assert caplog.text.count("a heartbeat could not be written") == 1
