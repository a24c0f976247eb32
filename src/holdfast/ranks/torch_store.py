"""The store of torch.distributed as the key-value store of ranks, and the ranks of a process group over it."""

from __future__ import annotations

import logging
import os
import time
from typing import Any

from holdfast.errors import RankError, UsageError
from holdfast.ranks.base import DEFAULT_TIMEOUT_SECONDS, Ranks
from holdfast.ranks.connection import Connection
from holdfast.ranks.single import Alone
from holdfast.ranks.store import StoreRanks

logger = logging.getLogger("holdfast")

__all__ = ["TorchStore", "torch_ranks"]

_SHORT_PAUSE_SECONDS = 0.0003
_NO_VALUE = "\0no value"


class TorchStore:
    """torch.distributed's store as a `KeyValue`."""

    def __init__(self, original: Any, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS) -> None:
        self._original = original
        self._timeout_seconds = timeout_seconds
        self._connection = Connection(original, timeout_seconds)
        self._compares = True
        self._warned = False

    def branch(self) -> TorchStore:
        return TorchStore(self._original, self._timeout_seconds)

    def set(self, key: str, value: bytes) -> None:
        self._connection.call("set", key, value)

    def get(self, key: str) -> bytes | None:
        # `get` alone would wait, and a wait that ends prints warnings and cannot be interrupted. To compare with what
        # no value is answers at once, in one message instead of two, and changes nothing.
        call, was_open = self._connection.call, self._connection.is_open
        if self._compares:
            try:
                found = bytes(call("compare_set", key, _NO_VALUE, _NO_VALUE))
            except NotImplementedError:
                self._compares = False
                logger.info("this store of torch.distributed cannot compare: agreements take two messages for one")
            except RuntimeError as error:
                # The other way shows whether the store is gone. If it is not, the next call takes this way again.
                self._note_failure(error)
            except RankError as error:
                # A connection that broke now is opened again; a host that did not answer has had its time.
                if not was_open or error.fields.get("timeout_seconds") is not None:
                    raise
                self._note_failure(error)
            else:
                return None if found == _NO_VALUE.encode() else found
        return bytes(call("get", key)) if call("check", [key]) else None

    def _note_failure(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            logger.warning("the store of torch.distributed failed once, and is asked again: %s", error)

    def delete(self, key: str) -> None:
        self._connection.call("delete_key", key)

    def pause(self, seconds: float) -> None:
        # A short sleep takes several times as long as it says: the other ranks get the processor all the same.
        if seconds < _SHORT_PAUSE_SECONDS:
            os.sched_yield()
        else:
            time.sleep(seconds)

    def count(self, key: str) -> int:
        return int(self._connection.call("add", key, 1))


def torch_ranks(process_group: Any = None, *, timeout_seconds: float) -> Ranks:
    """Return the ranks of a process group, of all processes when None, or `Alone` without torch.distributed."""
    import torch.distributed as dist

    if not (dist.is_available() and dist.is_initialized()):
        if process_group is not None:
            raise UsageError("process_group was given, but torch.distributed is not initialised")
        return Alone()
    members = dist.get_process_group_ranks(process_group or dist.group.WORLD)
    rank, size = dist.get_rank(process_group), len(members)
    if rank < 0:
        raise UsageError(
            f"this process (global rank {dist.get_rank()}) is not in the process_group that saves",
            advice="build the manager only on the members of the group",
        )
    if size == 1:
        return Alone()
    name = f"holdfast/{'-'.join(map(str, members)) if size < dist.get_world_size() else 'all'}"
    store = TorchStore(_default_store(), timeout_seconds)
    # Managers of the same ranks are told apart by the order in which they are made, which is the same on every rank.
    number = store.count(f"{name}/made/{rank}")
    return StoreRanks(store, rank, size, name=f"{name}/{number}", timeout_seconds=timeout_seconds)


def _default_store() -> Any:
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()
