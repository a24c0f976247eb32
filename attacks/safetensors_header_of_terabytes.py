"""A safetensors header that claims a terabyte."""

from __future__ import annotations

import struct
from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the header of a safetensors file claims a terabyte, which the sparse file has"

# What the README of the format suggests to read a header from Python.
_READER = """
with open(sys.argv[1], "rb") as stream:
    length = struct.unpack("<Q", stream.read(8))[0]
    json.loads(stream.read(length))
"""


def make(folder: Path) -> Path:
    path = folder / "model.safetensors"
    with path.open("wb") as stream:
        stream.write(struct.pack("<Q", 1 << 40) + b'{"a":')
        stream.truncate(1 << 41)
    return path


def stock(path: Path) -> bool | None:
    return "MemoryError" in stock_fails(_READER, path, imports="import json, struct")
