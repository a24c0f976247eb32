"""Decode bytes to values of a given type.

Every typed decode of the package is made here. msgspec keeps what it finds out about a class in the class, and shows it
to other threads before it is complete; a thread that meets the class at that moment ends the process with a
segmentation fault. So decoders are made one at a time, and kept.

A *record* is a small JSON object in a run beside the checkpoints: a lease claim, `attempt.json`, `run.json`,
a note, a receipt. Its bytes are not trusted: the size and the depth are bounded, and whatever is wrong with it is a
`DamagedRecordError`. A record ends with a BLAKE3 digest of itself; one of an older version has none and is read too.
"""

from __future__ import annotations

import errno
import re
import threading
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from blake3 import blake3

from holdfast.errors import DamagedRecordError, KeyDamagedError, StorageError

__all__ = [
    "MAX_RECORD_BYTES",
    "MAX_RECORD_DEPTH",
    "decode_record",
    "encode_record",
    "from_json",
    "from_msgpack",
    "json_decoder",
    "read_record",
]

MAX_RECORD_BYTES = 1 << 20
MAX_RECORD_DEPTH = 100

_Kind = TypeVar("_Kind")

_SIGNATURE = re.compile(rb',"digest":"([0-9a-f]{64})"\}\n?\Z')
_SIGNATURE_BYTES = 80
_BRACKETS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[{]|[\]}]', re.DOTALL)
# What has such an error will never be a record, however often it is read: a link, a folder, a device, a huge file.
_NEVER_A_RECORD = {errno.ELOOP, errno.ENXIO, errno.EISDIR, errno.ENOTDIR, errno.EFBIG}

_making = threading.Lock()
_json: dict[Any, msgspec.json.Decoder[Any]] = {}
_msgpack: dict[Any, msgspec.msgpack.Decoder[Any]] = {}


def encode_record(value: object) -> bytes:
    """Return an object with at least one field as the bytes of a record: JSON that ends with its own digest."""
    body = msgspec.json.encode(value)
    return body[:-1] + b',"digest":"%s"}\n' % blake3(body).hexdigest().encode()


def decode_record(data: bytes, kind: type[_Kind], *, what: str, limit_bytes: int = MAX_RECORD_BYTES) -> _Kind:
    """Return the record that some bytes stand for, or raise a `DamagedRecordError`. `what` names the kind of record."""
    if len(data) > limit_bytes:
        raise DamagedRecordError(f"{what} has {len(data)} bytes; at most {limit_bytes} are accepted")
    try:
        if limit_bytes <= MAX_RECORD_BYTES:
            _require_shallow(data)
        _require_digest(data)
        return from_json(data, kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise DamagedRecordError(f"{what} cannot be decoded: {str(error)[:200]}") from None


def read_record(
    read: Callable[[int], bytes], kind: type[_Kind], *, what: str, file: str, limit_bytes: int = MAX_RECORD_BYTES
) -> _Kind:
    """Return the record that `read`, called with the largest accepted size, gives. What can never be a record (a link,
    a folder, a FIFO, a huge file) is a `DamagedRecordError` too. A record that is not there is a `KeyMissingError`, and
    an error of the storage that may pass stays a `StorageError`."""
    try:
        return decode_record(read(limit_bytes), kind, what=what, limit_bytes=limit_bytes)
    except DamagedRecordError as error:
        raise error.at(file=file) from None
    except StorageError as error:
        if not isinstance(error, KeyDamagedError) and error.errno not in _NEVER_A_RECORD:
            raise
        raise DamagedRecordError(f"{what} is not a readable file: {error.problem}", file=file) from None


def _require_digest(data: bytes) -> None:
    tail = data[-_SIGNATURE_BYTES:]
    stated = _SIGNATURE.search(tail)
    if stated is None:
        # Older records have none. One that was damaged must not pass for one of these.
        if b'"digest"' in tail:
            raise ValueError("the digest at its end is damaged")
        return
    body = data[: len(data) - len(tail) + stated.start()] + b"}"
    if blake3(body).hexdigest().encode() != stated[1]:
        raise ValueError("the content does not have the digest that it states")


def _require_shallow(data: bytes) -> None:
    """Refuse nesting that code which walks through the values could not follow."""
    if data.count(b"[") + data.count(b"{") <= MAX_RECORD_DEPTH:
        return
    depth = 0
    for match in _BRACKETS.finditer(data):
        first = data[match.start()]
        depth += (first in b"[{") - (first in b"]}")
        if depth > MAX_RECORD_DEPTH:
            raise ValueError(f"values are nested more than {MAX_RECORD_DEPTH} deep")


def from_json(data: bytes | bytearray | memoryview | msgspec.Raw, kind: type[_Kind]) -> _Kind:
    """Return the value of type `kind`; raise an error of msgspec for any other bytes."""
    return json_decoder(kind).decode(data)


def from_msgpack(data: bytes | memoryview | msgspec.Raw, kind: type[_Kind]) -> _Kind:
    """Return the value of type `kind` from msgpack, the form of messages between ranks."""
    decoder: msgspec.msgpack.Decoder[_Kind] | None = _msgpack.get(kind)
    if decoder is None:
        with _making:
            decoder = _msgpack.setdefault(kind, msgspec.msgpack.Decoder(kind))
    return decoder.decode(data)


def is_of_type(value: object, kind: object) -> bool:
    """Return whether a value is of a type as msgspec knows it, such as `Annotated[int, Meta(gt=0)]`."""
    try:
        with _making:
            msgspec.convert(value, kind)
    except msgspec.ValidationError:
        return False
    return True


def json_decoder(kind: type[_Kind]) -> msgspec.json.Decoder[_Kind]:
    """Return a decoder that any number of threads may use."""
    decoder = _json.get(kind)
    if decoder is None:
        with _making:
            decoder = _json.setdefault(kind, msgspec.json.Decoder(kind))
    return decoder
