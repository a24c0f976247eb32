"""Save and load strategies for megatron-core's `dist_checkpointing`, over `HoldfastWriter` and `HoldfastReader`.

    dist_checkpointing.save(state, folder, sharded_strategy=HoldfastSaveStrategy())
    dist_checkpointing.load(state, folder, sharded_strategy=HoldfastLoadStrategy())

Megatron's sharded state dict enters, a committed checkpoint leaves, and back. Megatron's own planners decide which rank
writes and reads what. Megatron writes two small files into `folder` itself: `common.pt`, of which the checkpoint holds
a copy that every load compares, and `metadata.json`, which names the strategy. Everything else is a Holdfast run.
"""

from __future__ import annotations

import io
import os
import pickle
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata

import holdfast

try:
    import megatron.core
    from megatron.core.dist_checkpointing.core import CheckpointingException
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
    from megatron.core.dist_checkpointing.strategies import base, torch as native
    from megatron.core.safe_globals import SAFE_GLOBALS
except ImportError as error:
    raise ImportError(
        f"holdfast.integrations.megatron needs megatron-core 0.16, which cannot be imported: {error}; "
        "install it with: pip install 'megatron-core==0.16.*'"
    ) from error

__all__ = ["HoldfastCommonLoadStrategy", "HoldfastLoadStrategy", "HoldfastSaveStrategy", "register"]

BACKEND = "holdfast"
VERSION = 1

# The key under which the checkpoint has the content of Megatron's file of this name.
_COMMON = "common.pt"
# Where the run of a checkpoint folder lies, unless one run for all folders is given.
_RUN_FOLDER = "holdfast"
_ITERATION = re.compile(r"iter_(\d+)")


class HoldfastSaveStrategy(base.SaveShardedStrategy):  # type: ignore[misc]
    """A save strategy that commits a Holdfast checkpoint.

    run: one run for the checkpoints of all folders, such as a path or a URL. The step is the number in the folder's
        name, as in `iter_0000500`. None makes a run inside of each folder, so that the folder is complete by itself.

    A save returns when the checkpoint is committed. A folder that is saved to again gets a later checkpoint of the same
    step, and the load takes that one.
    """

    def __init__(self, run: str | os.PathLike[str] | None = None) -> None:
        _check_version()
        super().__init__(BACKEND, VERSION)
        self._run = run

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> None:
        """Write the sharded part of the state, and the content of `common.pt`, which Megatron has written before."""
        run, step = _place(self._run, checkpoint_dir)
        by_key, _, _ = native._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        state = _without_buffers(native.mcore_to_pyt_state_dict(by_key, False))
        if torch.distributed.get_rank() == 0:
            state[_COMMON] = _common_file(checkpoint_dir).read_bytes()
        planner = native.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        writer = holdfast.HoldfastWriter(run, step=step, resave=True)
        try:
            dcp.save(state, storage_writer=writer, planner=planner)
        except CheckpointException as error:
            raise _first_failure(error) from error


