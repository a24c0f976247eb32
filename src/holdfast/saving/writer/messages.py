"""The commands to a writer and its replies: images of files in an arena, a save to write, its outcome. Values only.

The images change only when the structure of the state does, so they are sent once, as a `Layout`; each save then is a
`Job` that refers to it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.saving.facts import Facts, Listing
from holdfast.saving.messages import Receipt


class Place(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One chunk in its file: the leaf, where its bytes begin in the file, how many they are, its box."""

    leaf: str
    start: int
    size_bytes: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


class Image(msgspec.Struct, frozen=True, array_like=True):
    """One tensor file as it lies in the arena from `start` on: its header, and its chunks back to back. `block_bytes`:
    how many bytes of a chunk one digest is of."""

    name: str
    start: int
    size_bytes: int
    header_bytes: int
    chunks: tuple[Place, ...]
    block_bytes: int

    @property
    def end(self) -> int:
        return self.start + self.size_bytes


class PlainImage(msgspec.Struct, frozen=True, array_like=True):
    """One file that is no tensor file, as it lies in the arena."""

    name: str
    start: int
    size_bytes: int


class NewArena(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The arena from now on. Its handle comes with the message."""

    size_bytes: int


class Layout(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The tensor files of every save until the next layout, and, for the leader's writer, what the manifest lists."""

    number: int
    images: tuple[Image, ...]
    listing: Listing | None


class Job(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """One save. It may arrive before everything is staged; `Arena.staged` counts the bytes that are. `token` is the
    same on all ranks, and on no other save."""

    number: int
    token: str
    layout: int
    run: str
    folder: str
    step: int
    rank: int
    size: int
    plain: tuple[PlainImage, ...]
    facts: Facts | None
    timeout_seconds: float
    eager: bool


class Commit(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Sent to the leader's writer when every rank's part should be there. `waits`: wait for parts that are not."""

    number: int
    waits: bool = True


class Discard(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The save failed somewhere: remove what was written for it."""

    number: int


class Shutdown(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """No more saves."""


class Written(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """This rank's part is durable."""

    number: int
    size_bytes: int


class Committed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int
    digest: str
    size_bytes: int
    sequence: int
    segment: str


class Discarded(msgspec.Struct, frozen=True, tag=True, array_like=True):
    number: int


class Failed(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """The error as its type and fields. `sealed`: what failed may have been done all the same, so nothing of the save
    may be removed."""

    number: int
    error: dict[str, Any]
    sealed: bool = False


class SignedReceipt(msgspec.Struct, frozen=True):
    """A receipt as it lies in the attempt's folder. One of another save, which took the same name, does not count."""

    token: str
    receipt: Receipt


Command = NewArena | Layout | Job | Commit | Discard | Shutdown
Reply = Written | Committed | Discarded | Failed
