"""A symbolic link in a tar archive, and a member below it."""

from __future__ import annotations

import tarfile
from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._tar import file_member, pack, unpack_with_tarfile

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a .nemo archive has a symbolic link to a folder outside, and a member that is written through it"


def make(folder: Path) -> Path:
    link = tarfile.TarInfo("tokenizer")
    link.type = tarfile.SYMTYPE
    link.linkname = "../.."
    return pack(folder / "model.nemo", [(link, b""), file_member("tokenizer/touched")])


def stock(path: Path) -> bool | None:
    unpack_with_tarfile(path)
    return (path.parent.parent / "touched").exists()
