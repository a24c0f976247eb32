"""Check the states of elastic loaders before any of them is taken up. Values of a checkpoint enter; records leave.

Nothing in a checkpoint is trusted to be of the right type. What cannot be taken up is a `StateMismatchError`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from holdfast.errors import StateMismatchError, UsageError

__all__ = [
    "Place",
    "check_count",
    "count_in",
    "refuse",
    "require_live_pass",
    "require_place",
    "require_same",
    "states_by_rank",
]

UNTOUCHED = "no live object was changed"
# Seeds of torch are of 64 bits, and an epoch is added to one.
_MOST = 2**62


@dataclass(frozen=True, slots=True)
class Place:
    """One rank among those that the data is dealt to."""

    rank: int
    size: int

    @classmethod
    def of(cls, rank: int | None, size: int | None) -> Place:
        """Return the place that was given, or that of this process among the ranks of torch.distributed."""
        if (rank is None) != (size is None):
            raise UsageError(f"rank={rank!r} and size={size!r}", advice="give both, or neither")
        if rank is not None and size is not None:
            check_count("size", size, least=1)
            check_count("rank", rank)
            if rank >= size:
                raise UsageError(f"rank={rank} of size={size}", advice="ranks are numbered from 0")
            return cls(rank, size)
        import torch.distributed as dist

        if dist.is_available() and dist.is_initialized():
            return cls(dist.get_rank(), dist.get_world_size())
        # Each of them would read all of the data.
        if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
            raise UsageError(
                f"the process group is not initialized, and WORLD_SIZE={os.environ['WORLD_SIZE']} processes were "
                "started",
                advice="call torch.distributed.init_process_group() first, or give rank= and size=",
            )
        return cls(0, 1)


def check_count(name: str, value: object, *, least: int = 0) -> None:
    """Raise a UsageError for what is no whole number, or too small, or too large."""
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= _MOST:
        raise UsageError(f"{name}={value!r:.100}", advice=f"give a whole number of at least {least} and at most 2**62")


def refuse(problem: str, advice: str = "") -> NoReturn:
    """Raise the error of a state that cannot be taken up."""
    raise StateMismatchError(problem, advice=f"{advice}; {UNTOUCHED}" if advice else UNTOUCHED)


def count_in(state: Mapping[str, Any], name: str) -> int:
    """Return a number of a state, which a damaged or strange one may not have."""
    value = state.get(name)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MOST:
        refuse(f"the state has {name}={value!r:.100}, which is no count")
    return value


def require_live_pass(kind: str, newest: bool, *, failed: bool) -> None:
    """Refuse to go on with a pass whose batches have no position that could be saved."""
    name = f"{'an' if kind.startswith('E') else 'a'} {kind}"
    if not newest:
        raise UsageError(
            f"a pass over {name} goes on after the loader was restored or set to another epoch, or after another "
            "pass was begun",
            advice="use one iterator for an epoch, and begin a new pass after a restore: for batch in loader",
        )
    if failed:
        raise UsageError(
            f"a pass over {name} goes on after an error in it",
            advice="restore a checkpoint, or give the loader its own state_dict(), and begin a new pass: it goes on "
            "with the batch that failed",
        )


def require_same(state: Mapping[str, Any], kind: str, now: Mapping[str, Any]) -> None:
    """Refuse what is no state of this kind of loader, or the state of one that was built in another way."""
    if not isinstance(state, Mapping) or state.get("kind") != kind:
        refuse(
            f"this is no state of an {kind}: " + _keys_of(state),
            "it was saved with another loader: restore it into that one, or leave it out with skip=",
        )
    for name, value in now.items():
        if type(state.get(name)) is not type(value) or state[name] != value:
            refuse(
                f"the data is not what was saved: {name} was {state.get(name)!r:.100} and is {value!r:.100} now",
                "build the loader as it was, or leave it out with skip= to begin the data anew",
            )
    for name in ("epoch", "rank", "size"):
        count_in(state, name)
    if not state["rank"] < state["size"]:
        refuse(f"the state is of rank {state['rank']} of {state['size']}")


def require_place(state: Mapping[str, Any], place: Place) -> None:
    """Refuse the state of another rank, or of another number of ranks."""
    if (state["rank"], state["size"]) != (place.rank, place.size):
        refuse(
            f"the state is of rank {state['rank']} of {state['size']}, and the loader is rank {place.rank} of "
            f"{place.size}",
            "where several ranks read the same data, pass PerRank(loader, group=...) with the group of the ranks "
            "that read different data, and restore with LoadStrategy(on_world_change='adapt')",
        )


def states_by_rank(states: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Return one state for each of the ranks that the data was dealt to. Ranks that read the same data, as those of
    tensor parallelism do, must have had the same state."""
    found: dict[int, Mapping[str, Any]] = {}
    sizes = {state["size"] for state in states}
    if len(sizes) != 1:
        refuse(f"the states are of loaders that dealt to different numbers of ranks: {sorted(sizes)}")
    for state in states:
        if found.setdefault(state["rank"], state) != state:
            refuse(
                f"two states of rank {state['rank']} of {state['size']} differ",
                "they were saved by loaders with the same rank= that were not at the same sample",
            )
    size = sizes.pop()
    missing = next((rank for rank in range(size) if rank not in found), None)
    if missing is not None:
        refuse(f"the state of rank {missing} of {size} is missing")
    return [found[rank] for rank in sorted(found)]


def _keys_of(state: object) -> str:
    return f"it has {sorted(map(str, state))[:8]}" if isinstance(state, Mapping) else f"it is {state!r:.100}"
