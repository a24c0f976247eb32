"""Objects that do something when they are unpickled, for pickles of hostile files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

__all__ = ["MakeFolder", "touched"]


class MakeFolder:
    """Makes a folder beside that of the attack when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.path = folder.parent / "touched"

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


def touched(folder: Path) -> bool:
    """Return whether the folder was made."""
    return (folder.parent / "touched").is_dir()
