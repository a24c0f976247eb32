"""Managers that a configuration names. Names are loaded when they are first used."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from holdfast.plugins.protocol import CheckpointManagerProtocol, HoldfastManager, create_checkpoint_manager

__all__ = ["CheckpointManagerProtocol", "HoldfastManager", "create_checkpoint_manager"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.protocol"), name)


def __dir__() -> list[str]:
    return __all__
