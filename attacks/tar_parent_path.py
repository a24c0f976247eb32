"""A member of a tar archive whose name leads out of the folder that it is unpacked to."""

from __future__ import annotations

from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._tar import file_member, pack, unpack_with_tarfile

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a member '../../touched' of a .nemo archive is written outside of the folder that it is unpacked to"


def make(folder: Path) -> Path:
    return pack(folder / "model.nemo", [file_member("../../touched")])


def stock(path: Path) -> bool | None:
    unpack_with_tarfile(path)
    return (path.parent.parent / "touched").exists()
