"""Tensors of a safetensors file that share bytes."""

from __future__ import annotations

from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._safetensors import entry, load_with_safetensors, write

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "two tensors of a safetensors file are the same bytes: a small file stands for any amount of memory"


def make(folder: Path) -> Path:
    entries = ",".join(entry(0, 4, name=f"t{number}") for number in range(1000))
    return write(folder / "model.safetensors", f"{{{entries}}}".encode(), b"data")


def stock(path: Path) -> bool | None:
    # The stock library refuses it as well.
    return None if load_with_safetensors(path) else True
