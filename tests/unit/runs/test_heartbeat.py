"""The heartbeat of a lease goes on after an error, of whatever type a storage raises."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from holdfast.errors import StorageError
from holdfast.runs.heartbeat import Heartbeat
from holdfast.testing import MemoryStorage


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
    assert storage.failed.wait(30)
    storage.error = None
    assert storage.beat.wait(30), "without a beat another machine would take the run over"
    heart.stop()
    assert "a bad day" in caplog.text
