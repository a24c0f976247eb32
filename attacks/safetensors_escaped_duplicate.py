"""A safetensors header with a name twice, spelled in two ways."""

from __future__ import annotations

from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._safetensors import entry, load_with_safetensors, write

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a safetensors header has a name twice, once as 'a' and once as '\\u0061'"


def make(folder: Path) -> Path:
    header = f"{{{entry(0, 4)},{entry(4, 8, name=chr(92) + 'u0061')}}}".encode()
    return write(folder / "model.safetensors", header, b"goodevil")


def stock(path: Path) -> bool | None:
    # The stock library refuses it as well.
    return None if load_with_safetensors(path) else True
