"""The contract can fail: each storage here is wrong in one way that would lose or mix state, and a test notices it."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

from holdfast.errors import KeyMissingError, StorageError
from holdfast.storage.base import Entry, Storage, StorageFeatures
from holdfast.storage.local.local import LocalStorage
from holdfast.testing import MemoryStorage, StorageContract
from holdfast.testing.contract.features import FeaturesContract

PART_BYTES = 8 << 20


class ReplacesLargePuts(MemoryStorage):
    """Uploads large values without the condition that the key is new."""

    def put(self, key: str, data: bytes) -> None:
        if len(data) > PART_BYTES:
            self.delete(key)
        super().put(key, data)


class ReplacesLargeStreams(MemoryStorage):
    """Puts the parts of a large key together without that condition."""

    def create(self, key: str, size_bytes: int) -> Any:
        if size_bytes > PART_BYTES:
            self.delete(key)
        return super().create(key, size_bytes)


class LooksOnlyWhenCreated(MemoryStorage):
    """Finds out at the beginning that a key is new, and not at the end."""

    def create(self, key: str, size_bytes: int) -> Any:
        sink = super().create(key, size_bytes)
        close, storage, others = sink.close, self, [key]

        def replace_and_close() -> None:
            if others:
                storage.delete(others.pop())
            close()

        sink.close = replace_and_close  # type: ignore[method-assign]
        return sink


class KnowsItsOwnKeys(MemoryStorage):
    """Another object on the same place: what it did not write itself, it replaces."""

    def __init__(self, shared: MemoryStorage | None = None) -> None:
        super().__init__()
        self.mine: set[str] = set()
        if shared is not None:
            self._values = shared._values

    def put(self, key: str, data: bytes) -> None:
        if key not in self.mine:
            self._values.pop(key, None)
        self.mine.add(key)
        super().put(key, data)


class LeavesTemporaryNames(MemoryStorage):
    """A put that loses leaves what it had uploaded."""

    def put(self, key: str, data: bytes) -> None:
        try:
            super().put(key, data)
        except StorageError:
            self._values[f"{key}.part"] = data
            raise


class ListsOnePage(MemoryStorage):
    def entries(self, folder: str) -> list[Entry]:
        return super().entries(folder)[:1000]


class ListsInTheOrderOfKeys(MemoryStorage):
    """A folder stands where its keys do: `a/` comes behind `a-b`."""

    def entries(self, folder: str) -> list[Entry]:
        found = super().entries(folder)
        return sorted(found, key=lambda entry: entry.name + ("/" if entry.is_folder else ""))


class RemembersListings(MemoryStorage):
    def __init__(self) -> None:
        super().__init__()
        self.listed: dict[str, list[Entry]] = {}

    def entries(self, folder: str) -> list[Entry]:
        return self.listed.setdefault(folder, super().entries(folder))


class RemembersMisses(MemoryStorage):
    def __init__(self) -> None:
        super().__init__()
        self.missed: set[str] = set()

    def open(self, key: str) -> Any:
        try:
            if key in self.missed:
                raise KeyMissingError("the key does not exist", file=key)
            return super().open(key)
        except KeyMissingError:
            self.missed.add(key)
            raise


class _Renaming(MemoryStorage):
    """Keeps a key under another name."""

    def rename(self, key: str) -> str:
        raise NotImplementedError

    def put(self, key: str, data: bytes) -> None:
        super().put(self.rename(key), data)

    def open(self, key: str) -> Any:
        return super().open(self.rename(key))

    def delete(self, key: str) -> None:
        super().delete(self.rename(key))


class UnquotesNames(_Renaming):
    def rename(self, key: str) -> str:
        return unquote(key)


class FoldsCase(_Renaming):
    def rename(self, key: str) -> str:
        return key.lower()


class NormalisesNames(_Renaming):
    def rename(self, key: str) -> str:
        return unicodedata.normalize("NFC", key)


class StripsNames(_Renaming):
    def rename(self, key: str) -> str:
        return "/".join(part.strip() for part in key.split("/"))


class DeletesByPrefix(MemoryStorage):
    def delete(self, key: str) -> None:
        super().delete(key)
        for other in [other for other in self._values if other.startswith(key)]:
            super().delete(other)


class _Reading(MemoryStorage):
    """Reads in its own way."""

    def open(self, key: str) -> Any:
        source = super().open(key)
        right, value = source.read_into, source.value

        def read_into(offset: int, target: memoryview) -> None:
            right(offset, target)
            self.spoil(key, value, offset, target.cast("B"))

        source.read_into = read_into  # type: ignore[method-assign]
        return source

    def spoil(self, key: str, value: bytes, offset: int, target: memoryview) -> None:
        raise NotImplementedError


class ReadsWithinOnePart(_Reading):
    def spoil(self, key: str, value: bytes, offset: int, target: memoryview) -> None:
        rest = PART_BYTES - offset % PART_BYTES
        if target.nbytes > rest and offset > 0:
            target[rest:] = bytes(target.nbytes - rest)


class ReadsZerosOfDeletedKeys(_Reading):
    def spoil(self, key: str, value: bytes, offset: int, target: memoryview) -> None:
        if key not in self._values:
            target[:] = bytes(target.nbytes)


class FillsUpPastTheEnd(MemoryStorage):
    """A range of a large key that goes past its end is filled as far as there is something."""

    def open(self, key: str) -> Any:
        source = super().open(key)
        right, value = source.read_into, source.value

        def read_into(offset: int, target: memoryview) -> None:
            inside = max(0, min(target.nbytes, len(value) - offset))
            right(offset, target[:inside] if len(value) > PART_BYTES and offset >= 0 else target)

        source.read_into = read_into  # type: ignore[method-assign]
        return source


LARGE = 17 * (1 << 20) + 3
WRONG: list[tuple[Callable[[], Storage], str, dict[str, Any]]] = [
    (ReplacesLargePuts, "test_put_never_replaces", {"first_bytes": 5, "second_bytes": LARGE}),
    (ReplacesLargePuts, "test_of_many_racing_puts_exactly_one_wins", {"racers": 4, "size_bytes": 9 << 20}),
    (
        ReplacesLargeStreams,
        "test_create_never_replaces",
        {"first_bytes": LARGE, "second_bytes": LARGE, "made_by": "create"},
    ),
    (ReplacesLargeStreams, "test_create_never_replaces", {"first_bytes": 5, "second_bytes": LARGE, "made_by": "put"}),
    (
        LooksOnlyWhenCreated,
        "test_of_two_that_write_a_key_at_once_exactly_one_ends_well",
        {"size_bytes": 5, "later": "put"},
    ),
    (
        LooksOnlyWhenCreated,
        "test_of_two_that_write_a_key_at_once_exactly_one_ends_well",
        {"size_bytes": LARGE, "later": "create"},
    ),
    (KnowsItsOwnKeys, "test_of_many_racing_puts_exactly_one_wins", {"racers": 16, "size_bytes": 40}),
    (LeavesTemporaryNames, "test_put_never_replaces", {"first_bytes": 5, "second_bytes": 5}),
    (ListsOnePage, "test_a_folder_of_many_keys_is_listed_whole", {}),
    (ListsInTheOrderOfKeys, "test_entries_are_sorted_by_name_whatever_the_keys_below_look_like", {}),
    (RemembersListings, "test_what_was_missing_is_seen_as_soon_as_it_is_written", {}),
    (RemembersMisses, "test_what_was_missing_is_seen_as_soon_as_it_is_written", {}),
    (UnquotesNames, "test_a_name_means_itself_and_nothing_else", {"name": "a%2Fb"}),
    (FoldsCase, "test_a_name_means_itself_and_nothing_else", {"name": "Key"}),
    (NormalisesNames, "test_a_name_means_itself_and_nothing_else", {"name": "e\u0301"}),
    (StripsNames, "test_a_name_means_itself_and_nothing_else", {"name": " leading"}),
    (DeletesByPrefix, "test_only_the_key_itself_is_deleted", {}),
    (ReadsWithinOnePart, "test_any_range_of_a_large_key_can_be_read", {}),
    (ReadsZerosOfDeletedKeys, "test_a_source_of_a_deleted_key_reads_the_key_or_fails", {}),
    (FillsUpPastTheEnd, "test_a_range_past_the_end_is_an_error", {"whole_bytes": 9 << 20}),
]


class OnOnePlace(StorageContract):
    """The contract for storages in memory, with two doors to the one that has them."""

    def reopen(self, storage: Storage) -> Storage:
        return KnowsItsOwnKeys(storage) if isinstance(storage, KnowsItsOwnKeys) else storage


@pytest.mark.parametrize(
    ("make", "test", "arguments"), WRONG, ids=[f"{wrong[0].__name__}-{wrong[1]}" for wrong in WRONG]
)
def test_a_wrong_storage_does_not_keep_the_contract(
    make: Callable[[], Storage], test: str, arguments: dict[str, Any]
) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception, StorageError)):
        getattr(OnOnePlace(), test)(make(), **arguments)


@pytest.mark.parametrize(("test", "arguments"), [wrong[1:] for wrong in WRONG], ids=lambda value: str(value)[:40])
def test_a_right_storage_passes_the_same_tests(test: str, arguments: dict[str, Any]) -> None:
    getattr(OnOnePlace(), test)(MemoryStorage(), **arguments)


# What is declared


class DeclaresReopening(MemoryStorage):
    """Is in the memory of this process, and says that others can open it."""

    features = StorageFeatures(reopens_by_url=True)


class ForgetfulLinks:
    """Keeps links in one object, and not in the place."""

    def __init__(self) -> None:
        self.links: dict[str, str] = {}

    def point(self, name: str, target: str) -> None:
        self.links[name] = target

    def remove(self, name: str) -> None:
        del self.links[name]

    def targets(self) -> dict[str, str]:
        return self.links


class _Declaring(LocalStorage):
    """A local storage with one feature that is wrong."""

    @property
    def features(self) -> StorageFeatures:
        return replace(super().features, **self.wrong())

    def wrong(self) -> dict[str, Any]:
        raise NotImplementedError


class LinksOfOneObject(_Declaring):
    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.links = ForgetfulLinks()

    def wrong(self) -> dict[str, Any]:
        return {"links": self.links}


class DisplacesByDeleting(_Declaring):
    def wrong(self) -> dict[str, Any]:
        def displace(key: str) -> str:
            self.delete(key)
            return f"{key}.displaced"

        return {"displace": displace}


class ClonesBySymbolicLink(_Declaring):
    """The clone is gone with the first key."""

    def wrong(self) -> dict[str, Any]:
        def clone(key: str, new_key: str) -> bool:
            new = Path(self.url) / new_key
            new.parent.mkdir(parents=True, exist_ok=True)
            new.symlink_to(Path(self.url) / key)
            return True

        return {"clone": clone}


class ClonesOverKeys(_Declaring):
    """The clone takes the place of what was there."""

    @property
    def features(self) -> StorageFeatures:
        return replace(LocalStorage(self.url).features, clone=self._over)

    def _over(self, key: str, new_key: str) -> bool:
        self.delete(new_key)
        clone = LocalStorage(self.url).features.clone
        return clone is not None and clone(key, new_key)


class IdentityOfOneObject(_Declaring):
    def wrong(self) -> dict[str, Any]:
        return {"identity": lambda: id(self)}


class _OddSource:
    """A source that asks for multiples of a number that is no power of two."""

    alignment_bytes = 1000

    def __init__(self, inner: Any) -> None:
        self.read_into = inner.read_into

    def __enter__(self) -> _OddSource:
        return self

    def __exit__(self, *ended: object) -> None:
        pass


class UnalignedAlignment(_Declaring):
    def open(self, key: str) -> Any:
        return _OddSource(super().open(key))

    def wrong(self) -> dict[str, Any]:
        return {}


WRONG_FEATURES = [
    (LinksOfOneObject, "test_a_link_leads_where_it_was_pointed_last"),
    (LinksOfOneObject, "test_a_link_is_no_key_and_replaces_none"),
    (DisplacesByDeleting, "test_what_is_displaced_keeps_its_bytes_and_frees_its_name"),
    (ClonesBySymbolicLink, "test_a_clone_has_the_value_and_outlives_the_first_key"),
    (ClonesOverKeys, "test_a_clone_replaces_nothing_and_needs_its_key"),
    (IdentityOfOneObject, "test_its_identity_is_that_of_another_object_on_the_same_place"),
    (UnalignedAlignment, "test_reads_that_are_aligned_and_others_give_the_same_bytes"),
]
FEATURE_TESTS = sorted(name for name in vars(FeaturesContract) if name.startswith("test_"))


class AtItsUrl(StorageContract):
    def reopen(self, storage: Storage) -> Storage:
        return type(storage)(storage.url)  # type: ignore[call-arg]


@pytest.mark.parametrize(("make", "test"), WRONG_FEATURES)
def test_a_feature_that_does_not_work_does_not_keep_the_contract(make: Any, test: str, tmp_path: Path) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception, StorageError)):
        getattr(AtItsUrl(), test)(make(str(tmp_path)))


def test_a_storage_of_one_process_cannot_declare_that_others_open_it() -> None:
    with pytest.raises(AssertionError):
        AtItsUrl().test_another_process_that_opens_its_url_has_the_same_storage(DeclaresReopening())


@pytest.mark.parametrize("test", FEATURE_TESTS)
def test_a_local_storage_has_every_feature_that_can_be_declared(test: str, tmp_path: Path) -> None:
    getattr(AtItsUrl(), test)(LocalStorage(tmp_path))


@pytest.mark.parametrize("test", [name for name in FEATURE_TESTS if "record" not in name])
def test_what_is_not_declared_is_not_asked_for(test: str) -> None:
    with pytest.raises(pytest.skip.Exception, match="does not declare"):
        getattr(OnOnePlace(), test)(MemoryStorage())
