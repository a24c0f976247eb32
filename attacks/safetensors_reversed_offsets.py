"""A safetensors header whose entries are out of order and end before they start."""

from __future__ import annotations

from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._safetensors import entry, load_with_safetensors, write

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a tensor of a safetensors file ends before it starts, behind one that comes later"


def make(folder: Path) -> Path:
    header = f"{{{entry(8, 4)},{entry(0, 4, name='b')}}}".encode()
    return write(folder / "model.safetensors", header, b"datadata")


def stock(path: Path) -> bool | None:
    # The stock library refuses it as well.
    return None if load_with_safetensors(path) else True
