"""Check what `HoldfastWriter` and `HoldfastReader` are given. Options and locations enter; errors leave."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from holdfast.errors import HoldfastError, UsageError
from holdfast.storage.registry import open_storage

__all__ = ["NO_OPTION", "is_location", "refuse_options"]


NO_OPTION = {
    "single_file_per_rank": "a rank writes one file, and another only for a tensor that it has several pieces of",
    "sync_files": "a checkpoint is committed only after its files are durable",
    "thread_count": "one thread of each rank writes, past the page cache where the storage can",
    "per_thread_copy_ahead": "a tensor is copied from its device in pieces, as it is written",
    "cache_staged_state_dict": "give async_save an async_stager, which keeps its buffers",
    "overwrite": "a committed checkpoint never changes; a save adds one, and a reader takes the latest",
    "serialization_format": "tensors are stored as safetensors, values by the typed codec",
    "_extensions": "tensor files stay safetensors that other programs can read, so they are not transformed",
    "_extension_registry": "tensor files stay safetensors that other programs can read, so they are not transformed",
}


def refuse_options(options: Mapping[str, Any], kind: str) -> None:
    """Raise for an option of PyTorch's own storage, with the reason why there is none, and for an unknown one."""
    for name in options:
        if name not in NO_OPTION:
            raise TypeError(f"{kind}() got an unexpected keyword argument {name!r}")
        raise UsageError(f"{kind} has no option {name}: {NO_OPTION[name]}", advice="leave it out")


def is_location(checkpoint_id: object) -> bool:
    """Return whether a checkpoint id can be the path or the URL of a run."""
    if not isinstance(checkpoint_id, str | os.PathLike) or not os.fspath(checkpoint_id):
        return False
    try:
        open_storage(checkpoint_id)
    except HoldfastError:
        return False
    return True
