"""Make hostile tar archives that look like NeMo's, and unpack them as NeMo did for years: with `extractall`."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterable
from pathlib import Path

from attacks._limits import stock_fails

__all__ = ["file_member", "pack", "unpack_with_tarfile", "weights_member"]

_UNPACK = """
import inspect
with tarfile.open(sys.argv[1]) as archive:
    # What extractall did by default until Python 3.14.
    chosen = {"filter": "fully_trusted"} if "filter" in inspect.signature(archive.extractall).parameters else {}
    archive.extractall(sys.argv[2], **chosen)
"""


def file_member(name: str, data: bytes = b"hostile\n") -> tuple[tarfile.TarInfo, bytes]:
    """Return a regular file as a member of an archive."""
    info = tarfile.TarInfo(name)
    info.size = len(data)
    return info, data


def weights_member() -> tuple[tarfile.TarInfo, bytes]:
    """Return weights that nothing is wrong with."""
    import torch

    stream = io.BytesIO()
    torch.save({"weight": torch.zeros(2)}, stream)
    return file_member("model_weights.ckpt", stream.getvalue())


def pack(path: Path, members: Iterable[tuple[tarfile.TarInfo, bytes]], config: bytes = b"target: x\n") -> Path:
    """Write an archive with a config, and these members behind it."""
    with tarfile.open(path, "w:") as archive:
        for info, data in (file_member("./model_config.yaml", config), *members):
            archive.addfile(info, io.BytesIO(data))
    return path


def unpack_with_tarfile(path: Path) -> str:
    """Unpack an archive beside it, to a folder `unpacked`, and return the last line of the error, if there is one."""
    target = Path(path).parent / "unpacked"
    target.mkdir(exist_ok=True)
    return stock_fails(_UNPACK, path, target, imports="import tarfile")
