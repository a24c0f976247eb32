"""Make safetensors files with any header, and open them with the stock library."""

from __future__ import annotations

import struct
from pathlib import Path

from attacks._limits import stock_fails

__all__ = ["entry", "load_with_safetensors", "write"]


def entry(start: int, end: int, *, name: str = "a", size: int = 4) -> str:
    """Return one line of a header: a tensor of bytes."""
    return f'"{name}":{{"dtype":"U8","shape":[{size}],"data_offsets":[{start},{end}]}}'


def write(path: Path, header: bytes, data: bytes = b"", *, length: int | None = None) -> Path:
    """Write a file; `length` is what it says of the header."""
    path.write_bytes(struct.pack("<Q", len(header) if length is None else length) + header + data)
    return path


def load_with_safetensors(path: Path) -> str:
    """Return the last line of the error of the stock library, empty if it loads the file."""
    code = "safetensors.torch.load_file(sys.argv[1])"
    return stock_fails(code, path, imports="import safetensors.torch, torch; torch.ones(8).sum()")
