"""A document is read whole, or refused before it takes more memory than its text."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import pytest

from holdfast.errors import KeyDamagedError, KeyMissingError
from holdfast.storage.documents import read_document
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import MemoryStorage

PIECE_BYTES = 1 << 20


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES])
def test_a_document_is_read_whole(size: int) -> None:
    storage = MemoryStorage()
    text = (b"0123456789" * (size // 10 + 1))[:size]
    storage.put("key", text)
    assert read_document(storage, "key", size) == text


def test_a_document_above_the_limit_is_damage() -> None:
    storage = MemoryStorage()
    storage.put("key", b"abc")
    with pytest.raises(KeyDamagedError, match="3 bytes, and at most 2"):
        read_document(storage, "key", 2)


@pytest.mark.parametrize("place", [0, PIECE_BYTES - 1, PIECE_BYTES, 2 * PIECE_BYTES])
def test_a_zero_byte_is_damage_and_is_named(place: int) -> None:
    storage = MemoryStorage()
    storage.put("key", b"x" * place + b"\0" + b"x")
    with pytest.raises(KeyDamagedError, match=f"byte {place} is zero"):
        read_document(storage, "key", 1 << 30)


def test_a_file_of_holes_takes_no_memory(tmp_path: Path) -> None:
    with open(tmp_path / "key", "wb") as file:
        file.truncate(1 << 30)
    tracemalloc.start()
    try:
        with pytest.raises(KeyDamagedError, match="byte 0 is zero"):
            read_document(LocalStorage(tmp_path), "key", 1 << 31)
        assert tracemalloc.get_traced_memory()[1] < 16 * PIECE_BYTES
    finally:
        tracemalloc.stop()


def test_a_missing_document_is_missing() -> None:
    with pytest.raises(KeyMissingError):
        read_document(MemoryStorage(), "key", 1)
