"""From bytes to the values they stand for, of a type that is said.

Every typed decode of the package is made here. msgspec keeps what it finds out about a class in the class, and shows it
to other threads before it is complete; a thread that meets the class at that moment ends the process with a
segmentation fault. So decoders are made one at a time, and kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgspec

__all__ = ["from_json", "from_msgpack", "json_decoder"]

_making = threading.Lock()
_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def from_json(data: bytes | memoryview | msgspec.Raw, kind: Any) -> Any:
    """The value of type `kind`; an error of msgspec's when the bytes say no such thing."""
    return json_decoder(kind).decode(data)


def from_msgpack(data: bytes | memoryview | msgspec.Raw, kind: Any) -> Any:
    """The same from the form in which ranks talk to each other."""
    return _decoder(_msgpack, msgspec.msgpack.Decoder, kind).decode(data)


def json_decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    """A decoder that any number of threads may use."""
    return _decoder(_json, msgspec.json.Decoder, kind)


def _decoder(kept: dict[Any, Any], make: Callable[[Any], Any], kind: Any) -> Any:
    decoder = kept.get(kind)
    if decoder is None:
        with _making:
            decoder = kept.setdefault(kind, make(kind))
    return decoder
