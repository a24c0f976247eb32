"""Compare guards: values that a checkpoint was made with and that must be the same now. Both sides enter; errors
leave."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping

from holdfast.errors import GuardMismatchError
from holdfast.loading.strategy import LoadStrategy
from holdfast.ondisk.codec import Json, plain, typed
from holdfast.runs.checkpoint import Checkpoint

logger = logging.getLogger("holdfast")

__all__ = ["check_guards"]

_SHOWN_CHARACTERS = 80


def check_guards(checkpoint: Checkpoint, live: Mapping[str, Json], strategy: LoadStrategy, *, logs: bool) -> None:
    """Compare the guards that both sides name. Those that differ are an error or, if the strategy accepts them, a
    warning, which is logged where `logs` is set."""
    saved = checkpoint.manifest.guards
    names = sorted(saved.keys() & live.keys())
    wrong = {name: _shown_apart(saved[name], live[name]) for name in names if saved[name] != live[name]}
    if not wrong:
        return
    text = "; ".join(f"{name}: {old} in the checkpoint, {new} now" for name, (old, new) in wrong.items())
    if strategy.on_guard_mismatch == "warn":
        if logs:
            logger.warning("guards differ, and are ignored on request: %s", text)
        return
    raise GuardMismatchError(
        f"guards differ: {text}",
        step=checkpoint.step,
        guards=wrong,
        advice="restore with what the checkpoint was made with, or on_guard_mismatch='warn'",
    )


def _shown_apart(old: Json, new: Json) -> tuple[str, str]:
    """Return two values that differ, for people, in the shortest way that shows that they do: a tuple and a list look
    alike, and so do a number and its digits."""
    ways = (lambda value: str(plain(value)), typed, json.dumps)
    for way in ways:
        left, right = way(old), way(new)
        if left != right:
            break
    shorter = min(len(left), len(right))
    alike = next((place for place in range(shorter) if left[place] != right[place]), shorter)
    return _cut(left, alike), _cut(right, alike)


def _cut(text: str, alike: int) -> str:
    """Return at most 80 characters of a text, among them the first that the other text does not have."""
    start = 0 if alike < _SHOWN_CHARACTERS - 10 else alike - 10
    rest = ("..." if start else "") + text[start:]
    return rest if len(rest) <= _SHOWN_CHARACTERS else rest[: _SHOWN_CHARACTERS - 3] + "..."
