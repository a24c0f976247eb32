"""From bytes to the values they stand for, of a type that is said.

Every typed decode of the package is made here. msgspec keeps what it finds out about a class in the class, and shows it
to other threads before it is complete; a thread that meets the class at that moment ends the process with a
segmentation fault. So decoders are made one at a time, and kept.
"""

from __future__ import annotations

import threading
from typing import Any, TypeVar

import msgspec

__all__ = ["from_json", "from_msgpack", "json_decoder"]

_Kind = TypeVar("_Kind")

_making = threading.Lock()
_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def from_json(data: bytes | memoryview | msgspec.Raw, kind: type[_Kind]) -> _Kind:
    """The value of type `kind`; an error of msgspec's when the bytes say no such thing."""
    return json_decoder(kind).decode(data)


def from_msgpack(data: bytes | memoryview | msgspec.Raw, kind: type[_Kind]) -> _Kind:
    """The same from the form in which ranks talk to each other."""
    decoder: msgspec.msgpack.Decoder[_Kind] | None = _msgpack.get(kind)
    if decoder is None:
        with _making:
            decoder = _msgpack.setdefault(kind, msgspec.msgpack.Decoder(kind))
    return decoder.decode(data)


def json_decoder(kind: type[_Kind]) -> msgspec.json.Decoder[_Kind]:
    """A decoder that any number of threads may use."""
    decoder = _json.get(kind)
    if decoder is None:
        with _making:
            decoder = _json.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder
