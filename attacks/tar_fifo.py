"""A FIFO in a tar archive."""

from __future__ import annotations

import tarfile
from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._tar import pack, unpack_with_tarfile

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a .nemo archive makes a FIFO under the name of the weights: who opens it waits for ever"


def make(folder: Path) -> Path:
    fifo = tarfile.TarInfo("model_weights.ckpt")
    fifo.type = tarfile.FIFOTYPE
    return pack(folder / "model.nemo", [(fifo, b"")])


def stock(path: Path) -> bool | None:
    unpack_with_tarfile(path)
    return (path.parent / "unpacked" / "model_weights.ckpt").is_fifo()
