"""A hard link in a tar archive to a file outside, and a member of the same name."""

from __future__ import annotations

import tarfile
from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._tar import file_member, pack, unpack_with_tarfile

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a .nemo archive has a hard link to a file of the user, and a member of the same name that overwrites it"


def make(folder: Path) -> Path:
    (folder / "precious").write_bytes(b"precious\n")
    link = tarfile.TarInfo("vocab.txt")
    link.type = tarfile.LNKTYPE
    link.linkname = "../precious"
    return pack(folder / "model.nemo", [(link, b""), file_member("vocab.txt")])


def stock(path: Path) -> bool | None:
    unpack_with_tarfile(path)
    return (path.parent / "precious").read_bytes() == b"hostile\n"
