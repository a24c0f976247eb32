"""What a user calls the place of a run, and the storage that it becomes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from holdfast import AsyncCheckpointer, CheckpointManager
from holdfast.errors import UsageError
from holdfast.storage.local.local import LocalStorage
from holdfast.storage.registry import open_storage, storage_for
from holdfast.testing import MemoryStorage


def test_a_path_is_a_local_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for location in (tmp_path / "run", str(tmp_path / "run"), "run", "./run"):
        storage = open_storage(location)
        assert isinstance(storage, LocalStorage)
        assert storage.url == str(tmp_path / "run")


@pytest.mark.parametrize("url", ["file:///data/my run", "file:///data/my%20run", "FILE://localhost/data/my%20run"])
def test_a_file_url_is_a_local_storage(url: str) -> None:
    assert open_storage(url).url == "/data/my run"


@pytest.mark.parametrize("url", ["file://other-host/data", "file://", "file:///data?x=1", "file:///data#x"])
def test_a_file_url_that_is_no_path_is_refused(url: str) -> None:
    with pytest.raises(UsageError, match="file:///path"):
        open_storage(url)


def test_a_storage_is_itself() -> None:
    storage = MemoryStorage()
    assert open_storage(storage) is storage


def test_a_storage_that_is_given_counts_and_without_one_the_run() -> None:
    storage = MemoryStorage()
    assert storage_for("/data/run", storage) is storage
    assert storage_for("/data/run", None).url == "/data/run"


class Half:
    url = "half"

    def put(self, key: str, data: bytes) -> None: ...


@pytest.mark.parametrize(
    ("given", "lacks"), [(5, "has no create, .* url"), ("/data", "has no"), (Half(), "has no create, delete, .* sync;")]
)
@pytest.mark.parametrize(
    "kind",
    [
        lambda **given: CheckpointManager("run", {"model": torch.nn.Linear(1, 1)}, **given),
        lambda **given: AsyncCheckpointer("run", **given),
    ],
)
def test_what_is_no_storage_is_refused_with_what_it_lacks(kind: Any, given: Any, lacks: str) -> None:
    with pytest.raises(UsageError, match=f"storage= is a {type(given).__name__}, which {lacks}"):
        kind(storage=given)


def test_a_path_object_is_never_a_url() -> None:
    assert open_storage(Path("s3://bucket")).url.endswith("/s3:/bucket")


def test_an_unknown_scheme_is_named_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match=r"'nfs9'.*known are .*file.*'holdfast.storages'"):
        open_storage("nfs9://server/run")


@pytest.mark.parametrize("location", [None, 5, b"bytes", object()])
def test_anything_else_is_refused(location: object) -> None:
    with pytest.raises(UsageError, match="a path, a URL or a Storage"):
        open_storage(location)  # type: ignore[arg-type]


def test_a_package_can_register_a_scheme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # A real installed package, as far as Python can tell: its entry point, and its module.
    information = tmp_path / "someone_storage-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: someone-storage\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[holdfast.storages]\nsomeone = holdfast_someone_storage:opener\n")
    (tmp_path / "holdfast_someone_storage.py").write_text(
        "from holdfast.testing import MemoryStorage\n\ndef opener(url):\n    return MemoryStorage(url)\n"
    )
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert open_storage("someone://place/run").url == "someone://place/run"
    with pytest.raises(UsageError, match="someone"):
        open_storage("nfs9://server/run")
