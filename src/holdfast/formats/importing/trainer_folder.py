"""Take a checkpoint folder of the `transformers` Trainer apart. A folder enters; the parts of the new checkpoint leave.

`training_args.bin` is a pickle of code objects and is never opened.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from holdfast.errors import CorruptCheckpointError, UnsafeContentError, UnsupportedFormatError
from holdfast.formats.binary import BinaryFile
from holdfast.formats.importing.parts import is_plain
from holdfast.formats.importing.plain import Request, Taker
from holdfast.formats.importing.random_state import as_random_state
from holdfast.formats.importing.records import Training
from holdfast.formats.source import Source
from holdfast.formats.weights.selection import find_extra_states, find_weights
from holdfast.ondisk.decoding import from_json
from holdfast.ondisk.paths import rank_scope

__all__ = ["STATE_FILE", "is_trainer_folder", "take_trainer_folder"]

STATE_FILE = "trainer_state.json"
COMPONENT = "trainer_state"
_ARGUMENTS = "training_args.bin"
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
_VALUES = {"scheduler.pt": "scheduler", "scaler.pt": "scaler"}
_RANDOM_STATE = re.compile(r"rng_state(?:_([0-9]{1,6}))?\.pth")
_MAX_STATE_BYTES = 1 << 30


def is_trainer_folder(path: Path) -> bool:
    """Return whether a folder is a checkpoint of the Trainer, and not one that only holds weights."""
    return path.is_dir() and (path / STATE_FILE).is_file()


def take_trainer_folder(
    path: Path, request: Request, open_source: Callable[[Path], Source], closing: ExitStack
) -> Training:
    """Take apart what the Trainer saves. `open_source` opens a file or a folder of any format; `closing` closes it."""
    taker = Taker(request)

    def opened(inner: Path) -> Source:
        return closing.enter_context(open_source(inner))

    weights = opened(_weights_of(path))
    state = _read_state(path / STATE_FILE)
    taker.add_model("model", {**find_weights(weights), **find_extra_states(weights)}, weights, "model")
    names = sorted(entry.name for entry in path.iterdir())
    assets = {name: asset for name, asset in weights.assets.items() if name not in _not_assets(names)}
    used = {STATE_FILE, *(name.partition("/")[0] for name in assets), *filter(_is_weights, names)}
    used |= {"config.json", "adapter_config.json"} if weights.config is not None else set()
    if "optimizer.pt" in names and not taker.skips("optimizer.pt"):
        optimizer = opened(path / "optimizer.pt")
        taker.add_optimizer("optimizer.pt", optimizer.tree, optimizer, "optimizer")
    for name, component in _VALUES.items():
        if name in names and not taker.skips(name):
            values = opened(path / name)
            taker.add_values(name, values.tree, values, component)
    ranks = _add_random_states(path, names, taker, opened)
    used |= {"optimizer.pt", *_VALUES, *(name for name in names if _RANDOM_STATE.fullmatch(name))}
    taker.progress.update({key: value for key, value in state.items() if is_plain(value)})
    rest = {key: value for key, value in state.items() if not is_plain(value)}
    if rest and not taker.skips(STATE_FILE):
        taker.add_values(STATE_FILE, rest, weights, COMPONENT)
    taker.left += [_reason(name) for name in names if name not in used]
    steps, epochs = state.get("global_step"), state.get("epoch")
    return taker.training(
        "trainer",
        steps_done=steps if isinstance(steps, int) else None,
        epochs_done=int(epochs) if isinstance(epochs, int | float) and epochs >= 0 else None,
        config=weights.config,
        assets=assets,
        ranks=ranks,
    )


def _weights_of(path: Path) -> Path:
    """Return what to open for the weights: the folder where it is one of Hugging Face, else the file itself."""
    if (path / "config.json").is_file() or (path / "adapter_config.json").is_file():
        return path
    for name in _WEIGHTS:
        if (path / name).is_file():
            return path / name
    if any((path / f"{name}.index.json").is_file() for name in _WEIGHTS):
        return path
    raise UnsupportedFormatError(
        "the folder of the Trainer has no weights that are known",
        file=str(path),
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


def _read_state(path: Path) -> Mapping[str, Any]:
    with BinaryFile.open(path) as file:
        if file.size_bytes > _MAX_STATE_BYTES:
            raise CorruptCheckpointError(f"the file has {file.size_bytes} bytes", file=file.name)
        try:
            return from_json(file.read(0, file.size_bytes), dict[str, Any])
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
            raise CorruptCheckpointError(f"the file is no JSON object: {error}", file=file.name) from None


def _add_random_states(path: Path, names: list[str], taker: Taker, opened: Callable[[Path], Source]) -> int:
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
        try:
            source = opened(path / name)
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
