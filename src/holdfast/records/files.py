"""Files that are about to be written: a name, and where their bytes come from. Opens nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from holdfast.records.tensorfile import Frame

Pieces = Callable[[], Iterator[memoryview]]


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A tensor file to write: its frame, and for each chunk of the frame, in order, where its bytes come from.

    Every piece but a chunk's last must be a multiple of a block long.
    """

    name: str
    frame: Frame
    sources: Sequence[Pieces]


@dataclass(frozen=True, slots=True)
class PlainFile:
    """A file that is no tensor file, to write from pieces."""

    name: str
    size_bytes: int
    pieces: Pieces
