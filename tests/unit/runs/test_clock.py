"""Times in records: written with a zone, and read without trust."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest

from holdfast.runs.clock import seconds_since, timestamp


def test_a_timestamp_is_in_utc_and_has_just_passed() -> None:
    assert datetime.fromisoformat(timestamp()).utcoffset() == timedelta(0)
    before = (datetime.now(UTC) - timedelta(hours=1)).isoformat()
    assert seconds_since(before) >= 3600 > seconds_since(timestamp())


@pytest.mark.parametrize("text", ["", "now", "2001-01-01T00:00:00", "9999-01-01T00:00:00+00:00", None, 7])
def test_a_time_that_makes_no_sense_or_is_yet_to_come_has_just_passed(text: object) -> None:
    assert seconds_since(text) == 0.0  # type: ignore[arg-type]
