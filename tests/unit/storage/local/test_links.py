"""Links in the root are made and replaced, replace nothing else, and stay inside the root."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import KeyMissingError, StorageError, UsageError
from holdfast.storage.base import Entry
from holdfast.storage.local.local import LocalStorage


def test_point_makes_and_replaces_a_relative_link(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    storage.features.links.point("latest", "step-1")
    storage.put("step-2/key", b"x")
    storage.features.links.point("latest", "step-2")
    assert os.readlink(tmp_path / "run" / "latest") == "step-2"
    assert sorted(os.listdir(tmp_path / "run")) == ["latest", "step-2"]
    assert storage.entries("") == [Entry("step-2", None)]
    storage.delete("latest")
    assert os.listdir(tmp_path / "run") == ["step-2"]


def test_point_replaces_nothing_but_links(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path)
    storage.put("file", b"x")
    storage.put("folder/key", b"x")
    for name in ("file", "folder"):
        with pytest.raises(StorageError, match="only a link is replaced"):
            storage.features.links.point(name, "step-1")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


@pytest.mark.parametrize(("name", "target"), [("a/b", "c"), ("..", "c"), ("a", "../c"), ("a", "/etc"), ("a", "")])
def test_point_stays_inside_the_root(tmp_path: Path, name: str, target: str) -> None:
    with pytest.raises(UsageError):
        LocalStorage(tmp_path / "run").features.links.point(name, target)
    assert os.listdir(tmp_path) == []


def test_links_are_listed_and_removed_and_nothing_else_is(tmp_path: Path) -> None:
    storage = LocalStorage(tmp_path / "run")
    links = storage.features.links
    assert links is not None
    assert links.targets() == {}
    links.point("latest", "step-1")
    storage.put("file", b"x")
    assert links.targets() == {"latest": "step-1"}
    with pytest.raises(StorageError, match="only a link is replaced"):
        links.remove("file")
    links.remove("latest")
    assert links.targets() == {}
    with pytest.raises(KeyMissingError):
        links.remove("latest")
    assert storage.entries("") == [Entry("file", 1)]
