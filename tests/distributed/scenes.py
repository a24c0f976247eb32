"""Several short plays in one start of the ranks, because starting a rank costs more than what it does.

    play = run_scenes(2, [first, second], folder)      # each is called as first(rank, folder / "first")
    assert play("first") == [...]                      # the value of every rank, or the traceback of what it raised

What a scene expects to be raised it catches itself, with `caught`.
"""

from __future__ import annotations

import hashlib
import os
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import holdfast
from holdfast.errors import HoldfastError
from holdfast.testing import values
from tests.ranks import run_ranks

Scene = Callable[[int, Path], Any]
_PATIENCE_SECONDS = 200.0
Play = Callable[[str], list[Any]]


def run_scenes(size: int, scenes: Sequence[Scene], folder: Path, *, timeout_seconds: float = 600.0) -> Play:
    """Play all scenes on `size` ranks. One that fails does not keep the others from being played."""
    played = values(run_ranks(size, _play, tuple(scenes), folder, timeout_seconds=timeout_seconds))

    def results(name: str) -> list[Any]:
        failures = [scenes_of_rank.get(name, (None, "was never played"))[1] for scenes_of_rank in played]
        assert not any(failures), "\n".join(f"rank {rank} in {name}: {text}" for rank, text in enumerate(failures))
        return [scenes_of_rank[name][0] for scenes_of_rank in played]

    return results


def _play(rank: int, scenes: Sequence[Scene], folder: Path) -> dict[str, tuple[Any, str]]:
    played: dict[str, tuple[Any, str]] = {}
    for scene in scenes:
        name = scene.__name__
        try:
            played[name] = scene(rank, folder / name), ""
        except Exception:
            played[name] = None, traceback.format_exc()
        try:
            meet(f"after {name}")
        except TimeoutError:
            # A rank that hangs in one scene cannot play the next; what was played until then is told.
            break
    return played


def meet(name: str, size: int | None = None) -> None:
    """Wait for the other ranks, through the store: what is under test may not depend on collectives."""
    import torch.distributed as dist

    store = dist.distributed_c10d._get_default_store()
    size = size or dist.get_world_size()
    store.add(f"meet/{name}", 1)
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while store.add(f"meet/{name}", 0) < size:
        if time.monotonic() > deadline:
            raise TimeoutError(f"not all ranks came to '{name}'")
        time.sleep(0.002)


def caught(work: Callable[[], Any]) -> Any:
    """The error of ours that the work raises. None when it raises none."""
    try:
        work()
    except HoldfastError as error:
        return error
    return None


def the_same_error(errors: Sequence[Any]) -> Any:
    """The one error that all ranks raised: the same type, the same fields, the same text."""
    assert all(isinstance(error, HoldfastError) for error in errors), errors
    first = errors[0]
    for error in errors:
        assert (type(error), error.fields, str(error)) == (type(first), first.fields, str(first)), errors
    return first


def hash_tree(root: Path) -> dict[str, str]:
    """Every name below a folder, with the digest of what is in it."""
    return {
        str(path.relative_to(root)): os.readlink(path)
        if path.is_symlink()
        else "folder"
        if path.is_dir()
        else hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(root.rglob("*"))
    }


def bits(value: Any) -> Any:
    """A state, however it is nested, as something that is equal only where every bit is, and that can be sent."""
    if isinstance(value, torch.Tensor):
        local = value.to_local() if hasattr(value, "to_local") else value
        dense = local.detach().resolve_conj().resolve_neg().contiguous()
        return str(value.dtype), tuple(value.shape), dense.reshape(-1).view(torch.uint8).numpy().tobytes()
    if isinstance(value, dict):
        return {key: bits(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [bits(inner) for inner in value]
    return type(value).__name__, repr(value)


class Holder:
    """A component that holds a state as it is, and counts how often it was given one."""

    def __init__(self, **state: Any) -> None:
        self.state = state
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return dict(self.state)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = dict(state)
        self.loads += 1


class AdaptingHolder(Holder):
    """One that can take up the states of another number of ranks."""

    def load_world_state(self, states: Sequence[dict[str, Any]], index: int, count: int) -> None:
        self.state = {"states": [dict(state) for state in states], "index": index, "count": count}
        self.loads += 1


def trees(run: Path | str, selector: str | int = "latest") -> list[tuple[str, str]]:
    """The component and scope of everything that is stored apart."""
    return sorted((tree.component, tree.scope) for tree in holdfast.resolve(run, selector).manifest.trees)
