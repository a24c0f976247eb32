"""The catalog lists what is committed, numbers commits, and stands for one that it cannot read yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from holdfast.errors import CheckpointNotFoundError, CorruptCheckpointError, KeyMissingError
from holdfast.ondisk import paths
from holdfast.ondisk.manifest import Body, Manifest, decode_manifest, digest_of, encode_manifest
from holdfast.runs.catalog import Catalog
from holdfast.storage.base import StorageFeatures, folder_names
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import MemoryStorage
from holdfast.testing.storages import _Wrapper
from tests.unit.runs.scene import Run, folder


@pytest.fixture
def trained() -> Run:
    run = Run(MemoryStorage())
    for step in (2, 1):
        run.save(step)
    return run


def test_the_latest_is_what_was_committed_last_whatever_its_step(trained: Run) -> None:
    scan = Catalog(trained.storage).scan()
    assert [found.step for found in scan.checkpoints] == [1, 2]
    assert (scan.attempts, scan.damaged, scan.unreadable) == ((), (), ())


def test_the_next_commit_has_the_next_number_also_for_a_catalog_that_has_read_nothing(trained: Run) -> None:
    assert trained.catalog.next_sequence() == Catalog(trained.storage).next_sequence() == 3


def test_a_checkpoint_without_its_manifest_is_an_attempt(trained: Run) -> None:
    trained.catalog.uncommit(folder(1))
    assert trained.catalog.scan().attempts == (folder(1),)
    with pytest.raises(KeyMissingError):
        trained.catalog.read(folder(1))
    assert trained.catalog.holds_something()


def test_a_checkpoint_that_was_announced_is_read_when_more_of_it_is_asked_for(trained: Run) -> None:
    found = trained.catalog.read(folder(1))
    key = paths.key(folder(1), paths.MANIFEST)
    data = trained.storage.read(key, 1 << 20)
    trained.storage.delete(key)
    announced = Catalog(trained.storage).announced(folder(1), 1, found.digest, sequence=2, size_bytes=found.size_bytes)
    assert (announced.step, announced.sequence, announced) == (1, 2, found)
    with pytest.raises(CheckpointNotFoundError, match="which was removed since"):
        _ = announced.world_size
    trained.storage.put(key, data)
    assert announced.world_size == 1
    assert announced.manifest == found.manifest


def test_another_checkpoint_in_the_folder_is_not_the_one_that_was_announced(trained: Run) -> None:
    announced = Catalog(trained.storage).announced(folder(1), 1, "another digest", sequence=2, size_bytes=0)
    with pytest.raises(CorruptCheckpointError, match="not the one that was committed"):
        _ = announced.world_size


def changed_manifest(run: Run, step: int, **fields: Any) -> None:
    """Replace a manifest by another one, with a right digest."""
    key = paths.key(folder(step), paths.MANIFEST)
    record, _ = decode_manifest(run.storage.read(key, 1 << 20))
    run.storage.delete(key)
    run.storage.put(key, encode_manifest(msgspec.structs.replace(record, **fields))[0])


def test_a_scan_holds_no_tensors_and_they_are_read_when_they_are_used(trained: Run) -> None:
    catalog = Catalog(trained.storage)
    found = catalog.scan().checkpoints[0]
    assert type(found.head) is Body
    assert found.manifest == trained.catalog.read(folder(1)).manifest
    assert found.manifest.tensors


def test_what_a_catalog_has_committed_is_kept_without_its_tensors(trained: Run) -> None:
    assert all(type(found.head) is Body for found in trained.catalog.survey_cached().checkpoints)
    # The one that was committed last is read by the process that waits for it, and not decoded again.
    assert isinstance(trained.catalog.read(folder(1)).head, Manifest)


def test_tensors_that_were_used_are_kept_by_the_checkpoint_and_not_by_the_catalog(trained: Run) -> None:
    catalog = Catalog(trained.storage)
    for look in (catalog.scan, catalog.scan, catalog.scan_cached):
        assert all(found.manifest.tensors for found in look().checkpoints)
    assert all(type(found.head) is Body for found in catalog.scan().checkpoints)


def test_checkpoints_that_are_gone_are_forgotten_and_their_numbers_are_not_given_again(trained: Run) -> None:
    catalog = trained.catalog
    manifest = catalog.read(folder(2)).manifest
    for step in range(3, 1103):
        catalog.uncommit(folder(step - 1))
        number = catalog.next_sequence()
        catalog.add(msgspec.structs.replace(manifest, step=step, folder=folder(step), sequence=number))
    assert len(catalog._sequences) < 1050
    assert catalog.next_sequence() == 1103


@pytest.mark.guarantee("G3")
def test_the_tensors_of_a_checkpoint_that_was_removed_or_replaced_since_are_an_error(trained: Run) -> None:
    first, second = Catalog(trained.storage).scan().checkpoints
    trained.catalog.uncommit(folder(1))
    with pytest.raises(CheckpointNotFoundError, match="which was removed since"):
        _ = first.manifest
    changed_manifest(trained, 2, run_id="another")
    with pytest.raises(CorruptCheckpointError, match="not the one that was committed"):
        _ = second.manifest


@pytest.mark.guarantee("G3")
def test_a_manifest_that_states_something_else_behind_its_tensors_is_not_opened(trained: Run) -> None:
    """A forger can write a text of which the front alone says something else than the whole."""
    key = paths.key(folder(2), paths.MANIFEST)
    data = trained.storage.read(key, 1 << 20)
    body = data.partition(b'"manifest":')[2][:-3] + b',"epoch":9}'
    trained.storage.delete(key)
    trained.storage.put(key, b'{"holdfast_format":1,"digest":"%s","manifest":%s}\n' % (digest_of(body).encode(), body))
    (found,) = [one for one in Catalog(trained.storage).scan().checkpoints if one.step == 2]
    with pytest.raises(CorruptCheckpointError, match="not the one that was committed"):
        _ = found.manifest


class Listing(_Wrapper):
    """Passes the storage's own listing of folders on, and counts how often it is used."""

    def __init__(self, inner: Any) -> None:
        super().__init__(inner)
        self.listings = 0

    @property
    def features(self) -> StorageFeatures:
        return replace(super().features, folder_names=self._folder_names)

    def _folder_names(self, folder: str) -> list[str]:
        self.listings += 1
        return list(folder_names(self.inner, folder))