class HoldfastLoadStrategy(base.LoadShardedStrategy):  # type: ignore[misc]
    """A load strategy for what `HoldfastSaveStrategy` wrote.

    run: the run that the save strategy was given, or None.
    verify: as for `HoldfastReader`; "full" checks the digest of every byte that is needed before a tensor is changed.
    allowed_types: further classes that a `ShardedObject` may hold. Megatron pickles these objects. They are read with
        `weights_only=True`, so that nothing but plain values, tensors, the classes that megatron-core lists as safe and
        these can come out of them.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | None = None,
        *,
        verify: Any = "full",
        allowed_types: tuple[type, ...] = (),
    ) -> None:
        _check_version()
        self._run = run
        self._verify = verify
        self._allowed = tuple(allowed_types)

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def load(self, sharded_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        """Return the state dict, its tensors filled in place and its objects read from the checkpoint."""
        tensors = [one for one in nested_values(sharded_state_dict) if isinstance(one, ShardedTensor)]
        by_key, flat_mapping, renamed = native._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = _without_buffers(native.mcore_to_pyt_state_dict(by_key, True))
        state[_COMMON] = b""
        planner = native.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[one for one in tensors if not one.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={one.key: one for one in tensors if one.allow_shape_mismatch},
        )
        reader = self._reader(checkpoint_dir)
        try:
            dcp.load(state, storage_reader=reader, planner=planner)
        except CheckpointException as error:
            raise _first_failure(error, reader) from error
        _check_common(checkpoint_dir, state.pop(_COMMON))
        loaded = {key: self._unwrapped(key, value) for key, value in state.items()}
        result = native._replace_sharded_keys_with_state_dict_keys(loaded, flat_mapping, renamed)
        native._restore_dict_types(result, sharded_state_dict)
        return result

    def load_tensors_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Return the tensors of the checkpoint, by key, without their data."""
        metadata = self._metadata(checkpoint_dir)
        return native.TorchDistLoadShardedStrategy().load_tensors_metadata(checkpoint_dir, metadata)

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        """Return the tensors and the objects of the checkpoint, by key, without their data."""
        metadata = self._metadata(checkpoint_dir)
        found = native.TorchDistLoadShardedStrategy().load_tensors_metadata(checkpoint_dir, metadata)
        for key, kind in metadata.state_dict_metadata.items():
            if isinstance(kind, BytesStorageMetadata):
                found[key] = ShardedObject.empty_from_unique_key(key)
        return found

    def remove_sharded_tensors(self, checkpoint_dir: str | Path, key_prefix: str) -> None:
        raise holdfast.UsageError(
            f"tensors of '{checkpoint_dir}' were to be removed", advice="a committed checkpoint never changes"
        )

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        if loaded_backend != BACKEND:
            raise CheckpointingException(
                f"the checkpoint was saved by the backend '{loaded_backend}', not by HoldfastSaveStrategy; "
                "load it without sharded_strategy=, which takes the backend that its metadata.json names"
            )

    def check_version_compatibility(self, loaded_version: int) -> None:
        if loaded_version != VERSION:
            raise CheckpointingException(
                f"the checkpoint has version {loaded_version} of the backend '{BACKEND}', and this version of Holdfast "
                f"reads version {VERSION}; load it with the version that saved it"
            )

    def _reader(self, checkpoint_dir: str | Path) -> holdfast.HoldfastReader:
        return _reader_of(self._run, checkpoint_dir, self._verify)

    def _metadata(self, checkpoint_dir: str | Path) -> Metadata:
        metadata = self._reader(checkpoint_dir).read_metadata()
        metadata.state_dict_metadata.pop(_COMMON, None)
        return metadata

    def _unwrapped(self, key: str, value: Any) -> Any:
        if isinstance(value, bytes):
            return _unpickled(value, self._allowed, leaf=key)
        return native._unwrap_pyt_sharded_tensor(value)


