"""An extended header of a tar archive, in a sparse file."""

from __future__ import annotations

import tarfile
from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "an extended header of a .nemo archive claims a terabyte, which the sparse file has, and is read into memory"


def make(folder: Path) -> Path:
    path = folder / "model.nemo"
    header = tarfile.TarInfo("pax")
    header.type = tarfile.XHDTYPE
    header.size = 1 << 40
    with path.open("wb") as stream:
        stream.write(header.tobuf(tarfile.GNU_FORMAT))
        stream.truncate(1 << 41)
    return path


def stock(path: Path) -> bool | None:
    return "MemoryError" in stock_fails("tarfile.open(sys.argv[1]).getmembers()", path, imports="import tarfile")
