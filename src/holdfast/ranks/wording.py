"""Name ranks in messages. Numbers enter, text leaves."""

from __future__ import annotations

from collections.abc import Sequence

_SHOWN_RANKS = 8


def ranks_in_words(ranks: Sequence[int]) -> str:
    """Return the numbers of ranks for a message, the first few of them where there are many."""
    shown = ", ".join(map(str, ranks[:_SHOWN_RANKS]))
    more = f" and {len(ranks) - _SHOWN_RANKS} more" if len(ranks) > _SHOWN_RANKS else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {shown}{more}"
