"""A member of a tar archive with an absolute name."""

from __future__ import annotations

from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._tar import file_member, pack, unpack_with_tarfile

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a member of a .nemo archive with an absolute name is written there"


def make(folder: Path) -> Path:
    return pack(folder / "model.nemo", [file_member(str(folder.parent / "touched"))])


def stock(path: Path) -> bool | None:
    unpack_with_tarfile(path)
    return (path.parent.parent / "touched").exists()
