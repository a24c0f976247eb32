"""Attacks by files: each module makes a hostile file or folder, and shows what it does to others and to Holdfast.

A module has `WHAT`, one sentence; `make(folder)`, which writes the attack below a folder and returns the path to open;
`stock(path)`, which returns True when the usual tool is harmed, and None when there is none or it is not; and
`refused(path)`, which returns the error that Holdfast raises. A module whose name begins with `_` is no attack.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

__all__ = ["attack_named", "attack_names"]


def attack_names() -> list[str]:
    """Return the names of all attacks."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def attack_named(name: str) -> ModuleType:
    """Return the module of an attack."""
    return importlib.import_module(f"{__name__}.{name}")
