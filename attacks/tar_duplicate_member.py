"""A tar archive with a member twice."""

from __future__ import annotations

from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._tar import file_member, pack, unpack_with_tarfile

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a .nemo archive has its config twice: a scanner that reads the first sees another one than who unpacks it"


def make(folder: Path) -> Path:
    return pack(folder / "model.nemo", [file_member("model_config.yaml", b"target: hostile\n")])


def stock(path: Path) -> bool | None:
    unpack_with_tarfile(path)
    return (path.parent / "unpacked" / "model_config.yaml").read_bytes() == b"target: hostile\n"
