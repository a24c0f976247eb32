"""Take a Lightning checkpoint apart. A tree enters; the parts of the new checkpoint leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.formats.importing.parts import is_model_state, is_plain
from holdfast.formats.importing.plain import Request, Taker
from holdfast.formats.importing.records import Training
from holdfast.formats.source import Source

__all__ = ["is_lightning", "take_lightning"]

COMPONENT = "lightning"
"""The component of what only Lightning knows: loops, callbacks, states of its plug-ins."""


def is_lightning(tree: Mapping[str, Any]) -> bool:
    """Return whether a dict is what Lightning's trainer saves."""
    return is_model_state(tree.get("state_dict")) and isinstance(tree.get("pytorch-lightning_version"), str)


def take_lightning(source: Source, request: Request) -> Training:
    """Take apart what Lightning saves. `global_step` counts the steps that are done, of all optimizers together."""
    tree, taker = source.tree, Taker(request)
    rest: dict[str, Any] = {}
    for key, value in tree.items():
        if taker.skips(key):
            continue
        if key == "state_dict":
            taker.add_model(key, value, source, "model")
        elif key in ("optimizer_states", "lr_schedulers") and isinstance(value, list):
            _add_each(key, value, taker, source)
        elif key == "hyper_parameters" and isinstance(value, Mapping):
            taker.set_config(key, value)
        elif is_plain(value):
            taker.progress[key] = value
        else:
            rest[key] = value
    if rest:
        taker.add_values(COMPONENT, rest, source, COMPONENT)
    steps = tree.get("global_step")
    return taker.training(COMPONENT, steps_done=steps if isinstance(steps, int) else None, assets=source.assets)


def _add_each(key: str, states: list[Any], taker: Taker, source: Source) -> None:
    """Add optimizers or schedulers: `optimizer` where there is one, `optimizer_0` and so on where there are more."""
    name = "optimizer" if key == "optimizer_states" else "scheduler"
    add = taker.add_optimizer if key == "optimizer_states" else taker.add_values
    for number, state in enumerate(states):
        add(f"{key}.{number}", state, source, name if len(states) == 1 else f"{name}_{number}")
