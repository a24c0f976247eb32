"""Give each test of the contract a new storage. Knows no storage: the class that inherits makes it."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.storage.base import Storage

__all__ = ["StorageMaker"]


class StorageMaker:
    """How a part of the contract gets its storages; see `StorageContract`."""

    # More than a page of a listing: object stores answer with a thousand names at a time.
    many_keys = 1100

    def make(self, tmp_path: Path) -> Storage:
        raise NotImplementedError("override make() so that it returns a new, empty storage")

    def reopen(self, storage: Storage) -> Storage:
        return storage

    @pytest.fixture
    def storage(self, tmp_path: Path) -> Storage:
        return self.make(tmp_path)
