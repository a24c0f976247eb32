"""A safetensors header that is nested deeply."""

from __future__ import annotations

from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._safetensors import load_with_safetensors, write

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the header of a safetensors file is nested a million deep, which a parser cannot follow"


def make(folder: Path) -> Path:
    return write(folder / "model.safetensors", b'{"a":' + b"[" * 1_000_000 + b"]" * 1_000_000 + b"}")


def stock(path: Path) -> bool | None:
    # The stock library refuses it as well.
    return None if load_with_safetensors(path) else True
