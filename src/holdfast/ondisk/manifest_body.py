"""Read the body of a manifest without its tensors, which are most of it: what listing a run of thousands takes.

Bytes that come from a disk enter; a checked body and its digest leave. What it cannot read quickly, such as a text that
another program has formatted, it leaves to `holdfast.ondisk.manifest`: the answer is the same.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from holdfast._version import __version__
from holdfast.errors import CorruptCheckpointError
from holdfast.ondisk.decoding import from_json
from holdfast.ondisk.manifest import FORMAT, Body, check_body, decode_head, digest_of, require_known_types

__all__ = ["body_of", "decode_body", "written_digest"]

# As `encode_manifest` writes it. The tensors come last.
_FRONT = re.compile(rb'\{"holdfast_format":%d,"digest":"([0-9a-f]{64})","manifest":(?=\{)' % FORMAT)
_FRONT_BYTES = len(b'{"holdfast_format":%d,"digest":"","manifest":' % FORMAT) + 64
_BACK = b"}\n"
_TENSORS = b',"tensors":['
_VERSION = re.compile(r"([0-9]{1,9})\.([0-9]{1,9})\.([0-9]{1,9})", re.ASCII)


def written_digest(data: bytes | bytearray) -> str:
    """Return the digest of a manifest whose text is exactly as Holdfast writes it and has the digest that it states;
    empty for any other. Two such texts with one digest are equal in every byte."""
    front = _FRONT.match(data)
    if front is None or not data.endswith(_BACK):
        return ""
    stated = front[1].decode()
    with memoryview(data) as whole, whole[front.end() : -len(_BACK)] as body:
        return stated if digest_of(body) == stated else ""


def decode_body(data: bytes | bytearray, written: str) -> tuple[Body, str]:
    """Return the body of a manifest and its digest. written: what `written_digest` gave for the same bytes."""
    tensors = data.find(_TENSORS)
    if written and tensors >= 0:
        try:
            # Where those bytes are part of a value, this is no JSON: more than one bracket is open in front of them.
            body = from_json(data[_FRONT_BYTES:tensors] + b"}", Body)
            check_body(body)
        except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, CorruptCheckpointError):
            pass  # the whole is decoded, which finds what is wrong with it
        else:
            if not is_of_known_version(body.versions.get("holdfast", "")):
                require_known_types(msgspec.Raw(memoryview(data)[tensors + len(_TENSORS) - 1 : -len(_BACK) - 1]))
            return body, written
    head, digest = decode_head(data)
    return body_of(head), digest


@lru_cache(maxsize=64)
def is_of_known_version(version: str) -> bool:
    """Return whether what a version of Holdfast has written has no element type that this one does not know: an equal
    or older one. That it is right is found out when the tensors are decoded."""
    numbers, own = _VERSION.fullmatch(version), _VERSION.fullmatch(__version__)
    return numbers is not None and own is not None and _compared(numbers) <= _compared(own)


def _compared(version: re.Match[str]) -> tuple[int, ...]:
    return tuple(map(int, version.groups()))


def body_of(manifest: Body) -> Body:
    """Return a manifest without its tensors."""
    return Body(**{name: getattr(manifest, name) for name in Body.__struct_fields__})
