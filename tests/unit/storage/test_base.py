"""What a storage declares is what is used of it, and nothing else."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from holdfast.errors import StorageError, UsageError
from holdfast.runs.links import point_latest
from holdfast.storage.base import StorageFeatures, alignment_of, features_of
from holdfast.storage.displacing import set_aside
from holdfast.storage.local.local import LocalStorage
from holdfast.storage.registry import same_place
from holdfast.storage.retrying import with_retries
from holdfast.testing import MemoryStorage


class Undeclared(MemoryStorage):
    """Has every optional member, and declares none."""

    opens_by_url = True

    def _used(self, *arguments: Any) -> Any:
        raise AssertionError("used, and not declared")

    point = unpoint = links = set_aside = displace = identity = folder_identity = _used

    def open(self, key: str) -> Any:
        source = super().open(key)
        source.alignment_bytes = 4096  # type: ignore[attr-defined]
        return source


def test_a_storage_that_declares_nothing_has_the_minimal_features() -> None:
    assert features_of(MemoryStorage()) == StorageFeatures()
    assert features_of(MemoryStorage()) == StorageFeatures(
        reopens_by_url=False, aligned_reads=False, links=None, displace=None, identity=None
    )


def test_what_is_not_declared_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    storage = Undeclared()
    storage.put("key", b"x")
    with with_retries(storage).open("key") as source:
        assert alignment_of(source) == 1
    with caplog.at_level(logging.WARNING):
        point_latest(storage, "step-000000001")
    assert caplog.text == ""
    with pytest.raises(StorageError, match="the storage cannot rename it"):
        set_aside(storage, "key")
    assert not same_place(Undeclared("memory://one"), Undeclared("memory://two"))


def test_a_local_storage_declares_what_it_has(tmp_path: Path) -> None:
    features = LocalStorage(tmp_path).features
    assert features.reopens_by_url
    assert features.aligned_reads
    assert None not in (features.links, features.displace, features.identity)


def test_a_class_of_a_program_s_own_is_not_taken_to_be_opened_by_its_url(tmp_path: Path) -> None:
    class Watched(LocalStorage):
        pass

    assert not Watched(tmp_path).features.reopens_by_url


def test_features_that_are_no_record_are_refused() -> None:
    class Wrong(MemoryStorage):
        features = ("links",)

    with pytest.raises(UsageError, match="StorageFeatures"):
        features_of(Wrong())
