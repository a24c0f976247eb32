"""A safetensors shape whose product overflows."""

from __future__ import annotations

from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._safetensors import load_with_safetensors, write

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the shape of a tensor has a product that is 4 in 64 bits, and 2**66 and more in truth"


def make(folder: Path) -> Path:
    header = b'{"a":{"dtype":"U8","shape":[4294967296,4294967296,4],"data_offsets":[0,4]}}'
    return write(folder / "model.safetensors", header, b"data")


def stock(path: Path) -> bool | None:
    # The stock library refuses it as well.
    return None if load_with_safetensors(path) else True