def test_a_run_is_listed_by_the_storages_own_listing_of_folders_where_it_has_one(tmp_path: Path) -> None:
    storage = Listing(LocalStorage(tmp_path))
    run = Run(storage)
    run.save(1)
    run.save(2)
    storage.listings = 0
    run.save(3)
    assert storage.listings == 1
    assert [found.step for found in Catalog(storage).scan().checkpoints] == [3, 2, 1]


@pytest.mark.parametrize("change", ["removed", "moved", "a link in its place", "a file in its place"])
def test_a_folder_that_is_no_folder_of_the_run_any_more_is_noticed(tmp_path: Path, change: str) -> None:
    run = Run(LocalStorage(tmp_path / "run"))
    for step in (1, 2, 3):
        run.save(step)
    known = {folder(step) for step in (1, 2)}
    assert run.catalog.folders_since(known) == ([folder(3)], True)
    path = tmp_path / "run" / folder(1)
    path.rename(tmp_path / "elsewhere" if change != "moved" else tmp_path / "run" / folder(9))
    if change == "a link in its place":
        path.symlink_to(tmp_path / "elsewhere")
    elif change == "a file in its place":
        path.write_bytes(b"")
    added, all_there = run.catalog.folders_since(known)
    assert not all_there
    assert set(added) == ({folder(3), folder(9)} if change == "moved" else {folder(3)})


def test_a_checkpoint_that_a_person_adds_is_before_the_next_commit(tmp_path: Path) -> None:
    run = Run(LocalStorage(tmp_path / "run"))
    run.save(1)
    run.save(2)
    key = paths.key(folder(2), paths.MANIFEST)
    record, _ = decode_manifest(run.storage.read(key, 1 << 20))
    copied = msgspec.structs.replace(record, folder=folder(50), step=50, sequence=70)
    run.storage.put(paths.key(folder(50), paths.MANIFEST), encode_manifest(copied)[0])
    assert run.save(3).sequence == 71


@pytest.mark.guarantee("G1")
def test_a_save_takes_another_name_than_a_checkpoint_that_a_person_has_put_there(tmp_path: Path) -> None:
    """The names in the run were listed before, and a copy need not have the record of an attempt."""
    run = Run(LocalStorage(tmp_path / "run"))
    run.save(1)
    run.save(2)
    there = tmp_path / "run" / folder(3)
    there.mkdir()
    (there / paths.MANIFEST).write_bytes(b"put there by a person")
    assert run.save(3).folder == f"{folder(3)}.2"
    assert [path.name for path in there.iterdir()] == [paths.MANIFEST]
