"""Attempts of earlier writers are closed, and no others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StorageError
from holdfast.ranks.single import Alone
from holdfast.runs.catalog import Catalog
from holdfast.runs.cleanup import Housekeeper
from holdfast.saving.pipeline import Saver
from holdfast.storage.local.local import LocalStorage
from tests.unit.runs.scene import (
    Unreadable,
    names,
    save,
)


@pytest.mark.guarantee("G13")
def test_no_attempt_is_closed_or_cleared_while_its_record_cannot_be_read(storage: Any) -> None:
    door = Unreadable(storage)
    catalog = Catalog(door)
    folder, _ = catalog.attempts.claim(2, 1, lease=7)
    door.unread = "attempt.json"
    with pytest.raises(StorageError, match="no such access now"):
        catalog.attempts.close_older(5)
    with pytest.raises(StorageError, match="no such access now"):
        Housekeeper(catalog, keep=None)._uncommit(folder)
    assert names(storage, folder) == ["attempt.json"]


def test_closing_attempts_spares_what_is_committed_and_the_attempts_of_this_number(storage: Any) -> None:
    catalog = Catalog(storage)
    saver = Saver(catalog, Alone(), mode="sync")
    save(saver, 1)
    old, _ = catalog.attempts.claim(2, 1, lease=1)
    own, _ = catalog.attempts.claim(3, 1, lease=2)
    catalog.attempts.close_older(2)
    scan = Catalog(storage).scan()
    assert [found.step for found in scan.checkpoints] == [1]
    assert scan.closed == (old,)
    assert own in scan.attempts
    catalog.attempts.close_older(3)
    assert Catalog(storage).scan().closed == (old, own)


def test_attempts_can_be_closed_by_two_at_once(storage: Any) -> None:
    catalog = Catalog(storage)
    folders = [catalog.attempts.claim(step, 1, lease=1)[0] for step in range(20)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: Catalog(storage).attempts.close_older(2), range(4)))
    assert Catalog(storage).scan().closed == tuple(folders)


def test_a_name_is_taken_by_whatever_is_there_but_an_empty_folder(tmp_path: Path) -> None:
    attempts = Catalog(LocalStorage(tmp_path)).attempts
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to("nowhere")
    assert [attempts.is_taken(name) for name in ("missing", "folder", "file", "link")] == [False, False, True, True]
    (tmp_path / "folder" / "manifest.json").write_bytes(b"{}")
    assert attempts.is_taken("folder")
