"""A safetensors header of many small values."""

from __future__ import annotations

from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused
from attacks._safetensors import entry, write

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a field of a safetensors header has ten million empty lists, which take thirty times their bytes in memory"

_READER = """
with open(sys.argv[1], "rb") as stream:
    json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
"""


def make(folder: Path) -> Path:
    lists = b"[" + b"[]," * 10_000_000 + b"[]]"
    header = f"{{{entry(0, 4)},".encode() + b'"b":{"dtype":"U8","shape":[0],"data_offsets":[4,4],"c":' + lists + b"}}"
    return write(folder / "model.safetensors", header, b"data")


def stock(path: Path) -> bool | None:
    return "MemoryError" in stock_fails(_READER, path, imports="import json, struct")
