"""Take a checkpoint folder of the `transformers` Trainer apart. A folder enters; the parts of the new checkpoint leave.

`training_args.bin` is a pickle of code objects and is never opened. The folder may come from a stranger: a link that
leads out of it is refused, since it could put a private file of the reader into a checkpoint that is passed on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from holdfast.errors import CorruptCheckpointError, UnsafeContentError, UnsupportedFormatError
from holdfast.formats.hub.folder import Folder
from holdfast.formats.importing.parts import is_plain
from holdfast.formats.importing.plain import Request, Taker
from holdfast.formats.importing.random_state import as_random_state
from holdfast.formats.importing.records import Training
from holdfast.formats.source import Source
from holdfast.formats.weights.selection import find_extra_states, find_weights
from holdfast.ondisk.codec import MAX_DEPTH
from holdfast.ondisk.paths import rank_scope

__all__ = ["STATE_FILE", "is_trainer_folder", "take_trainer_folder"]

STATE_FILE = "trainer_state.json"
COMPONENT = "trainer_state"
_ARGUMENTS = "training_args.bin"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_VALUES = {"scheduler.pt": "scheduler", "scaler.pt": "scaler"}
_RANDOM_STATE = re.compile(r"rng_state(?:_([0-9]{1,6}))?\.pth")
_MAX_EPOCHS = 1 << 53


def is_trainer_folder(path: Path) -> bool:
    """Return whether a folder is a checkpoint of the Trainer, and not one that only holds weights."""
    return path.is_dir() and (path / STATE_FILE).is_file()


def take_trainer_folder(
    path: Path, request: Request, open_source: Callable[[Path], Source], closing: ExitStack
) -> Training:
    """Take apart what the Trainer saves. `open_source` opens a file or a folder of any format; `closing` closes it."""
    taker = Taker(request)
    folder = Folder(path)

    def opened(name: str) -> Source:
        _require_inside(folder, name)
        return closing.enter_context(open_source(path / name))

    weights_name = _weights_name(folder)
    # A folder of Hugging Face checks each of its files itself.
    weights = opened(weights_name) if weights_name else closing.enter_context(open_source(path))
    state = _read_state(folder)
    taker.add_model("model", {**find_weights(weights), **find_extra_states(weights)}, weights, "model")
    names = sorted(entry.name for entry in path.iterdir())
    assets = {name: asset for name, asset in weights.assets.items() if name not in _not_assets(names)}
    used = {STATE_FILE, *(name.partition("/")[0] for name in assets), *filter(_is_weights, names)}
    used |= {"config.json", "adapter_config.json"} if weights.config is not None else set()
    if "optimizer.pt" in names and not taker.skips("optimizer.pt"):
        optimizer = opened("optimizer.pt")
        taker.add_optimizer("optimizer.pt", optimizer.tree, optimizer, "optimizer")
    for name, component in _VALUES.items():
        if name in names and not taker.skips(name):
            values = opened(name)
            taker.add_values(name, values.tree, values, component)
    ranks = _add_random_states(folder, names, taker, opened)
    used |= {"optimizer.pt", *_VALUES, *(name for name in names if _RANDOM_STATE.fullmatch(name))}
    taker.progress.update({key: value for key, value in state.items() if is_plain(value)})
    rest = {key: value for key, value in state.items() if not is_plain(value)}
    if rest and not taker.skips(STATE_FILE):
        taker.add_values(STATE_FILE, rest, weights, COMPONENT)
    taker.left += [_reason(name) for name in names if name not in used]
    return taker.training(
        "trainer",
        steps_done=_steps_done(state, folder),
        epochs_done=_epochs_done(state, folder),
        config=weights.config,
        assets=assets,
        ranks=ranks,
    )


def _weights_name(folder: Folder) -> str:
    """Return the file to open for the weights; empty where the folder as a whole is one of Hugging Face."""
    if folder.has("config.json") or folder.has("adapter_config.json"):
        return ""
    for name in _WEIGHTS:
        if folder.has(name):
            return name
    if any(folder.has(f"{name}.index.json") for name in _WEIGHTS):
        return ""
    raise UnsupportedFormatError(
        "the folder of the Trainer has no weights that are known",
        file=str(folder.path),
        advice=f"looked for {', '.join(_WEIGHTS)}; a folder of DeepSpeed or of sharded FSDP is converted first",
    )


def _is_weights(name: str) -> bool:
    return name.startswith(("model", "pytorch_model", "adapter_model")) and name.endswith(
        (".safetensors", ".bin", ".index.json")
    )


def _not_assets(names: list[str]) -> set[str]:
    """Return the files that are no assets: the state of the training, which is taken apart or left."""
    state = {STATE_FILE, _ARGUMENTS, "optimizer.pt", *_VALUES}
    return state | {name for name in names if _RANDOM_STATE.fullmatch(name)}


def _require_inside(folder: Folder, name: str) -> None:
    """Raise an UnsafeContentError for a link out of the folder, and for what is no regular file."""
    folder.open(name).close()


def _read_state(folder: Folder) -> Mapping[str, Any]:
    state = folder.json(STATE_FILE)
    if not isinstance(state, dict):
        raise _damaged(folder, "the file is no JSON object")
    waiting: list[tuple[Any, int]] = [(state, 0)]
    while waiting:
        value, depth = waiting.pop()
        if depth > MAX_DEPTH:
            raise _damaged(folder, f"the values nest more than {MAX_DEPTH} deep")
        if isinstance(value, dict):
            waiting += ((inner, depth + 1) for pair in value.items() for inner in pair)
        elif isinstance(value, list):
            waiting += ((inner, depth + 1) for inner in value)
        elif isinstance(value, str) and not _is_text(value):
            raise _damaged(folder, f"{value!r:.100} is no text: it has half of a surrogate pair")
    return state


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _steps_done(state: Mapping[str, Any], folder: Folder) -> int | None:
    steps = state.get("global_step")
    if steps is not None and (type(steps) is not int or steps < 0):
        raise _damaged(folder, f"'global_step' is {steps!r:.100}, which is no number of steps")
    return steps


def _epochs_done(state: Mapping[str, Any], folder: Folder) -> int | None:
    """Return the whole epochs. The Trainer counts in fractions."""
    epochs = state.get("epoch")
    if epochs is None:
        return None
    # The comparison is false for NaN, and comes before int(), which raises for infinity.
    if type(epochs) not in (int, float) or not 0 <= epochs < _MAX_EPOCHS:
        raise _damaged(folder, f"'epoch' is {epochs!r:.100}, which is no number of epochs")
    return int(epochs)


def _damaged(folder: Folder, problem: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(
        problem, file=str(folder.path / STATE_FILE), advice="take the file of an undamaged copy of the checkpoint"
    )


def _add_random_states(folder: Folder, names: list[str], taker: Taker, opened: Callable[[str], Source]) -> int:
    """Add the random state of each rank, and return the number of ranks. One that cannot be taken is left and listed:
    training goes on without it, though not exactly."""
    found = {int(match[1] or 0): name for name in names if (match := _RANDOM_STATE.fullmatch(name))}
    if sorted(found) != list(range(len(found))):
        taker.left.append(f"{', '.join(found.values())}: the random state of a rank in between is not there")
        return 1
    states = {}
    for rank, name in found.items():
        if taker.skips(name):
            return 1
        _require_inside(folder, name)
        try:
            source = opened(name)
            state = as_random_state(source.tree)
        except (UnsafeContentError, UnsupportedFormatError) as error:
            taker.left.append(f"{name}: {error.problem}")
            return 1
        if state is None:
            taker.left.append(f"{name}: not a random state of Python, NumPy and torch")
            return 1
        states[rank] = (name, state, source)
    for rank, (name, state, source) in states.items():
        taker.add_values(name, state, source, "rng", rank_scope(rank))
    return max(len(states), 1)


def _reason(name: str) -> str:
    if name == _ARGUMENTS:
        return f"{name}: a pickle of code objects, which is never opened"
    return f"{name}: not part of the training's state"
