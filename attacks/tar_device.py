"""A device in a tar archive."""

from __future__ import annotations

import tarfile
from pathlib import Path

from attacks._opening import error_of_opening as refused
from attacks._tar import pack, unpack_with_tarfile

__all__ = ["WHAT", "make", "refused", "stock"]

WHAT = "a .nemo archive makes a device that never stops to give bytes, under the name of the weights"


def make(folder: Path) -> Path:
    device = tarfile.TarInfo("model_weights.ckpt")
    device.type = tarfile.CHRTYPE
    device.devmajor, device.devminor = 1, 5
    return pack(folder / "model.nemo", [(device, b"")])


def stock(path: Path) -> bool | None:
    unpack_with_tarfile(path)
    # Only root makes devices, and not in every container.
    return True if (path.parent / "unpacked" / "model_weights.ckpt").is_char_device() else None
