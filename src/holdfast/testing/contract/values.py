"""Keys, sizes and bytes that the contract tries, and what reads and races them."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache

from holdfast.errors import KeyExistsError
from holdfast.storage.base import Storage

MEBIBYTE = 1 << 20
SIZES = (0, 1, 4095, 4096, 4097, MEBIBYTE, MEBIBYTE + 1, 8 * MEBIBYTE, 8 * MEBIBYTE + 1, 25 * MEBIBYTE + 777)
RACERS = 16
# What a storage may handle in different ways: at once, in one request, in many parts.
WEIGHTS = (5, MEBIBYTE + 1, 17 * MEBIBYTE + 3)
ODD_NAMES = (
    "a%2Fb",
    "a%252Fb",
    "a b",
    "a+b",
    " leading",
    "trailing ",
    "question?mark=1#part",
    "'single' and \"double\"",
    "Key",
    "key",
    "\u00e9",
    "e\u0301",
    ".hidden",
    "name.tmp",
    "name~",
    "a:b",
    "*",
    "[a]",
    "$HOME",
    "-n",
    "n" * 255,
)
BAD_KEYS = (
    "",
    "/",
    "/absolute",
    "ends/",
    "two//slashes",
    ".",
    "..",
    "../escape",
    "in/../side",
    "in/./side",
    "nul\0byte",
    "back\\slash",
    "..\\escape",
    ".tmp-reserved",
    "folder/.tmp-reserved",
    "lone-\ud800-surrogate",
)


@lru_cache(maxsize=8)
def pattern(size_bytes: int) -> bytes:
    """Return bytes in which no two sectors are alike, so that one in a wrong place is noticed."""
    return random.Random(size_bytes).randbytes(size_bytes)


def value_of(racer: int, size_bytes: int) -> bytes:
    """Return bytes that only this racer writes, everywhere."""
    return bytes([racer + 1]) * size_bytes


def whole(storage: Storage, key: str) -> bytes:
    """Return all bytes of a key."""
    with storage.open(key) as source:
        target = bytearray(source.size_bytes)
        source.read_into(0, memoryview(target))
    return bytes(target)


def stream(storage: Storage, key: str, data: bytes) -> None:
    """Create a key by streaming."""
    with storage.create(key, len(data)) as sink:
        sink.write(data)


def write_and_close(write: Callable[[bytes], None], close: Callable[[], None], data: bytes) -> None:
    write(data)
    close()


def race(calls: Sequence[Callable[[], None]]) -> list[bool]:
    """Start all calls at the same moment, and return for each whether it won."""
    start = threading.Barrier(len(calls))

    def run(call: Callable[[], None]) -> bool:
        start.wait()
        try:
            call()
        except KeyExistsError:
            return False
        return True

    with ThreadPoolExecutor(len(calls)) as pool:
        return list(pool.map(run, calls))
