"""Checkpoints for distributed PyTorch training: committed all or not at all, verified to the byte, resumed exactly.

Names are loaded when they are first used: `import holdfast` costs little, and the command line never imports torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from holdfast._version import __version__

if TYPE_CHECKING:
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
    from holdfast.formats.dcp.reader import HoldfastReader
    from holdfast.formats.dcp.writer import HoldfastWriter
    from holdfast.formats.exporting.export import ExportReport, export
    from holdfast.formats.importing.importing import import_checkpoint
    from holdfast.formats.weights.load import build_model, load_weights
    from holdfast.formats.weights.report import WeightsReport
    from holdfast.loading.strategy import LoadStrategy
    from holdfast.manager.checkpointer import AsyncCheckpointer
    from holdfast.manager.functions import (
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
    from holdfast.manager.manager import CheckpointManager
    from holdfast.manager.results import RestoreResult, SaveHandle
    from holdfast.manager.triggers import At, Every, OnLastStep, OnSignal, TimeLimit
    from holdfast.ondisk.codec.registry import register_type
    from holdfast.plugins.config import CheckpointConfig
    from holdfast.plugins.contexts import LoadContext, SaveContext
    from holdfast.plugins.protocol import CheckpointManagerProtocol, HoldfastManager, create_checkpoint_manager
    from holdfast.runs.checkpoint import Checkpoint
    from holdfast.runs.doctor import Finding
    from holdfast.runs.events import Event
    from holdfast.runs.link_names import LinkTemplate
    from holdfast.runs.report import Report
    from holdfast.runs.retention import Decision, KeepAll, KeepBest, KeepEvery, KeepLast, KeepTagged
    from holdfast.state.rng import RNGState, get_rng_state, set_rng_state
    from holdfast.state.wrappers import PerRank, Sharded, Shared, Trainable

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
