"""Files that are about to be written: a name, and where their bytes come from. Opens nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from holdfast.ondisk.safetensors import Frame

Pieces = Callable[[], Iterator[memoryview]]
"""Yields bytes in order. A piece is valid until the next one is asked for."""


OnPiece = Callable[[memoryview], None]
"""Called once with every piece of a file, in order, before the pieces end; perhaps in another thread, while the caller
writes the piece. What it gets is what is written."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A tensor file to write: its frame, and all of its bytes from the header on, in pieces of any length. `pieces` is
    called with what digests them. What it returns is closed when it is not needed any more, also in the middle."""

    name: str
    frame: Frame
    pieces: Callable[[OnPiece], Generator[memoryview]]


@dataclass(frozen=True, slots=True)
class PlainFile:
    """A file that is no tensor file, to write from pieces."""

    name: str
    size_bytes: int
    pieces: Pieces
