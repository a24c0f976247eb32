"""Take a folder of Accelerate's `save_state` apart. A folder enters; the parts of the new checkpoint leave.

The components have the names that `holdfast.integrations.accelerate.HoldfastState` gives them. Accelerate does not
store the position in the data. A link that leads out of the folder is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from holdfast.errors import UnsafeContentError, UnsupportedFormatError
from holdfast.formats.hub.folder import Folder
from holdfast.formats.importing.plain import Request, Taker
from holdfast.formats.importing.random_state import as_random_state
from holdfast.formats.importing.records import Training
from holdfast.formats.source import Source
from holdfast.formats.weights.selection import find_extra_states, find_weights
from holdfast.ondisk.paths import rank_scope
from holdfast.state.devices import ACCELERATORS

__all__ = ["is_accelerate_folder", "take_accelerate_folder"]

_RANDOM_STATE = re.compile(r"random_states_([0-9]{1,6})\.pkl")
_MODEL = re.compile(r"(?:model|pytorch_model)(_[0-9]{1,3})?\.(?:safetensors|bin)")
_OPTIMIZER = re.compile(r"optimizer(_[0-9]{1,3})?\.bin")
_VALUES = re.compile(r"(?:(scheduler)(_[0-9]{1,3})?\.bin|(custom_checkpoint_[0-9]{1,3})\.pkl|(scaler)\.pt)")
_NAMES = {"random_state": "python", "numpy_random_seed": "numpy", "torch_manual_seed": "torch"}


def is_accelerate_folder(path: Path) -> bool:
    """Return whether a folder is one that `accelerator.save_state` wrote."""
    return path.is_dir() and (path / "random_states_0.pkl").is_file()


def take_accelerate_folder(
    path: Path, request: Request, open_source: Callable[[Path], Source], closing: ExitStack
) -> Training:
    """Take apart what `save_state` saves. `open_source` opens a file of any format; `closing` closes it."""
    taker, folder = Taker(request), Folder(path)
    names = sorted(entry.name for entry in path.iterdir())

    def opened(name: str) -> Source:
        folder.open(name).close()  # raises for a link out of the folder, and for what is no regular file
        return closing.enter_context(open_source(path / name))

    models = [(name, match[1] or "") for name in names if (match := _MODEL.fullmatch(name))]
    if not models:
        raise UnsupportedFormatError(
            "the folder of Accelerate has no weights that are known",
            file=str(path),
            advice="looked for model.safetensors and pytorch_model.bin; one of sharded FSDP or DeepSpeed is converted "
            "first",
        )
    for name, number in models:
        weights = opened(name)
        taker.add_model(name, {**find_weights(weights), **find_extra_states(weights)}, weights, f"model{number}")
    used = {name for name, _ in models}
    for name in names:
        match = _OPTIMIZER.fullmatch(name)
        values = _VALUES.fullmatch(name)
        if taker.skips(name) or not (match or values):
            continue
        used.add(name)
        source = opened(name)
        if match:
            taker.add_optimizer(name, source.tree, source, f"optimizer{match[1] or ''}")
        elif values:
            scheduler, number, custom, scaler = values.groups()
            taker.add_values(name, source.tree, source, f"{scheduler}{number or ''}" if scheduler else custom or scaler)
    ranks = _add_random_states(names, taker, opened)
    used |= {name for name in names if _RANDOM_STATE.fullmatch(name)}
    taker.left += [f"{name}: not part of the training's state" for name in names if name not in used]
    return taker.training("accelerate", ranks=ranks)


def _add_random_states(names: list[str], taker: Taker, opened: Callable[[str], Source]) -> int:
    """Add the random state of each rank and the accelerator's own count, and return the number of ranks. A random state
    that cannot be taken is left and listed: training goes on without it, though not exactly."""
    found = {int(match[1]): name for name in names if (match := _RANDOM_STATE.fullmatch(name))}
    states = {}
    for rank, name in sorted(found.items()):
        if taker.skips(name):
            return 1
        try:
            source = opened(name)
        except (UnsafeContentError, UnsupportedFormatError) as error:
            taker.left.append(f"{name}: {error.problem}")
            return 1
        tree = source.tree if isinstance(source.tree, Mapping) else {}
        if rank == 0 and type(tree.get("step")) is int:
            taker.add_values(f"{name}/step", {"step": tree["step"]}, source, "accelerate")
        state = as_random_state(_renamed(tree))
        if state is None:
            taker.left.append(f"{name}: not a random state of Python, NumPy and torch")
            return 1
        states[rank] = (name, state, source)
    if sorted(states) != list(range(len(states))):
        taker.left.append(f"{', '.join(found.values())}: the random state of a rank in between is not there")
        return 1
    for rank, (name, state, source) in states.items():
        taker.add_values(name, state, source, "rng", rank_scope(rank))
    return max(len(states), 1)


def _renamed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the random state under the names that others use."""
    devices = {f"torch_{accelerator.type}_manual_seed": accelerator.type for accelerator in ACCELERATORS}
    names = _NAMES | devices
    return {names[name]: value for name, value in tree.items() if name in names}
