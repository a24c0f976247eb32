"""How messages name ranks."""

from __future__ import annotations

import pytest

from holdfast.ranks.wording import ranks_in_words


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((3,), "rank 3"), ((0, 2), "ranks 0, 2"), (tuple(range(10)), "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 2 more")],
)
def test_the_first_ranks_are_named_and_the_others_counted(ranks: tuple[int, ...], text: str) -> None:
    assert ranks_in_words(ranks) == text
