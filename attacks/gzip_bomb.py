"""A compressed tar archive that is a thousand times as long when it is decompressed."""

from __future__ import annotations

import gzip
import tarfile
from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._tar import unpack_with_tarfile

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a compressed .nemo archive of half a megabyte unpacks to half a gigabyte, and might to a full disk"

_PART_BYTES = 64 << 20
_PARTS = 8


def make(folder: Path) -> Path:
    path = folder / "model.nemo"
    member = tarfile.TarInfo("model_weights.ckpt")
    member.size = _PART_BYTES * _PARTS
    zeros = gzip.compress(bytes(_PART_BYTES))
    path.write_bytes(gzip.compress(member.tobuf(tarfile.GNU_FORMAT)) + zeros * _PARTS + gzip.compress(bytes(1024)))
    return path


def stock(path: Path) -> bool | None:
    # It wrote until the limit stopped it.
    return "File too large" in unpack_with_tarfile(path)
