"""Lineages: which checkpoints a training goes back to, by sequence number and segment."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from holdfast.runs.lineage import Lineage, ancestry, draw_segment, start_of

steady = settings(derandomize=True, deadline=None, max_examples=200)


@dataclass(frozen=True)
class Found:
    head: Any
    digest: str


def found(sequence: int, segment: str = "", *, after: Lineage | None = None, parent: str | None = None) -> Found:
    """A checkpoint as its lineage sees it; without `after`, one of a version that stored no lineage."""
    line, segments = (after.ranges, after.segments) if after is not None else ((), ())
    head = SimpleNamespace(sequence=sequence, segment=segment, line=line, segments=segments, parent=parent)
    return Found(head, f"{sequence}{segment}")


def test_a_segment_is_drawn_anew_each_time() -> None:
    assert len({draw_segment() for _ in range(100)}) == 100
    assert {len(draw_segment()) for _ in range(10)} == {16}


def test_numbers_that_follow_each_other_in_one_segment_are_one_range() -> None:
    lineage = Lineage().followed_by(1, "a").followed_by(2, "a").followed_by(3, "b").followed_by(5, "b")
    assert lineage == Lineage(((1, 2), (3, 3), (5, 5)), ("a", "b", "b"))
    assert lineage.next_sequence == 6
    assert Lineage().next_sequence == 1


@pytest.mark.parametrize(
    ("sequence", "segment", "is_member"),
    [(1, "a", True), (2, "a", True), (2, "b", False), (3, "b", True), (3, "a", False), (4, "b", False), (2, "", False)],
)
def test_only_the_number_and_the_segment_together_make_a_member(sequence: int, segment: str, is_member: bool) -> None:
    lineage = Lineage(((1, 2), (3, 3)), ("a", "b"))
    assert (found(sequence, segment) in lineage) is is_member


def test_ranges_without_segments_have_the_checkpoints_without_one() -> None:
    old = SimpleNamespace(line=((1, 3),), segments=())
    assert found(2) in Lineage.before(old)  # type: ignore[arg-type]
    assert found(2, "a") not in Lineage.before(old), "no version that draws segments wrote it"  # type: ignore[arg-type]


def test_an_ancestry_leaves_out_what_has_the_number_alone() -> None:
    line = Lineage(((1, 2),), ("a",))
    newest, own, foreign, first = found(3, "b", after=line), found(2, "a"), found(2, "x"), found(1, "a")
    there = [newest, foreign, own, first]
    assert ancestry(newest.digest, there) == [newest, own, first]
    assert ancestry("gone", there) == []
    assert ancestry(None, there) == []


def test_without_a_lineage_the_parents_are_followed() -> None:
    first = found(1)
    second = found(2, parent=first.digest)
    third = found(3, parent=second.digest)
    assert ancestry(third.digest, [third, second, first]) == [third, second, first]
    assert Lineage.through([third, second, first]) == Lineage(((1, 3),), ("",))
    assert start_of(third) is None
    assert start_of(first) == (1, "")


def test_two_starts_with_one_number_are_two() -> None:
    one, other = found(2, "a", after=Lineage.of(found(1, "a"))), found(2, "b", after=Lineage.of(found(1, "b")))
    assert start_of(one) == (1, "a") != start_of(other)


@steady
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from("ab")), max_size=12))
def test_a_lineage_has_what_it_was_made_of_and_nothing_else(saves: list[tuple[int, str]]) -> None:
    lineage, members = Lineage(), set()
    for distance, segment in saves:
        sequence = lineage.next_sequence + distance - 1
        lineage = lineage.followed_by(sequence, segment)
        members.add((sequence, segment))
    for sequence in range(lineage.next_sequence + 1):
        for segment in "abc":
            assert (found(sequence, segment) in lineage) is ((sequence, segment) in members)
