"""Bytes in a safetensors file that belong to no tensor."""

from __future__ import annotations

from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._safetensors import entry, load_with_safetensors, write

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a safetensors file has bytes between its tensors that no reader sees, such as another file"


def make(folder: Path) -> Path:
    header = f"{{{entry(0, 4)},{entry(8, 12, name='b')}}}".encode()
    return write(folder / "model.safetensors", header, b"dataHIDEmore")


def stock(path: Path) -> bool | None:
    # The stock library refuses it as well.
    return None if load_with_safetensors(path) else True
