"""Read a whole JSON document into memory. A storage and a key enter; its bytes leave. Knows nothing of what they mean.

The size of a file can be forged: one of a gigabyte may have four kilobytes on the disk and holes behind them, which
read as zeros. So memory is taken piece by piece, and the first zero byte ends it: JSON text has none.
"""

from __future__ import annotations

from holdfast.errors import KeyDamagedError
from holdfast.storage.base import Storage

__all__ = ["read_document"]

_READ_BYTES = 1 << 20


def read_document(storage: Storage, key: str, limit_bytes: int) -> bytearray:
    """Return the text of a key; a KeyDamagedError when it has more than `limit_bytes`, or is no text."""
    with storage.open(key) as source:
        if source.size_bytes > limit_bytes:
            raise KeyDamagedError(
                f"the key has {source.size_bytes} bytes, and at most {limit_bytes} are expected here", file=key
            )
        # One buffer that grows, and no copy of it: a large one is moved by the system, not byte by byte.
        data = bytearray()
        while len(data) < source.size_bytes:
            start = len(data)
            data += bytes(min(_READ_BYTES, source.size_bytes - start))
            with memoryview(data) as view, view[start:] as piece:
                source.read_into(start, piece)
            place = data.find(0, start)
            if place >= 0:
                raise KeyDamagedError(f"the key is no text: byte {place} is zero", file=key)
        return data
