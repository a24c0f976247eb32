"""Find the Lightning that the program uses: `lightning` or `pytorch_lightning`, of a version that was tested."""

from __future__ import annotations

import importlib
import sys
from typing import Any

__all__ = ["Checkpoint", "CheckpointIO", "lightning"]

_TESTED = ((2, 6), (2, 7))


def _imported_package() -> str:
    """Return the package whose `Trainer` the program uses: `pytorch_lightning` where only that is imported."""
    return "pytorch_lightning" if "pytorch_lightning" in sys.modules and "lightning" not in sys.modules else "lightning"


def _load_framework() -> Any:
    wanted = _imported_package()
    for package in dict.fromkeys((wanted, "lightning", "pytorch_lightning")):
        try:
            if package == "lightning":
                module = importlib.import_module("lightning.pytorch")
            else:
                module = importlib.import_module("pytorch_lightning")
        except ModuleNotFoundError as error:
            if error.name != package:
                raise
            continue
        version = tuple(int(part) for part in module.__version__.split(".")[:2])
        if not _TESTED[0] <= version < _TESTED[1]:
            raise ImportError(
                f"holdfast.integrations.lightning is tested with {package} 2.6, and this is {module.__version__}: it "
                "depends on how the loops of Lightning count, so another version may resume wrongly; install "
                f"'{package}>=2.6,<2.7'"
            )
        return module
    raise ImportError("holdfast.integrations.lightning needs Lightning: pip install 'lightning>=2.6,<2.7'")


lightning = _load_framework()

Checkpoint: Any = lightning.callbacks.Checkpoint
CheckpointIO: Any = importlib.import_module(f"{lightning.__name__}.plugins.io").CheckpointIO
