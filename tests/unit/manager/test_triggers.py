"""Triggers fire when they state; they and policies join with their own kind alone; what cannot be meant is refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import example, given, settings, strategies as st

from holdfast.errors import UsageError
from holdfast.manager import triggers
from holdfast.manager.triggers import AnyOf, At, Every, Moment, OnLastStep, OnSignal, TimeLimit, Trigger, Wish, split
from holdfast.runs import retention
from holdfast.runs.retention import (
    KeepAll,
    KeepAny,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    KeepTagged,
)

steady = settings(derandomize=True, deadline=None, max_examples=100)

with pytest.MonkeyPatch.context() as _outside_of_any_job:
    _outside_of_any_job.delenv("SLURM_JOB_END_TIME", raising=False)
    TRIGGERS: tuple[Trigger, ...] = (
        Every(steps=500),
        Every(epochs=2),
        Every(minutes=0.5),
        At(100, 7),
        OnLastStep(1000),
        OnSignal("SIGTERM", "SIGUSR1"),
        TimeLimit("03:50:00"),
        TimeLimit(0.25, before_end="90s"),
    )
POLICIES: tuple[KeepPolicy, ...] = (
    KeepLast(3),
    KeepBest("val_loss"),
    KeepBest("accuracy/top1", 2, "max"),
    KeepEvery(steps=10_000),
    KeepEvery(minutes=60),
    KeepTagged(),
    KeepAll(),
)


def label(value: object) -> str:
    # Python refuses to write a number of thousands of digits.
    return "huge" if isinstance(value, int) and value.bit_length() > 512 else f"{value!r:.30}"


@pytest.fixture(autouse=True)
def _no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_END_TIME", raising=False)


def fires(trigger: Trigger, **moment: Any) -> bool:
    wish = trigger.wish(Moment(**{"step": 1, **moment}))
    assert (wish.save or wish.stop) == bool(wish.reasons)
    assert not (wish.save and wish.stop)
    return wish.save or wish.stop


# Values


@pytest.mark.parametrize(
    "value", [*TRIGGERS, *POLICIES, TRIGGERS[0] | TRIGGERS[5], POLICIES[0] | POLICIES[2]], ids=repr
)
def test_a_value_is_written_as_it_is_made_and_never_changes(value: Any) -> None:
    again = eval(repr(value), {**vars(triggers), **vars(retention)})
    assert again == value
    assert hash(again) == hash(value)
    assert repr(again) == repr(value)
    assert pickle.loads(pickle.dumps(value)) == value
    assert value != object()
    for field in dataclasses.fields(value):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(value, field.name, None)


@pytest.mark.parametrize(("values", "union"), [(TRIGGERS, AnyOf), (POLICIES, KeepAny)])
def test_joined_values_are_flat_and_none_is_there_twice(values: tuple[Any, ...], union: type) -> None:
    for first, second, third in itertools.permutations(values, 3):
        joined = first | second
        assert isinstance(joined, union)
        assert joined.parts() == (first, second)
        assert (joined | third).parts() == (first | (second | third)).parts() == (first, second, third)
        assert (joined | second) == joined == (joined | joined)
        assert len({joined, first | second, second | first}) == 2
    for value in values:
        assert (value | value) is value
        assert value.parts() == (value,)


@pytest.mark.parametrize("other", [None, 3, "KeepLast(3)", Every, KeepLast, [Every(steps=3)]], ids=repr)
@pytest.mark.parametrize("value", [TRIGGERS[0], TRIGGERS[0] | TRIGGERS[1], POLICIES[0], POLICIES[0] | POLICIES[1]])
def test_nothing_else_can_be_joined(value: Any, other: Any) -> None:
    with pytest.raises(UsageError, match="with something else; join it with another, such as "):
        value | other
    with pytest.raises(UsageError, match="with something else"):
        other | value


@pytest.mark.parametrize(("left", "right"), [*zip(TRIGGERS, POLICIES, strict=False)])
def test_when_to_save_and_what_to_keep_are_not_joined(left: Any, right: Any) -> None:
    for one, other in ((left, right), (right, left)):
        with pytest.raises(UsageError) as caught:
            one | other
        assert repr(one) in str(caught.value)
        assert "give the one to save= and the other to keep=" in str(caught.value)


def test_triggers_and_policies_bring_no_torch_along() -> None:
    modules = "holdfast.manager.triggers, holdfast.runs.retention, holdfast.runs.link_names"
    heavy = "[name for name in ('torch', 'numpy', 'holdfast.runs.catalog') if name in sys.modules]"
    code = f"import sys, {modules}; print({heavy})"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


# Triggers


def test_every_so_many_steps_but_not_at_step_0() -> None:
    assert [step for step in range(20) if fires(Every(steps=5), step=step)] == [5, 10, 15]
    assert Every(steps=5).wish(Moment(5)) == Wish(True, False, ("every 5 steps",))
    assert Every(steps=1).wish(Moment(5)) == Wish(True, False, ("every step",))
    assert Every(steps=5).wish(Moment(6)) == Wish(False, False, ())


@pytest.mark.parametrize(
    ("epochs", "last", "now", "expected"),
    [(1, 0, 0, False), (1, 0, 1, True), (2, 0, 1, False), (2, 1, 2, True), (2, 2, 3, False), (2, 1, 5, True)],
)
def test_every_so_many_epochs_when_one_of_them_ends(epochs: int, last: int, now: int, expected: bool) -> None:
    assert fires(Every(epochs=epochs), epoch=now, last_epoch=last) is expected


def test_without_an_epoch_no_epoch_ends() -> None:
    assert not fires(Every(epochs=1), step=10)
    assert not fires(Every(epochs=1), step=10, epoch=3)
    assert not fires(Every(epochs=1), step=10, last_epoch=3)
    assert Every(epochs=1).needs_epoch
    assert (Every(steps=1) | Every(epochs=1)).needs_epoch
    assert not (Every(steps=1) | Every(minutes=1)).needs_epoch


def test_every_so_many_minutes_since_the_last_save() -> None:
    assert not fires(Every(minutes=1.5), seconds_since_save=89.9)
    assert fires(Every(minutes=1.5), seconds_since_save=90)
    assert Every(minutes=1.5).wish(Moment(0, seconds_since_save=90)).reasons == ("every 1.5 minutes",)
    assert Every(minutes=10.0).wish(Moment(0, seconds_since_save=600)).reasons == ("every 10 minutes",)


@pytest.mark.parametrize("kind", [Every, KeepEvery])
@pytest.mark.parametrize("given", [{}, {"steps": 3, "minutes": 3}, {"steps": None}])
def test_an_interval_is_of_one_kind(kind: Callable[..., object], given: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"takes one of steps=, .*join several with \|"):
        kind(**given)


@pytest.mark.parametrize("kind", [Every, KeepEvery])
@pytest.mark.parametrize("value", [0, -1, True, 2.0, "5", 2**63, 10**5000, math.nan, [5]], ids=label)
def test_steps_are_a_whole_number_from_1_on(kind: Callable[..., object], value: Any) -> None:
    with pytest.raises(UsageError, match=r"\(steps=\.\.\.\) takes a whole number from 1 on, not"):
        kind(steps=value)


@pytest.mark.parametrize("kind", [Every, KeepEvery])
@pytest.mark.parametrize("value", [0, -1, 0.0, -0.5, True, "5", math.nan, math.inf, -math.inf, 10**400, timedelta(1)])
def test_minutes_are_a_positive_number(kind: Callable[..., object], value: Any) -> None:
    with pytest.raises(UsageError, match=r"\(minutes=\.\.\.\) takes a positive number, not"):
        kind(minutes=value)


def test_epochs_are_a_whole_number_from_1_on() -> None:
    for value in (0, -1, True, 1.5):
        with pytest.raises(UsageError, match=r"Every\(epochs=\.\.\.\) takes a whole number"):
            Every(epochs=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("trigger", [At(7, 3), At([3, 7]), At((7, 3, 3)), At({3, 7}), At(range(3, 8, 4))])
def test_at_given_steps(trigger: Trigger) -> None:
    assert [step for step in range(10) if fires(trigger, step=step)] == [3, 7]
    assert trigger.wish(Moment(7)) == Wish(True, False, ("at step 7",))
    assert trigger == At(3, 7)
    assert repr(trigger) == "At(3, 7)"
    assert fires(At(0), step=0)


@pytest.mark.parametrize(
    "steps", [(), ([],), (-1,), (True,), (1.0,), ("5",), ([1, "5"],), (1, [2]), (b"\x05",), (None,)]
)
def test_given_steps_are_steps(steps: Any) -> None:
    with pytest.raises(UsageError):
        At(*steps)


def test_on_the_last_of_so_many_steps() -> None:
    assert [step for step in range(12) if fires(OnLastStep(10), step=step)] == [9]
    assert OnLastStep(10).wish(Moment(9)) == Wish(True, False, ("the last step",))
    for total in (0, -1, True, 10.0, None):
        with pytest.raises(UsageError, match="takes a whole number"):
            OnLastStep(total)  # type: ignore[arg-type]


def test_a_signal_asks_to_save_and_to_stop() -> None:
    trigger = OnSignal("SIGTERM", "USR1", signal.SIGINT, "sigterm")
    assert trigger.names == ("SIGTERM", "SIGUSR1", "SIGINT")
    assert trigger.signals == {"SIGTERM", "SIGUSR1", "SIGINT"}
    assert not fires(trigger, signals=frozenset({"SIGHUP"}))
    came = frozenset({"SIGINT", "SIGHUP", "SIGTERM"})
    assert trigger.wish(Moment(0, signals=came)) == Wish(False, True, ("SIGTERM", "SIGINT"))


def test_every_signal_of_the_system_has_one_name() -> None:
    for name, number in signal.Signals.__members__.items():
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            for given in (name, name.removeprefix("SIG"), name.lower(), number):
                assert OnSignal(given).names == (number.name,)


@pytest.mark.parametrize("name", ["SIGKILL", "STOP", signal.SIGKILL, signal.SIGSTOP])
def test_a_signal_that_nobody_catches_is_refused(name: Any) -> None:
    with pytest.raises(UsageError, match="without asking it; use a signal such as SIGTERM"):
        OnSignal("SIGTERM", name)


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("SIGTREM", "SIGTERM"), ("usr3", "SIGUSR"), ("SIG_INT", "SIGINT"), ("SIGKIL", "SIGILL"), ("", "SIGTERM")]
    + [(name, "SIGTERM") for name in ("whatever", 15, None, ["SIGTERM"], b"SIGTERM", 10**5000)],
    ids=label,
)
def test_a_name_of_no_signal_is_refused_with_those_that_are_near(name: Any, nearest: str) -> None:
    with pytest.raises(UsageError, match="is no signal; use a name such as") as caught:
        OnSignal(name)
    assert nearest in caught.value.advice
    assert "SIGKILL" not in caught.value.advice


def test_at_least_one_signal_is_named() -> None:
    with pytest.raises(UsageError, match="names no signal"):
        OnSignal()


DURATIONS = [
    ("03:50:00", 13800),
    ("3:50:00", 13800),
    ("00:00:01", 1),
    ("100:00:00", 360000),
    ("1-02:03:04", 93784),
    ("0-00:05:00", 300),
    ("90m", 5400),
    ("3h50m", 13800),
    ("45s", 45),
    ("1d2h", 93600),
    ("1d2h3m4s", 93784),
    (13800, 13800),
    (0.5, 0.5),
    (timedelta(hours=2), 7200),
    (timedelta(milliseconds=1), 0.001),
]


@pytest.mark.parametrize(("duration", "seconds"), DURATIONS)
def test_a_time_limit_asks_to_save_and_to_stop(duration: Any, seconds: float) -> None:
    limit = TimeLimit(duration)
    assert limit == TimeLimit(seconds)
    assert limit.limit_seconds == seconds
    assert not fires(limit, seconds_running=seconds * 0.999, wall_seconds=2e9)
    wish = limit.wish(Moment(0, seconds_running=seconds))
    assert (wish.save, wish.stop) == (False, True)
    assert eval(repr(limit), vars(triggers)) == limit


@pytest.mark.parametrize("seconds", [13800, 86399, 86400, 93784])
def test_a_time_limit_is_said_as_a_clock_says_it(seconds: int) -> None:
    said = {13800: "03:50:00", 86399: "23:59:59", 86400: "1-00:00:00", 93784: "1-02:03:04"}[seconds]
    wish = TimeLimit(seconds).wish(Moment(0, seconds_running=seconds))
    assert wish.reasons == (f"time limit of {said}",)
    assert repr(TimeLimit(seconds)) == f"TimeLimit('{said}', before_end='00:05:00')"


WRONG_DURATIONS = (
    *("", "0s", "00:00:00", "50:00", "03:50", "3:5:0", "03:60:00", "03:00:60", "1-24:00:00", "-01:00:00", "1-02", "90"),
    *(
        "1.5h",
        "50m3h",
        "3h 50m",
        "3h3h",
        "h",
        "m5",
        " 90m",
        "90m\n",
        "٣h",
        "1:24:00:00",
        "9999999999s",
        "90M",
        "an hour",
    ),
    *(0, -1, 0.0, -0.5, True, math.nan, math.inf, 10**5000, timedelta(0), timedelta(-1), b"90m", [90], signal),
)


@pytest.mark.parametrize("duration", WRONG_DURATIONS, ids=label)
def test_what_is_no_duration_is_refused_with_those_that_are(duration: Any) -> None:
    for make in (lambda: TimeLimit(duration), lambda: TimeLimit("90m", before_end=duration)):
        with pytest.raises(UsageError) as caught:
            make()
        assert "'03:50:00', '1-12:00:00' or, as DD:HH:MM:SS, '1:12:00:00' with days in front" in caught.value.advice


@given(seconds=st.integers(1, 10**12) | st.floats(1e-9, 1e12))
@example(seconds=10**9)
@example(seconds=10**9 - 1)
@steady
def test_every_time_limit_is_written_exactly(seconds: float) -> None:
    limit = TimeLimit(seconds, before_end=seconds)
    assert eval(repr(limit), vars(triggers)) == limit


def test_the_end_of_the_job_is_a_limit_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1800000000")
    limit = TimeLimit(before_end="10m")
    assert repr(limit) == "TimeLimit(before_end='00:10:00')"
    both = TimeLimit("01:00:00")
    monkeypatch.delenv("SLURM_JOB_END_TIME")
    assert not fires(limit, wall_seconds=1799999399.9, seconds_running=1e9)
    assert limit.wish(Moment(0, wall_seconds=1799999400)) == Wish(False, True, ("the job ends within 00:10:00",))
    assert not fires(both, wall_seconds=1799999699, seconds_running=3599)
    assert fires(both, wall_seconds=1799999699, seconds_running=3600)
    assert fires(both, wall_seconds=1799999700, seconds_running=0)
    assert len(both.wish(Moment(0, wall_seconds=1799999700, seconds_running=3600)).reasons) == 2


@pytest.mark.parametrize("text", ["soon", "0", "-5", "1.8e9", "1800000000.5", " 1800000000", "\u0661", "9" * 19, "0x5"])
def test_an_end_of_the_job_that_is_none_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_END_TIME", text)
    for limit in (None, "90m"):
        with pytest.raises(UsageError, match=r"SLURM_JOB_END_TIME is .*not a number of seconds since 1970"):
            TimeLimit(limit)


def test_a_time_limit_has_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    for empty in (False, True):
        if empty:
            monkeypatch.setenv("SLURM_JOB_END_TIME", "")
        with pytest.raises(UsageError, match="no limit, and SLURM_JOB_END_TIME is not set; give it one, such as"):
            TimeLimit()


MOMENTS = st.builds(
    Moment,
    st.integers(0, 12) | st.sampled_from([99, 100, 500, 999, 1000]),
    epoch=st.none() | st.integers(0, 5),
    last_epoch=st.none() | st.integers(0, 5),
    seconds_since_save=st.floats(0, 100),
    seconds_running=st.floats(0, 20000),
    wall_seconds=st.floats(0, 2e9),
    signals=st.frozensets(st.sampled_from(["SIGTERM", "SIGUSR1", "SIGHUP"])),
)


@given(parts=st.lists(st.sampled_from(TRIGGERS), min_size=1), moment=MOMENTS)
@steady
def test_a_union_wishes_what_one_of_its_parts_does(parts: list[Trigger], moment: Moment) -> None:
    union = parts[0]
    for part in parts[1:]:
        union = union | part
    wish, wishes = union.wish(moment), [part.wish(moment) for part in parts]
    assert wish.save == any(one.save for one in wishes)
    assert wish.stop == any(one.stop for one in wishes)
    assert set(wish.reasons) == {reason for one in wishes for reason in one.reasons}
    assert len(set(wish.reasons)) == len(wish.reasons)
    assert union.signals == frozenset().union(*(part.signals for part in parts))


@given(parts=st.lists(st.sampled_from(TRIGGERS), min_size=1), moment=MOMENTS)
@steady
def test_split_parts_what_every_rank_knows_from_what_the_leader_says(parts: list[Trigger], moment: Moment) -> None:
    union = parts[0]
    for part in parts[1:]:
        union = union | part
    ours, leaders = split(union)
    assert ours is None or ours.by_step
    assert leaders is None or not any(part.by_step for part in leaders.parts())
    halves = [half for half in (ours, leaders) if half is not None]
    assert {part for half in halves for part in half.parts()} == set(parts)
    assert union.by_step == (leaders is None)
    assert union.wish(moment).save == any(half.wish(moment).save for half in halves)
    if ours is not None:
        other_clock = moment._replace(seconds_since_save=1e9, seconds_running=1e9, signals=frozenset({"SIGTERM"}))
        assert ours.wish(moment) == ours.wish(other_clock)


def test_no_trigger_splits_into_nothing() -> None:
    assert split(None) == (None, None)


def test_a_trigger_of_a_users_own_is_the_leaders_word_unless_it_says_otherwise() -> None:
    class Falling(Trigger):
        def wish(self, moment: Moment) -> Wish:
            return Wish(moment.step == 3, False, ("falling",) if moment.step == 3 else ())

    own = Falling()
    assert split(own | Every(steps=5)) == (Every(steps=5), own)
    assert (own.signals, own.needs_epoch) == (frozenset(), False)
    assert (own | Every(steps=3)).wish(Moment(3)) == Wish(True, False, ("falling", "every 3 steps"))
    with pytest.raises(TypeError):
        Trigger()  # type: ignore[abstract]
