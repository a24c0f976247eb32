"""Check the keys of a safetensors header before it is parsed. Bytes enter; an error leaves, if anything does.

The memory that this takes does not depend on what the values are: a parser would make objects of all of them.
"""

from __future__ import annotations

import json
import re

from holdfast.errors import CorruptCheckpointError, UnsafeContentError

__all__ = ["require_sound_keys"]

# A text with or without the colon of a key, or a bracket. Possessive: to go back would take memory for each character.
_TOKENS = re.compile(rb'("(?:[^"\\]++|\\.)*+")([ \t\r\n]*+:)?|[\[\]{}]', re.DOTALL)

# The header, an entry, a shape.
_MAX_DEPTH = 3


def require_sound_keys(text: bytes) -> None:
    """Refuse a header with a name twice, of which readers differ in which one they take, in the header itself or in an
    entry of it; and one with more names than entries."""
    most = text.count(b'"data_offsets"') + 1
    names: set[bytes] = set()
    fields: set[bytes] = set()
    depth = 0
    for match in _TOKENS.finditer(text):
        if match[1] is None:
            opens = match[0] in (b"{", b"[")
            depth += 1 if opens else -1
            if depth > _MAX_DEPTH:
                raise UnsafeContentError("the header is nested more deeply than that of tensors")
            if opens and depth == 2:
                fields.clear()
        elif match[2] is not None and depth in (1, 2):
            found = names if depth == 1 else fields
            key = _unescaped(match[1])
            # The notes, `__metadata__`, may have any number of fields; they are texts, and not of an entry.
            if key in found:
                raise CorruptCheckpointError(f"the header has the name {key[:200]!r} twice")
            found.add(key)
            if len(names) > most:
                raise UnsafeContentError(f"the header has more names than its {most - 1} tensors")


def _unescaped(key: bytes) -> bytes:
    if b"\\" not in key:
        return key[1:-1]
    try:
        text: str = json.loads(key)
    except ValueError as error:
        raise CorruptCheckpointError(f"the header is no safetensors header: {error}") from None
    return text.encode("utf-8", "surrogatepass")
