"""Every checkpoint gets a decision with its reasons, and what must not be deleted is not, whatever the policy says."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from holdfast.runs.retention import (
    Decision,
    KeepAll,
    KeepBest,
    KeepEvery,
    KeepLast,
    KeepPolicy,
    KeepTagged,
    Record,
    retain,
)

steady = settings(derandomize=True, deadline=None, max_examples=100)


def record(sequence: int, **fields: Any) -> Record:
    step = fields.pop("step", sequence * 100)
    return Record(f"step-{step:09d}", step, sequence, 60.0 * sequence, fields.pop("metrics", {}), **fields)


def lines(records: list[Record], policy: KeepPolicy) -> list[str]:
    return [str(decision) for decision in retain(records, policy)]


def test_each_decision_says_why_the_newest_first() -> None:
    records = [record(number) for number in range(1, 6)]
    records[1] = record(2, tags=("release",))
    records[3] = record(4, tags=("release", "v1"), metrics={"val_loss": 0.25})
    assert lines(records, KeepLast(2) | KeepBest("val_loss")) == [
        "keep   step-000000500: the newest; among the last 2",
        "keep   step-000000400: among the last 2; best 1 of val_loss (min): 0.25; tagged 'release', 'v1'",
        "delete step-000000300: no policy keeps it",
        "keep   step-000000200: tagged 'release'",
        "delete step-000000100: no policy keeps it",
    ]


def test_a_decision_is_a_value() -> None:
    (decision,) = retain([record(1)], KeepLast(1))
    assert decision == Decision("step-000000100", 100, True, ("the newest", "among the last 1"))
    assert decision != Decision("step-000000100", 100, True, ("the newest",))
    with pytest.raises(AttributeError):
        decision.keep = False  # type: ignore[misc]


def test_no_reason_is_said_twice() -> None:
    records = [record(1, shield="the newest", tags=("a",))]
    assert lines(records, KeepTagged()) == ["keep   step-000000100: the newest; tagged 'a'"]


def test_the_newest_is_the_one_that_was_committed_last_on_whatever_line() -> None:
    records = [record(1, step=900), record(2, step=100, on_line=False)]
    assert lines(records, KeepEvery(steps=1000)) == [
        "keep   step-000000100: the newest",
        "delete step-000000900: no policy keeps it",
    ]


def test_after_a_rollback_the_abandoned_line_goes_and_the_continued_one_stays() -> None:
    abandoned = [record(number, step=number * 100, on_line=number <= 5) for number in range(1, 10)]
    continued = [record(10, step=650), record(11, step=750)]
    kept = [decision.step for decision in retain([*abandoned, *continued], KeepLast(3)) if decision.keep]
    assert kept == [750, 650, 500]


@pytest.mark.guarantee("G4")
def test_a_damaged_one_stays_and_takes_no_place() -> None:
    records = [record(number) for number in range(1, 5)]
    records[3] = record(4, counts=False, shield="damaged, kept for inspection")
    assert lines(records, KeepLast(2)) == [
        "keep   step-000000400: damaged, kept for inspection",
        "keep   step-000000300: the newest; among the last 2",
        "keep   step-000000200: among the last 2",
        "delete step-000000100: no policy keeps it",
    ]


@pytest.mark.guarantee("G4")
def test_when_nothing_counts_nothing_is_deleted() -> None:
    records = [record(number, counts=False, shield="damaged" if number == 2 else "") for number in (1, 2)]
    assert lines(records, KeepLast(1)) == [
        "keep   step-000000200: damaged; no checkpoint of the run counts",
        "keep   step-000000100: no checkpoint of the run counts",
    ]


def test_a_run_without_checkpoints_needs_no_decision() -> None:
    assert retain([], KeepLast(1)) == []


RECORDS = st.lists(
    st.builds(
        lambda step, metric, tags, on_line, shield, counts: (step, metric, tags, on_line, shield, counts),
        st.integers(0, 50),
        st.none() | st.floats() | st.integers(0, 3),
        st.sampled_from([(), (), ("release",)]),
        st.booleans(),
        st.sampled_from(["", "", "being read"]),
        st.booleans(),
    ),
    max_size=12,
).map(
    lambda drawn: [
        Record(
            f"step-{step:09d}.{number}",
            step,
            number,
            float(number),
            {} if metric is None else {"loss": metric},
            tags,
            on_line,
            shield,
            counts,
        )
        for number, (step, metric, tags, on_line, shield, counts) in enumerate(drawn, 1)
    ]
)
POLICIES = st.lists(
    st.one_of(
        st.builds(KeepLast, st.integers(1, 3)),
        st.builds(KeepBest, st.just("loss"), st.integers(1, 3), st.sampled_from(["min", "max"])),
        st.builds(lambda steps: KeepEvery(steps=steps), st.integers(1, 20)),
        st.builds(lambda minutes: KeepEvery(minutes=minutes), st.floats(0.01, 1)),
        st.just(KeepTagged()),
        st.just(KeepAll()),
    ),
    min_size=1,
    max_size=3,
)


def union(parts: list[KeepPolicy]) -> KeepPolicy:
    joined = parts[0]
    for part in parts[1:]:
        joined = joined | part
    return joined


@pytest.mark.guarantee("G4")
@given(records=RECORDS, parts=POLICIES, choices=st.randoms(use_true_random=False))
@steady
def test_nothing_that_must_stay_is_ever_deleted(records: list[Record], parts: list[KeepPolicy], choices: Any) -> None:
    shuffled = choices.sample(records, len(records))
    decisions = retain(shuffled, union(parts))
    assert decisions == retain(records, union(parts))
    assert [decision.folder for decision in decisions] == [one.folder for one in reversed(records)]
    kept = {decision.folder: decision.reasons for decision in decisions if decision.keep}
    counted = [one for one in records if one.counts]
    for one in records:
        if one.shield or one.tags or not counted or one is counted[-1]:
            assert one.folder in kept
        assert not one.shield or kept[one.folder][0] == one.shield
    assert not counted or "the newest" in kept[counted[-1].folder]
    chosen = {folder for part in parts for folder in part.choose(records)}
    assert chosen <= set(kept)
    for decision in decisions:
        assert decision.reasons
        assert len(set(decision.reasons)) == len(decision.reasons)
        forced = decision.folder not in chosen
        assert decision.keep or forced
        assert decision.keep == (decision.reasons != ("no policy keeps it",))


@given(records=RECORDS, parts=POLICIES)
@steady
def test_what_is_kept_is_kept_again_once_the_rest_is_gone(records: list[Record], parts: list[KeepPolicy]) -> None:
    policy = union(parts)
    kept = {decision.folder for decision in retain(records, policy) if decision.keep}
    again = retain([one for one in records if one.folder in kept], policy)
    assert {decision.folder for decision in again if not decision.keep} == set()


def test_many_checkpoints_are_decided_about_in_no_time() -> None:
    # The bar for 100,000 is 0.5 s, in benchmarks/retention.py. Here: nothing grows with the square of the number.
    source = random.Random(7)
    records = [record(number, metrics={"val_loss": source.random()}) for number in range(20_000)]
    source.shuffle(records)
    policy = union([KeepLast(3), KeepBest("val_loss", 5), KeepEvery(steps=10_000), KeepEvery(minutes=60), KeepTagged()])
    start = time.process_time()
    decisions = retain(records, policy)
    assert time.process_time() - start < 2
    assert len(decisions) == 20_000


@pytest.mark.parametrize("policy", [KeepLast(10**9), KeepBest("loss", 10**9), KeepAll()], ids=repr)
def test_room_for_more_than_there_are_keeps_all(policy: KeepPolicy) -> None:
    assert all(decision.keep for decision in retain([record(number) for number in range(20)], policy))
