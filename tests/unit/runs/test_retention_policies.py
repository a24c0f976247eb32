"""Policies keep what they state, and what cannot be meant is refused when it is made."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from holdfast.errors import UsageError
from holdfast.runs.retention import (
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    KeepTagged,
    Record,
    newest_first,
)

steady = settings(derandomize=True, deadline=None, max_examples=100)

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


def record(sequence: int, **fields: Any) -> Record:
    step = fields.pop("step", sequence * 100)
    folder = fields.pop("folder", f"step-{step:09d}.{sequence}")
    created = fields.pop("created_seconds", 60.0 * sequence)
    return Record(folder, step, sequence, created, fields.pop("metrics", {}), **fields)


def kept(policy: KeepPolicy, records: Iterable[Record]) -> list[int]:
    """The sequences of those that a policy keeps, whatever the order in which it sees them."""
    given = list(records)
    chosen = policy.choose(given)
    for _ in range(3):
        random.Random(len(given)).shuffle(given)
        assert policy.choose(given) == chosen
    assert all(chosen.values())
    return sorted(one.sequence for one in given if one.folder in chosen)


RUN = [record(number) for number in range(1, 11)]


def test_the_last_n_are_those_committed_last() -> None:
    assert kept(KeepLast(3), RUN) == [8, 9, 10]
    assert kept(KeepLast(1), RUN) == [10]
    assert kept(KeepLast(100), RUN) == list(range(1, 11))
    assert kept(KeepLast(3), []) == []
    assert set(KeepLast(3).choose(RUN).values()) == {"among the last 3"}


def test_after_a_rollback_the_last_are_those_of_the_line_that_goes_on() -> None:
    abandoned = [one._replace(on_line=one.step <= 500) for one in RUN]
    again = [record(11, step=600), record(12, step=700)]
    assert kept(KeepLast(3), [*abandoned, *again]) == [5, 11, 12]
    assert kept(KeepEvery(steps=300), [*abandoned, *again]) == [3, 11]
    assert kept(KeepEvery(minutes=4), [*abandoned, *again]) == [1, 5, 11]


def test_what_was_committed_later_is_newer_whatever_its_step() -> None:
    records = [record(1, step=900), record(2, step=100), record(3, step=500)]
    assert [one.sequence for one in newest_first(records)] == [3, 2, 1]
    assert kept(KeepLast(2), records) == [2, 3]


def test_of_two_with_one_sequence_the_later_is_newer() -> None:
    both = [record(1, folder="a", created_seconds=5.0), record(1, folder="b", created_seconds=6.0)]
    for order in (both, both[::-1]):
        assert list(KeepLast(1).choose(order)) == ["b"]
        assert list(KeepBest("loss").choose(order)) == ["b"]


def with_metric(*values: Any) -> list[Record]:
    """Checkpoints 1, 2, ... with these metrics; None for one that has none."""
    return [record(number, metrics={} if value is None else {"loss": value}) for number, value in enumerate(values, 1)]


NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("values", "lowest_first", "highest_first"),
    [
        ((3.0, 1.0, 2.0), (2, 3, 1), (1, 3, 2)),
        ((1, 1.0, 1), (3, 2, 1), (3, 2, 1)),
        ((0.0, -0.0), (2, 1), (2, 1)),
        ((NAN, 5.0, NAN), (2, 3, 1), (2, 3, 1)),
        ((None, NAN, 5.0, None), (3, 2, 4, 1), (3, 2, 4, 1)),
        ((INF, -INF, 1e308, NAN), (2, 3, 1, 4), (1, 3, 2, 4)),
        ((2**63 + 1, 2**63, 2**63 - 1), (3, 2, 1), (1, 2, 3)),
        ((2**53 + 1, 2.0**53, 2**53), (3, 2, 1), (1, 3, 2)),
        ((10**5000, INF, -(10**5000), -INF), (4, 3, 1, 2), (2, 1, 3, 4)),
        ((True, 0.5, False), (3, 2, 1), (1, 2, 3)),
        (("text", 2.0, None), (2, 3, 1), (2, 3, 1)),
    ],
)
def test_the_best_are_those_with_the_best_exact_metric(
    values: tuple[Any, ...], lowest_first: tuple[int, ...], highest_first: tuple[int, ...]
) -> None:
    records = with_metric(*values)
    for n in range(1, len(values) + 2):
        assert kept(KeepBest("loss", n), records) == sorted(lowest_first[:n])
        assert kept(KeepBest("loss", n, "max"), records) == sorted(highest_first[:n])


def test_the_best_are_of_all_lines() -> None:
    records = [one._replace(on_line=one.sequence != 2) for one in with_metric(3.0, 1.0, 2.0)]
    assert kept(KeepBest("loss"), records) == [2]


def test_the_reason_is_the_metric_or_that_it_is_missing() -> None:
    chosen = KeepBest("loss", 4).choose(with_metric(0.25, NAN, None, 10**5000))
    assert sorted(chosen.values()) == [
        "best 4 of loss (min): 0.25",
        "best 4 of loss (min): a number of 16610 bits",
        "best 4 of loss (min): nan",
        "loss is not known yet",
    ]


@given(
    values=st.lists(
        st.none() | st.floats() | st.integers() | st.sampled_from([NAN, 0, 1, 2**63, 2**63 + 1, float(2**63)]),
        max_size=12,
    ),
    n=st.integers(1, 5),
    mode=st.sampled_from(["min", "max"]),
)
@steady
def test_nothing_that_is_left_out_is_better_than_what_is_kept(values: list[Any], n: int, mode: Any) -> None:
    records = with_metric(*values)
    numbers = kept(KeepBest("loss", n, mode), records)
    assert len(numbers) == min(n, len(values))

    def beats(one: int, other: int) -> bool:
        """Said in another way than the code says it: pair by pair."""
        first, second = values[one - 1], values[other - 1]
        for worst in (lambda value: value is None, lambda value: value != value):
            if worst(first) or worst(second):
                return one > other if worst(first) and worst(second) else worst(second)
        if first == second:
            return one > other
        return (first < second) == (mode == "min")

    for inside, outside in itertools.product(numbers, set(range(1, len(values) + 1)) - set(numbers)):
        assert beats(inside, outside)


def test_one_of_every_so_many_steps_is_the_first_from_a_multiple_on() -> None:
    records = [record(number, step=step) for number, step in enumerate([0, 50, 99, 130, 170, 200, 299, 450, 499], 1)]
    assert kept(KeepEvery(steps=100), records) == [4, 6, 8]
    assert kept(KeepEvery(steps=100), records[:3]) == []
    assert KeepEvery(steps=100).choose(records)["step-000000130.4"] == "the first from step 100 on"
    assert kept(KeepEvery(steps=1), records) == list(range(2, 10))


def test_of_two_at_one_step_the_older_stays() -> None:
    assert kept(KeepEvery(steps=100), [record(1, step=100), record(2, step=100)]) == [1]


@pytest.mark.parametrize(
    "policy", [KeepLast(2), KeepBest("loss", 2), KeepEvery(steps=100), KeepEvery(minutes=1)], ids=repr
)
def test_what_a_later_one_of_its_step_replaces_takes_no_place(policy: KeepPolicy) -> None:
    def at(number: int, step: int, *, replaced: bool = False) -> Record:
        metrics = {"loss": 9.0 - step / 100}
        return record(number, step=step, metrics=metrics, created_seconds=60.0 * step, replaced=replaced)

    records = [at(1, 100), at(2, 200, replaced=True), at(3, 200, replaced=True), at(4, 200)]
    assert kept(policy, records) == [1, 4]


def test_the_best_keeps_its_place_where_the_later_one_of_its_step_has_no_such_metric() -> None:
    records = [record(1, step=100, metrics={"loss": 1.0}, replaced=True), record(2, step=100)]
    assert kept(KeepBest("loss"), records) == [1]
    assert kept(KeepBest("loss"), [record(1, step=100, replaced=True), record(2, step=100)]) == [2]


def test_one_of_every_so_many_minutes_is_counted_from_the_one_before() -> None:
    minutes = [0, 1, 4, 5, 9, 10, 11, 30, 34, 35]
    records = [record(number, created_seconds=60.0 * minute) for number, minute in enumerate(minutes, 1)]
    assert kept(KeepEvery(minutes=5), records) == [1, 4, 6, 8, 10]
    assert set(KeepEvery(minutes=5).choose(records).values()) == {"every 5 minutes"}
    assert kept(KeepEvery(minutes=5), []) == []


def test_a_clock_that_was_put_back_does_not_end_the_keeping() -> None:
    minutes = [1000, 1005, 0, 4, 5, 10]
    records = [record(number, created_seconds=60.0 * minute) for number, minute in enumerate(minutes, 1)]
    assert kept(KeepEvery(minutes=5), records) == [1, 2, 3, 5, 6]


@given(
    gaps=st.lists(st.integers(-20, 60), min_size=1, max_size=40),
    more=st.lists(st.integers(-20, 60), max_size=20),
    minutes=st.integers(1, 40),
    choices=st.randoms(use_true_random=False),
)
@steady
def test_what_was_kept_by_the_minute_stays_kept(gaps: list[int], more: list[int], minutes: int, choices: Any) -> None:
    times = list(itertools.accumulate([*gaps, *more]))
    records = [record(number, created_seconds=60.0 * minute) for number, minute in enumerate(times, 1)]
    policy = KeepEvery(minutes=minutes)
    present = records[: len(gaps)]
    before = kept(policy, present)
    survivors = [one for one in present if one.sequence in before or choices.random() < 0.5]
    assert kept(policy, survivors) == before
    later = kept(policy, [*survivors, *records[len(gaps) :]])
    assert later[: len(before)] == before
    assert later == kept(policy, records)


@given(
    steps=st.lists(st.integers(0, 500), min_size=1, max_size=40, unique=True).map(sorted),
    every=st.integers(1, 100),
    choices=st.randoms(use_true_random=False),
)
@steady
def test_what_was_kept_by_the_step_stays_kept(steps: list[int], every: int, choices: Any) -> None:
    records = [record(number, step=step) for number, step in enumerate(steps, 1)]
    policy = KeepEvery(steps=every)
    present = records[: choices.randint(1, len(records))]
    before = kept(policy, present)
    survivors = [one for one in present if one.sequence in before or choices.random() < 0.5]
    assert kept(policy, survivors) == before
    assert kept(policy, [*survivors, *records[len(present) :]]) == kept(policy, records)
    assert set(before) <= set(kept(policy, records))


def test_tagged_ones_are_kept_on_every_line() -> None:
    records = [record(1, tags=("release", "v1")), record(2), record(3, tags=("bug",), on_line=False)]
    assert KeepTagged().choose(records) == {
        "step-000000100.1": "tagged 'release', 'v1'",
        "step-000000300.3": "tagged 'bug'",
    }


def test_all_is_all() -> None:
    records = [record(1, counts=False), record(2, on_line=False), record(3)]
    assert kept(KeepAll(), records) == [1, 2, 3]


@pytest.mark.parametrize(
    "policy",
    [KeepLast(2), KeepBest("loss", 2), KeepBest("other", 2), KeepEvery(steps=100), KeepEvery(minutes=1)],
    ids=repr,
)
def test_what_does_not_count_takes_no_place(policy: KeepPolicy) -> None:
    sound = with_metric(3.0, 2.0, 1.0, 4.0)
    damaged = [record(number, step=number, metrics={"loss": -1.0}, counts=False) for number in (0, 5, 6)]
    assert kept(policy, [*sound, *damaged]) == kept(policy, sound) != []


@given(parts=st.lists(st.sampled_from(POLICIES), min_size=1, max_size=4), data=st.data())
@steady
def test_a_union_keeps_what_one_of_its_parts_keeps(parts: list[KeepPolicy], data: st.DataObject) -> None:
    size = data.draw(st.integers(0, 8))
    records = [
        record(
            number,
            metrics=data.draw(st.sampled_from([{}, {"val_loss": 0.5}, {"val_loss": 1, "accuracy/top1": 0.5}])),
            tags=data.draw(st.sampled_from([(), ("kept",)])),
            on_line=data.draw(st.booleans()),
            counts=data.draw(st.booleans()),
        )
        for number in range(1, size + 1)
    ]
    union = parts[0]
    for part in parts[1:]:
        union = union | part
    chosen, choices = union.choose(records), [part.choose(records) for part in dict.fromkeys(parts)]
    assert set(chosen) == {folder for choice in choices for folder in choice}
    for folder, reason in chosen.items():
        assert reason == "; ".join(choice[folder] for choice in choices if folder in choice)


def test_a_policy_says_which_metrics_it_ranks_by() -> None:
    assert (KeepLast(3) | KeepTagged() | KeepEvery(steps=5) | KeepAll()).metrics == ()
    assert KeepBest("loss", 3).metrics == (("loss", "min"),)
    union = KeepBest("loss", 3) | KeepLast(2) | KeepBest("score", 1, "max") | KeepBest("loss", 5)
    assert union.metrics == (("loss", "min"), ("score", "max"))
    assert KeepLast(3).metrics == ()


@pytest.mark.parametrize("n", [0, -1, True, False, 1.0, "3", None, -(10**5000), 10**5000], ids=label)
def test_a_number_to_keep_that_is_none_is_refused(n: Any) -> None:
    for make in (lambda: KeepLast(n), lambda: KeepBest("loss", n)):
        with pytest.raises(UsageError, match=r"whole number from 1 on, not .*; to keep everything use KeepAll\(\)"):
            make()


@pytest.mark.parametrize(
    ("mode", "hint"),
    [("maximum", "'max'"), ("Min", "'min'"), ("maxx", "'max'"), ("lower", ""), (None, ""), (["min"], "")],
)
def test_a_mode_is_min_or_max(mode: Any, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        KeepBest("loss", 1, mode)
    assert caught.value.advice == "use 'min' or 'max'" + (f"; did you mean {hint}?" if hint else "")


@pytest.mark.parametrize("metric", ["", None, 3, ["loss"]])
def test_a_metric_has_a_name(metric: Any) -> None:
    with pytest.raises(UsageError, match="name one, such as 'val_loss'"):
        KeepBest(metric)


def test_a_policy_of_a_users_own_composes_with_ours() -> None:
    class KeepOdd(KeepPolicy):
        def choose(self, records: Any) -> dict[str, str]:
            return {one.folder: "odd" for one in records if one.sequence % 2}

    assert kept(KeepOdd() | KeepLast(2), RUN) == [1, 3, 5, 7, 9, 10]
    with pytest.raises(TypeError):
        KeepPolicy()  # type: ignore[abstract]
