"""What a key of a configuration takes, and what it refuses."""

from __future__ import annotations

import datetime
from typing import Any

import numpy
import pytest

from holdfast.errors import UsageError
from holdfast.plugins.config_values import (
    BOOLEAN,
    COUNT,
    DURATION,
    SECONDS,
    SIGNALS,
    STEPS,
    TEXT,
    TIME_LIMIT,
    Wanted,
    check_keys,
    check_value,
    one_of,
)


@pytest.mark.parametrize(
    ("wanted", "fitting", "others"),
    [
        (COUNT, [1, 2**70], [0, -1, True, 1.0, "1", None]),
        (TEXT, ["a"], ["", 5, None, b"a"]),
        (BOOLEAN, [True, False], [0, 1, "yes", None]),
        (SECONDS, [1, 0.5, numpy.float64(2), float("inf")], [0, -1, True, "1", float("nan"), None]),
        (STEPS, [[1], (0, 2), {3}, []], [[-1], [True], [1.5], 5, "12", None]),
        (SIGNALS, ["SIGTERM", ["SIGTERM", "SIGUSR1"]], [[], "", [""], 15, [15]]),
        (DURATION, ["90s", datetime.time(3, 50)], ["", 230, True, None]),
        (TIME_LIMIT, ["90s", True, {}, {"limit": "1h"}], ["", 230, ["1h"], None]),
        (one_of(("min", "max")), ["min", "max"], ["mim", True, None, ["min"]]),
    ],
    ids=["count", "text", "boolean", "seconds", "steps", "signals", "duration", "time limit", "one of"],
)
def test_a_key_takes_what_its_words_say(wanted: Wanted, fitting: list[Any], others: list[Any]) -> None:
    for value in fitting:
        check_value("key", value, wanted)
    for value in others:
        with pytest.raises(UsageError, match="'key' takes "):
            check_value("key", value, wanted)


def test_a_key_that_stands_in_the_wrong_place_is_named_where_it_belongs() -> None:
    with pytest.raises(UsageError, match=r"did you mean 'save\.every_steps'\?"):
        check_keys("", {"every_steps": 5}, ["run"], {"save": ["every_steps"]})
