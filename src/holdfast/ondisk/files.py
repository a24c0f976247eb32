"""Files that are about to be written: a name, and where their bytes come from. Opens nothing."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass

from holdfast.ondisk.safetensors import Frame

Pieces = Callable[[], Iterator[memoryview]]
"""Yields bytes in order. A piece is valid until the next one is asked for."""


See = Callable[[memoryview], None]
"""Gets every piece of a file once, in order, before it is yielded: what is seen is what is written."""


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A tensor file to write: its frame, and all of its bytes from the header on, in pieces of any length. `pieces` is
    called with what sees them first, perhaps in another thread. What it returns is closed when it is not needed any
    more, also in the middle."""

    name: str
    frame: Frame
    pieces: Callable[[See], Generator[memoryview]]


@dataclass(frozen=True, slots=True)
class PlainFile:
    """A file that is no tensor file, to write from pieces."""

    name: str
    size_bytes: int
    pieces: Pieces
