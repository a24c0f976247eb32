"""A sparse archive with a config of a terabyte."""

from __future__ import annotations

import tarfile
from pathlib import Path

from attacks._limits import stock_fails
from attacks._opening import error_of_opening as refused
from attacks._tar import weights_member

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "the config of a sparse .nemo archive has a terabyte, and is read into memory"


def make(folder: Path) -> Path:
    path = folder / "model.nemo"
    weights, data = weights_member()
    config = tarfile.TarInfo("model_config.yaml")
    config.size = 1 << 40
    with path.open("wb") as stream:
        stream.write(weights.tobuf(tarfile.GNU_FORMAT) + data + bytes(-len(data) % 512))
        stream.write(config.tobuf(tarfile.GNU_FORMAT))
        stream.truncate(stream.tell() + config.size + 1024)
    return path


def stock(path: Path) -> bool | None:
    code = "tarfile.open(sys.argv[1]).extractfile('model_config.yaml').read()"
    return "MemoryError" in stock_fails(code, path, imports="import tarfile")
