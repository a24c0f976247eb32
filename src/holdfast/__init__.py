"""Checkpoints for distributed PyTorch training: committed all or not at all, verified to the byte, resumed exactly.

Names are loaded when they are first used: `import holdfast` costs little, and the command line never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast._version import __version__

if TYPE_CHECKING:
    from holdfast.errors import (
        CheckpointNotFoundError as CheckpointNotFoundError,
        ClosedError as ClosedError,
        CorruptCheckpointError as CorruptCheckpointError,
        DamagedRecordError as DamagedRecordError,
        GuardMismatchError as GuardMismatchError,
        HoldfastError as HoldfastError,
        RankError as RankError,
        RunInUseError as RunInUseError,
        SaveFailedError as SaveFailedError,
        SaveUncertainError as SaveUncertainError,
        StateMismatchError as StateMismatchError,
        StorageError as StorageError,
        UnsafeContentError as UnsafeContentError,
        UnsupportedFormatError as UnsupportedFormatError,
        UsageError as UsageError,
    )
    from holdfast.formats.dcp.reader import HoldfastReader as HoldfastReader
    from holdfast.formats.dcp.writer import HoldfastWriter as HoldfastWriter
    from holdfast.formats.exporting.export import ExportReport as ExportReport, export as export
    from holdfast.formats.importing.importing import import_checkpoint as import_checkpoint
    from holdfast.formats.weights.load import build_model as build_model, load_weights as load_weights
    from holdfast.formats.weights.report import WeightsReport as WeightsReport
    from holdfast.loading.strategy import LoadStrategy as LoadStrategy
    from holdfast.manager.checkpointer import AsyncCheckpointer as AsyncCheckpointer
    from holdfast.manager.functions import (
        build_train_state as build_train_state,
        checkpoints as checkpoints,
        examine as examine,
        is_restart as is_restart,
        mend as mend,
        peek as peek,
        prune as prune,
        resolve as resolve,
        restore_train_state as restore_train_state,
        retention as retention,
        unlock as unlock,
        verify as verify,
    )
    from holdfast.manager.manager import CheckpointManager as CheckpointManager
    from holdfast.manager.results import RestoreResult as RestoreResult, SaveHandle as SaveHandle
    from holdfast.manager.triggers import (
        At as At,
        Every as Every,
        OnLastStep as OnLastStep,
        OnSignal as OnSignal,
        TimeLimit as TimeLimit,
    )
    from holdfast.ondisk.codec.registry import register_type as register_type
    from holdfast.plugins.config import CheckpointConfig as CheckpointConfig
    from holdfast.plugins.contexts import LoadContext as LoadContext, SaveContext as SaveContext
    from holdfast.plugins.protocol import (
        CheckpointManagerProtocol as CheckpointManagerProtocol,
        HoldfastManager as HoldfastManager,
        create_checkpoint_manager as create_checkpoint_manager,
    )
    from holdfast.runs.checkpoint import Checkpoint as Checkpoint
    from holdfast.runs.doctor import Finding as Finding
    from holdfast.runs.events import Event as Event
    from holdfast.runs.link_names import LinkTemplate as LinkTemplate
    from holdfast.runs.report import Report as Report
    from holdfast.runs.retention import (
        Decision as Decision,
        KeepAll as KeepAll,
        KeepBest as KeepBest,
        KeepEvery as KeepEvery,
        KeepLast as KeepLast,
        KeepTagged as KeepTagged,
    )
    from holdfast.state.rng import RNGState as RNGState, get_rng_state as get_rng_state, set_rng_state as set_rng_state
    from holdfast.state.wrappers import PerRank as PerRank, Sharded as Sharded, Shared as Shared, Trainable as Trainable


_HOME = {
    "CheckpointManager": "manager.manager",
    "RestoreResult": "manager.results",
    "SaveHandle": "manager.results",
    "AsyncCheckpointer": "manager.checkpointer",
    "Event": "runs.events",
    "LoadStrategy": "loading.strategy",
    "Report": "runs.report",
    "CheckpointConfig": "plugins.config",
    "SaveContext": "plugins.contexts",
    "LoadContext": "plugins.contexts",
    "CheckpointManagerProtocol": "plugins.protocol",
    "HoldfastManager": "plugins.protocol",
    "create_checkpoint_manager": "plugins.protocol",
    "LinkTemplate": "runs.link_names",
    "Decision": "runs.retention",
    **dict.fromkeys(("At", "Every", "OnLastStep", "OnSignal", "TimeLimit"), "manager.triggers"),
    **dict.fromkeys(("KeepAll", "KeepBest", "KeepEvery", "KeepLast", "KeepTagged"), "runs.retention"),
    "register_type": "ondisk.codec",
    "Checkpoint": "runs.checkpoint",
    "PerRank": "state.wrappers",
    "RNGState": "state.rng",
    "Sharded": "state.wrappers",
    "Shared": "state.wrappers",
    "Trainable": "state.wrappers",
    "get_rng_state": "state.rng",
    "set_rng_state": "state.rng",
    "build_train_state": "manager.functions",
    "restore_train_state": "manager.functions",
    "checkpoints": "manager.functions",
    "examine": "manager.functions",
    "mend": "manager.functions",
    "unlock": "manager.functions",
    "Finding": "runs.doctor",
    "is_restart": "manager.functions",
    "peek": "manager.functions",
    "prune": "manager.functions",
    "retention": "manager.functions",
    "resolve": "manager.functions",
    "verify": "manager.functions",
    "export": "formats.exporting.export",
    "ExportReport": "formats.exporting.export",
    "import_checkpoint": "formats.importing.importing",
    "build_model": "formats.weights.load",
    "load_weights": "formats.weights.load",
    "WeightsReport": "formats.weights.report",
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
