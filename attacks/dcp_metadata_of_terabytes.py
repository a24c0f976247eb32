"""DCP metadata with a value of a terabyte, in a sparse file."""

from __future__ import annotations

import struct
from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the metadata of a DCP checkpoint is a pickle with a value of a terabyte, which the sparse file has"

_LOAD = "dcp.FileSystemReader(sys.argv[1]).read_metadata()"


def make(folder: Path) -> Path:
    checkpoint = folder / "checkpoint"
    checkpoint.mkdir()
    (checkpoint / "__0_0.distcp").write_bytes(b"")
    with (checkpoint / ".metadata").open("wb") as stream:
        stream.write(b"\x80\x04\x8e" + struct.pack("<Q", 1 << 40))  # PROTO 4, BINBYTES8
        stream.truncate(1 << 41)
    return checkpoint


def stock(path: Path) -> bool | None:
    said = stock_fails(_LOAD, path, imports="import torch, torch.distributed.checkpoint as dcp")
    return "MemoryError" in said
