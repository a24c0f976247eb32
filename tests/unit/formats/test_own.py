"""Locations that the system refuses to look at."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import StorageError, UsageError
from holdfast.formats.registry import open_source

NOBODY = 65534


def test_a_source_with_a_name_that_is_too_long_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="shorter"):
        open_source(tmp_path / ("n" * 300))


@pytest.mark.parametrize("name", ["nul\0@1", "half\ud800"])
def test_a_source_that_no_file_can_be_called_is_a_usage_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no path"):
        open_source(str(tmp_path / name))


@pytest.mark.skipif(os.geteuid() != 0, reason="needs another user")
def test_a_source_that_this_user_may_not_see_is_a_storage_error(tmp_path: Path) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o700)
    (locked / "model.pt").touch()
    os.seteuid(NOBODY)
    try:
        with pytest.raises(StorageError):
            open_source(locked / "model.pt")
    finally:
        os.seteuid(0)
