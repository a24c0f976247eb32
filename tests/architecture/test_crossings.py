"""A save and a restore stay in few places and agree few times, as docs/architecture.md quotes it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.architecture.crossings import CALLS, Crossed, cross

pytestmark = pytest.mark.slow

MAX_ENTRIES = 10
PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
ROW = re.compile(r"\| (.+?) \| (\d+) \| (\d+) \| (.+?) \|")


@pytest.fixture(scope="module")
def crossed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Crossed]]:
    return cross(tmp_path_factory.mktemp("crossed"))


def entries_of(call: str, crossed: list[dict[str, Crossed]]) -> set[str]:
    return set().union(*(rank[call].entries for rank in crossed))


def kinds_of(crossed: Crossed) -> list[str]:
    """Return the labels of the agreements without the step that some of them name."""
    return [re.sub(r" of step \d+$", "", label) for label in crossed.agreements]


def quoted() -> dict[str, tuple[int, int, list[str]]]:
    section = PAGE.read_text().split("## What a save and a restore cost\n")[1].split("\n## ")[0]
    return {
        call: (int(entries), int(agreements), which.split(", "))
        for call, entries, agreements, which in ROW.findall(section)
    }


@pytest.mark.parametrize("call", CALLS)
def test_a_call_crosses_at_most_ten_entries(call: str, crossed: list[dict[str, Crossed]]) -> None:
    entries = entries_of(call, crossed)
    assert {"manager", "ranks", "storage", "loading" if call == "restore" else "saving"} <= entries
    assert len(entries) <= MAX_ENTRIES, sorted(entries)


@pytest.mark.parametrize("call", CALLS)
def test_all_ranks_make_the_same_agreements(call: str, crossed: list[dict[str, Crossed]]) -> None:
    first, second = (rank[call].agreements for rank in crossed)
    assert first == second


def test_the_page_on_the_architecture_quotes_what_is_counted(crossed: list[dict[str, Crossed]]) -> None:
    counted = {}
    for call in CALLS:
        kinds = kinds_of(crossed[0][call])
        counted[call] = (len(entries_of(call, crossed)), len(kinds), kinds)
    assert quoted() == counted
