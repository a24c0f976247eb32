"""The contract of what a storage declares: a feature that is declared works; one that is not is not asked for."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from holdfast.errors import KeyExistsError, KeyMissingError, StorageError, UsageError
from holdfast.storage.base import Entry, Links, Storage, StorageFeatures, alignment_of, features_of
from holdfast.testing.contract.making import StorageMaker
from holdfast.testing.contract.values import MEBIBYTE, pattern, stream, whole

__all__ = ["FeaturesContract"]

_READ_IN_ANOTHER_PROCESS = (
    "import sys; from holdfast.storage.registry import open_storage; "
    "storage = open_storage(sys.argv[1]); "
    "sys.stdout.buffer.write(storage.read('folder/key', 100)); "
    "storage.put('folder/answer', b'from another process')"
)


class FeaturesContract(StorageMaker):
    """What a storage must keep of that which its `features` declare. A feature that is not declared is skipped."""

    def test_its_features_are_a_record_that_stays_the_same(self, storage: Storage) -> None:
        features = features_of(storage)
        assert isinstance(features, StorageFeatures)
        again = features_of(storage)
        assert (features.reopens_by_url, features.aligned_reads) == (again.reopens_by_url, again.aligned_reads)
        for name in ("links", "clone", "displace", "folder_names", "stamp", "identity"):
            assert (getattr(features, name) is None) == (getattr(again, name) is None)

    def test_another_process_that_opens_its_url_has_the_same_storage(self, storage: Storage) -> None:
        _require(features_of(storage).reopens_by_url, "reopens_by_url")
        storage.put("folder/key", b"from this process")
        done = subprocess.run([sys.executable, "-c", _READ_IN_ANOTHER_PROCESS, storage.url], capture_output=True)
        assert done.returncode == 0, done.stderr.decode(errors="replace")
        assert done.stdout == b"from this process"
        assert storage.read("folder/answer", 100) == b"from another process"

    def test_reads_that_are_aligned_and_others_give_the_same_bytes(self, storage: Storage) -> None:
        _require(features_of(storage).aligned_reads, "aligned_reads")
        data = pattern(17 * MEBIBYTE + 3)
        stream(storage, "key", data)
        with storage.open("key") as source:
            alignment = alignment_of(source)
            assert alignment >= 1
            assert alignment & (alignment - 1) == 0, "a power of two"
            for offset in (0, alignment, MEBIBYTE, MEBIBYTE + 1, len(data) - 5):
                target = bytearray(min(2 * MEBIBYTE, len(data) - offset))
                source.read_into(offset, memoryview(target))
                assert target == data[offset : offset + len(target)]

    def test_a_link_leads_where_it_was_pointed_last(self, storage: Storage) -> None:
        links, other = _links(storage), _links(self.reopen(storage))
        assert links.targets() == {}
        storage.put("step-1/key", b"x")
        links.point("latest", "step-1")
        links.point("best", "step-1")
        links.point("latest", "step-2")
        for seen in (links, other):
            assert seen.targets() == {"latest": "step-2", "best": "step-1"}
        links.remove("latest")
        assert other.targets() == {"best": "step-1"}

    def test_a_link_is_no_key_and_replaces_none(self, storage: Storage) -> None:
        links = _links(storage)
        storage.put("step-1/key", b"x")
        storage.put("file", b"x")
        links.point("latest", "step-1")
        assert storage.entries("") == [Entry("file", 1), Entry("step-1", None)]
        for name in ("file", "step-1"):
            with pytest.raises(StorageError):
                links.point(name, "elsewhere")
            with pytest.raises(StorageError):
                links.remove(name)
        assert storage.read("file", 1) == b"x"
        assert storage.read("step-1/key", 1) == b"x"

    def test_a_clone_has_the_value_and_outlives_the_first_key(self, storage: Storage) -> None:
        clone = _clone(storage)
        data = pattern(9 * MEBIBYTE)
        stream(storage, "first/key", data)
        if not clone("first/key", "second/deeper/key"):
            assert storage.entries("second") == []
            pytest.skip("the storage refuses to clone here")
        storage.sync("second/deeper")
        storage.delete("first/key")
        assert whole(self.reopen(storage), "second/deeper/key") == data
        storage.put("first/key", b"another value")
        assert whole(storage, "second/deeper/key") == data
        storage.delete("second/deeper/key")
        assert storage.read("first/key", 100) == b"another value"

    def test_a_clone_replaces_nothing_and_needs_its_key(self, storage: Storage) -> None:
        clone = _clone(storage)
        storage.put("key", b"x")
        storage.put("taken", b"y")
        if not clone("key", "free"):
            pytest.skip("the storage refuses to clone here")
        with pytest.raises(KeyExistsError):
            clone("key", "taken")
        with pytest.raises(KeyMissingError):
            clone("missing", "other")
        with pytest.raises(UsageError):
            clone("key", "../escape")
        assert storage.read("taken", 1) == b"y"
        assert [entry.name for entry in storage.entries("")] == ["free", "key", "taken"]

    def test_what_is_displaced_keeps_its_bytes_and_frees_its_name(self, storage: Storage) -> None:
        displace = features_of(storage).displace
        _require(displace is not None, "displace")
        assert displace is not None
        storage.put("folder/key", b"old")
        moved = displace("folder/key")
        assert moved.startswith("folder/")
        assert moved != "folder/key"
        assert whole(storage, moved) == b"old"
        with pytest.raises(KeyMissingError):
            storage.open("folder/key")
        storage.put("folder/key", b"new")
        assert storage.read("folder/key", 3) == b"new"
        assert whole(storage, moved) == b"old"

    def test_its_names_of_folders_are_those_of_its_entries(self, storage: Storage) -> None:
        listed = features_of(storage).folder_names
        _require(listed is not None, "folder_names")
        assert listed is not None
        assert list(listed("")) == list(listed("missing")) == []
        for key in ("a", "b/c", "b/d/e", "B/c", "ü b/c", "z.2/x"):
            storage.put(key, b"x")
        for folder in ("", "b", "b/d", "missing"):
            assert sorted(listed(folder)) == [entry.name for entry in storage.entries(folder) if entry.is_folder]
        with pytest.raises(UsageError):
            listed("../b")
        storage.delete("B/c")
        assert "B" not in listed("")

    def test_a_stamp_has_the_size_of_the_value_and_is_the_same_while_nothing_changes(self, storage: Storage) -> None:
        stamp = features_of(storage).stamp
        _require(stamp is not None, "stamp")
        assert stamp is not None
        stream(storage, "folder/key", b"some bytes")
        first = stamp("folder/key")
        assert first[0] == len(b"some bytes")
        again = features_of(self.reopen(storage)).stamp
        assert again is not None
        assert first == stamp("folder/key") == again("folder/key")
        storage.delete("folder/key")
        with pytest.raises(KeyMissingError):
            stamp("folder/key")

    def test_its_identity_is_that_of_another_object_on_the_same_place(self, storage: Storage) -> None:
        identity, again = features_of(storage).identity, features_of(self.reopen(storage)).identity
        _require(identity is not None, "identity")
        assert identity is not None
        assert again is not None
        storage.put("key", b"x")
        assert identity() == again()
        assert hash(identity()) == hash(again())


def _require(declared: bool, feature: str) -> None:
    if not declared:
        pytest.skip(f"the storage does not declare {feature}")


def _clone(storage: Storage) -> Callable[[str, str], bool]:
    clone = features_of(storage).clone
    if clone is None:
        pytest.skip("the storage does not declare clone")
    return clone


def _links(storage: Storage) -> Links:
    links = features_of(storage).links
    if links is None:
        pytest.skip("the storage does not declare links")
    return links
