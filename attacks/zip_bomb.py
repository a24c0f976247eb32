"""A torch file whose compressed pickle is a thousand times as long."""

from __future__ import annotations

import zipfile
from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the pickle of a .pt file is compressed: a file of one megabyte takes a gigabyte of memory"


def make(folder: Path) -> Path:
    path = folder / "model.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        with archive.open("archive/data.pkl", "w", force_zip64=True) as stream:
            for _ in range(1024):
                stream.write(bytes(1 << 20))
        archive.writestr("archive/version", b"3\n")
    return path


def stock(path: Path) -> bool | None:
    said = stock_fails("torch.load(sys.argv[1], weights_only=True)", path, imports="import torch; torch.ones(8).sum()")
    return any(word in said for word in ("MemoryError", "alloc", "memory", "killed"))