class HoldfastCommonLoadStrategy(base.LoadCommonStrategy):  # type: ignore[misc]
    """A load strategy for the common state that reads the copy in the Holdfast checkpoint instead of `common.pt`.

    With it a load needs none of Megatron's files but `metadata.json`, and the common state is verified before it is
    unpickled, which Megatron's own strategy cannot do. The arguments are those of `HoldfastLoadStrategy`.
    """

    def __init__(
        self,
        run: str | os.PathLike[str] | None = None,
        *,
        verify: Any = "full",
        allowed_types: tuple[type, ...] = (),
    ) -> None:
        _check_version()
        self._run = run
        self._verify = verify
        self._allowed = tuple(allowed_types)

    def load_common(self, checkpoint_dir: str | Path) -> Any:
        """Return the part of the state dict that is the same on all ranks."""
        state = {_COMMON: b""}
        reader = _reader_of(self._run, checkpoint_dir, self._verify)
        try:
            # Each rank by itself: Megatron also asks for the common state on one rank alone.
            dcp.load(state, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise _first_failure(error, reader) from error
        return _unpickled(state[_COMMON], self._allowed, leaf=_COMMON)

    def load_sharded_objects(self, sharded_objects_state_dict: Any, checkpoint_dir: str | Path) -> Any:
        raise holdfast.UsageError(
            "the sharded objects of a Holdfast checkpoint are read by HoldfastLoadStrategy",
            advice="pass it as sharded_strategy=",
        )

    def check_backend_compatibility(self, loaded_backend: str) -> None:
        """Accept any: the common state is always written by Megatron's own strategy, and copied from there."""

    def check_version_compatibility(self, loaded_version: int) -> None:
        """Accept any, as for the backend."""


def register(run: str | os.PathLike[str] | None = None) -> None:
    """Make the strategies megatron-core's own choice for checkpoints of the backend "holdfast".

    `dist_checkpointing.load(state, folder)` then takes them for a folder whose `metadata.json` names this backend, and
    `sharded_strategy=("holdfast", 1)` names the save strategy. run: as for the strategies.
    """
    base.register_default_strategy(base.StrategyAction.SAVE_SHARDED, BACKEND, VERSION, HoldfastSaveStrategy(run))
    base.register_default_strategy(base.StrategyAction.LOAD_SHARDED, BACKEND, VERSION, HoldfastLoadStrategy(run))


# Where the checkpoint of a folder lies


def _place(run: str | os.PathLike[str] | None, checkpoint_dir: str | Path) -> tuple[str | os.PathLike[str], int | None]:
    """Return the run of a checkpoint folder, and the step that its name has."""
    name = os.path.basename(os.path.normpath(os.fspath(checkpoint_dir)))
    found = _ITERATION.fullmatch(name)
    step = int(found[1]) if found else None
    if run is None:
        return os.path.join(os.fspath(checkpoint_dir), _RUN_FOLDER), step
    if step is None:
        raise holdfast.UsageError(
            f"the folder '{name}' has no iteration in its name, and the run '{os.fspath(run)}' is for several folders",
            advice="name the folder as Megatron does, such as iter_0000500, or leave run= out",
        )
    return run, step


def _reader_of(run: str | os.PathLike[str] | None, checkpoint_dir: str | Path, verify: Any) -> holdfast.HoldfastReader:
    place, step = _place(run, checkpoint_dir)
    # In a run of its own the folder has one step, or, without a number in its name, the latest of what was saved to it.
    return holdfast.HoldfastReader(place, "latest" if run is None or step is None else step, verify=verify)


# The state that Megatron pickles


def _common_file(checkpoint_dir: str | Path) -> Path:
    file = Path(checkpoint_dir) / _COMMON
    if not file.is_file():
        raise holdfast.UsageError(
            f"'{checkpoint_dir}' has no {_COMMON}, which megatron-core writes before it calls the strategy",
            advice="save through dist_checkpointing.save, to a local folder, without the multi-storage client",
        )
    return file


def _check_common(checkpoint_dir: str | Path, stored: bytes) -> None:
    """Raise if the file that Megatron has read is not the one that was saved with this checkpoint."""
    file = Path(checkpoint_dir) / _COMMON
    if file.is_file() and file.read_bytes() != stored:
        raise holdfast.CorruptCheckpointError(
            f"{_COMMON} is not the one that was saved with this checkpoint: it is damaged, or of another save",
            file=str(file),
            advice="load with common_strategy=HoldfastCommonLoadStrategy(), which reads the copy in the checkpoint",
        )


def _without_buffers(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state with the content of each buffer, which is stored as it is. For a load it is a placeholder."""
    return {key: value.getvalue() if isinstance(value, io.BytesIO) else value for key, value in state.items()}


def _unpickled(content: bytes, allowed: tuple[type, ...], *, leaf: str) -> Any:
    with torch.serialization.safe_globals([*SAFE_GLOBALS, *allowed]):
        try:
            return torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            reason = str(error).strip().splitlines()[0]
            raise holdfast.UnsafeContentError(
                f"the pickled state holds a class that is not allowed, or no state at all: {reason}",
                leaf=leaf,
                advice="if you trust the class, name it in allowed_types=",
            ) from error


def _first_failure(error: CheckpointException, reader: holdfast.HoldfastReader | None = None) -> BaseException:
    """Return the error of the first rank that failed: Holdfast's own and Megatron's say what to do, PyTorch's bundle of
    them does not derive from Exception."""
    failures: list[BaseException] = [error.failures[rank][0] for rank in sorted(error.failures)]
    for failure in failures:
        if isinstance(failure, holdfast.HoldfastError):
            return failure
    if reader is not None:
        try:
            # PyTorch makes an AssertionError of what went wrong here.
            reader.read_metadata()
        except holdfast.HoldfastError as cause:
            return cause
    return failures[0] if failures else error


def _check_version() -> None:
    found = megatron.core.__version__
    if found.split(".")[:2] != ["0", "16"]:
        raise holdfast.UsageError(
            f"megatron-core {found} is installed, and this integration is tested with 0.16",
            advice="install megatron-core 0.16; its strategies are built on functions that other versions change",
        )
