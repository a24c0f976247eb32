"""Files that are about to be written: a name, and where their bytes come from. Opens nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from holdfast.ondisk.safetensors import Frame

Pieces = Callable[[], Iterator[memoryview]]


class HostMemory(NamedTuple):
    """Bytes that lie in this process's memory as the file wants them. `owner` keeps them there."""

    address: int
    size_bytes: int
    owner: Any


@dataclass(frozen=True, slots=True)
class TensorFile:
    """A tensor file to write: its frame, and for each chunk of the frame, in order, where its bytes come from.

    Of a chunk that comes in pieces, every piece but the last must be a multiple of a block long.
    """

    name: str
    frame: Frame
    sources: Sequence[HostMemory | Pieces]


@dataclass(frozen=True, slots=True)
class PlainFile:
    """A file that is no tensor file, to write from pieces."""

    name: str
    size_bytes: int
    pieces: Pieces
