"""A safetensors header of many names."""

from __future__ import annotations

from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused
from attacks._safetensors import write

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a safetensors header has five million names without tensors, which take thirty times their bytes in memory"

_READER = """
with open(sys.argv[1], "rb") as stream:
    json.loads(stream.read(struct.unpack("<Q", stream.read(8))[0]))
"""


def make(folder: Path) -> Path:
    names = b",".join(b'"%x":[]' % number for number in range(5_000_000))
    return write(folder / "model.safetensors", b"{" + names + b"}")


def stock(path: Path) -> bool | None:
    return "MemoryError" in stock_fails(_READER, path, imports="import json, struct")
