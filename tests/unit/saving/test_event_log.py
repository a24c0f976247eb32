"""The last events of a saver."""

from __future__ import annotations

import pytest

from holdfast.runs.events import Event
from holdfast.saving.event_log import EventLog


def test_a_callback_that_fails_loses_no_event(caplog: pytest.LogCaptureFixture) -> None:
    def fail(event: Event) -> None:
        raise ValueError(event.kind)

    log = EventLog(fail)
    log.emit(Event("started", 1, 0, 0.0))
    assert [event.kind for event in log.recent] == ["started"]
    assert "on_event failed for 'started'" in caplog.text


def test_only_the_last_events_are_kept() -> None:
    log = EventLog(None)
    for step in range(1000):
        log.emit(Event("started", step, 0, 0.0))
    assert [event.step for event in log.recent] == list(range(1000 - len(log.recent), 1000))
    assert len(log.recent) < 1000
