"""Checkpoints for distributed PyTorch training: committed all or not at all, verified to the byte, resumed exactly.

Names are loaded when they are first used: `import holdfast` costs little, and the command line never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast._version import __version__

if TYPE_CHECKING:
    from holdfast.blocks import (
        build_train_state,
        checkpoints,
        examine,
        is_restart,
        mend,
        peek,
        prune,
        resolve,
        restore_train_state,
        retention,
        unlock,
        verify,
    )
    from holdfast.catalog import Checkpoint
    from holdfast.checkpointer import AsyncCheckpointer
    from holdfast.components import PerRank, RNGState, Sharded, Shared, Trainable, get_rng_state, set_rng_state
    from holdfast.configuration import CheckpointConfig
    from holdfast.contexts import LoadContext, SaveContext
    from holdfast.doctor import Finding
    from holdfast.errors import (
        CheckpointNotFoundError,
        ClosedError,
        CorruptCheckpointError,
        DamagedRecordError,
        GuardMismatchError,
        HoldfastError,
        RankError,
        RunInUseError,
        SaveFailedError,
        SaveUncertainError,
        StateMismatchError,
        StorageError,
        UnsafeContentError,
        UnsupportedFormatError,
        UsageError,
    )
    from holdfast.formats.dcp import HoldfastReader, HoldfastWriter
    from holdfast.handle import SaveHandle
    from holdfast.manager import CheckpointManager, RestoreResult
    from holdfast.plugins import CheckpointManagerProtocol, HoldfastManager, create_checkpoint_manager
    from holdfast.policies import (
        At,
        Every,
        KeepAll,
        KeepBest,
        KeepEvery,
        KeepLast,
        KeepTagged,
        OnLastStep,
        OnSignal,
        TimeLimit,
    )
    from holdfast.records.codec import register_type
    from holdfast.records.events import Event
    from holdfast.records.linknames import LinkTemplate
    from holdfast.records.report import Report
    from holdfast.records.strategy import LoadStrategy
    from holdfast.stages.retain import Decision

_HOME = {
    "CheckpointManager": "manager",
    "RestoreResult": "manager",
    "SaveHandle": "handle",
    "AsyncCheckpointer": "checkpointer",
    "Event": "records.events",
    "LoadStrategy": "records.strategy",
    "Report": "records.report",
    "CheckpointConfig": "configuration",
    "SaveContext": "contexts",
    "LoadContext": "contexts",
    "CheckpointManagerProtocol": "plugins",
    "HoldfastManager": "plugins",
    "create_checkpoint_manager": "plugins",
    "LinkTemplate": "records.linknames",
    "Decision": "stages.retain",
    **dict.fromkeys(
        (
            "At",
            "Every",
            "KeepAll",
            "KeepBest",
            "KeepEvery",
            "KeepLast",
            "KeepTagged",
            "OnLastStep",
            "OnSignal",
            "TimeLimit",
        ),
        "policies",
    ),
    "register_type": "records.codec",
    "Checkpoint": "catalog",
    "PerRank": "components",
    "RNGState": "components",
    "Sharded": "components",
    "Shared": "components",
    "Trainable": "components",
    "get_rng_state": "components",
    "set_rng_state": "components",
    "build_train_state": "blocks",
    "restore_train_state": "blocks",
    "checkpoints": "blocks",
    "examine": "blocks",
    "mend": "blocks",
    "unlock": "blocks",
    "Finding": "doctor",
    "is_restart": "blocks",
    "peek": "blocks",
    "prune": "blocks",
    "retention": "blocks",
    "resolve": "blocks",
    "verify": "blocks",
    "HoldfastReader": "formats.dcp",
    "HoldfastWriter": "formats.dcp",
    **dict.fromkeys(
        (
            "CheckpointNotFoundError",
            "ClosedError",
            "CorruptCheckpointError",
            "DamagedRecordError",
            "GuardMismatchError",
            "HoldfastError",
            "RankError",
            "RunInUseError",
            "SaveFailedError",
            "SaveUncertainError",
            "StateMismatchError",
            "StorageError",
            "UnsafeContentError",
            "UnsupportedFormatError",
            "UsageError",
        ),
        "errors",
    ),
}

__all__ = [  # noqa: PLE0604  (one list of names: `_HOME`)
    "__version__",
    *_HOME,
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'holdfast' has no attribute '{name}'")
    value = getattr(importlib.import_module(f"holdfast.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
