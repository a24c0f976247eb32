"""A torch file whose pickle counts to four billion in six bytes."""

from __future__ import annotations

import zipfile
from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the pickle of a .pt file of some hundred bytes puts a value at place four billion of a table of that size"


def make(folder: Path) -> Path:
    path = folder / "model.pt"
    with zipfile.ZipFile(path, "w") as archive:
        # A memo at 0xfffffffe (LONG_BINPUT), and then a function, so that it is also refused by name.
        archive.writestr("archive/data.pkl", b"\x80\x02}r\xfe\xff\xff\xffX\x01\x00\x00\x00acos\nsystem\ns.")
        archive.writestr("archive/version", b"3\n")
        archive.writestr("archive/byteorder", b"little")
    return path


def stock(path: Path) -> bool | None:
    said = stock_fails("torch.load(sys.argv[1], weights_only=False)", path, imports="import torch; torch.ones(8).sum()")
    return any(word in said for word in ("MemoryError", "alloc", "memory", "killed"))
