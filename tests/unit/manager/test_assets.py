"""Files that are stored beside the state: how they are named, and what a save takes of its own."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.manager.assets import check_apart, checked_assets, named_assets

MODES = ("sync", "async")


def opened(run: Path, mode: str = "sync", **options: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, {"model": torch.nn.Linear(2, 2)}, mode=mode, rng=False, **options)  # type: ignore[arg-type]


def contents(checkpoint: holdfast.Checkpoint) -> dict[str, bytes]:
    return {name: asset.read() for name, asset in checkpoint.assets.items()}


def test_a_list_of_paths_goes_by_the_last_part_of_each(tmp_path: Path) -> None:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "blob-7f3a").write_text("{}")
    (tmp_path / "config.json").symlink_to("blob-7f3a")
    found = checked_assets([tmp_path / "tokenizer", str(tmp_path / "config.json")])
    assert found == {"tokenizer": tmp_path / "tokenizer", "config.json": tmp_path / "config.json"}
    assert checked_assets(None) == checked_assets([]) == checked_assets({}) == {}


def test_bytes_are_those_of_the_call() -> None:
    given = bytearray(b"before")
    found = named_assets({"a/b.txt": given, "c": memoryview(b"xyz")[1:]})
    given[:] = b"after!"
    assert found == {"a/b.txt": b"before", "c": b"yz"}


@pytest.mark.parametrize(
    "name",
    ["/etc/passwd", "../up", "a/../b", "", ".", "a//b", "a/", "a\\b", ".tmp-x", "a/.tmp-x", "n\x00l", 7, "x" * 300],
)
def test_a_name_that_leads_elsewhere_or_is_reserved_is_refused(name: Any) -> None:
    with pytest.raises(holdfast.UsageError, match="cannot name an asset"):
        named_assets({name: b""})


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("vocab.txt", "a list of paths"),
        (b"vocab", "a list of paths"),
        (Path("vocab.txt"), "a list of paths"),
        ({"vocab.txt"}, "a list of paths"),
        ([b"vocab"], "bytes without a name"),
        ([None], r"assets\[0\] is None"),
        ({"a": 3}, "the asset 'a' is 3"),
        ({"a": "x\0y"}, "the asset 'a'"),
        (["/"], "cannot name an asset"),
        (["a/vocab.txt", "b/vocab.txt"], "two assets have the name 'vocab.txt'"),
        ({"a": b"", "a/b": b""}, "'a/b' lies inside of the asset 'a'"),
    ],
)
def test_what_is_no_asset_is_refused(given: Any, words: str) -> None:
    with pytest.raises(holdfast.UsageError, match=words):
        named_assets(given)


def test_a_path_with_nothing_to_store_is_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.UsageError, match="is not there"):
        checked_assets([tmp_path / "none"])
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(holdfast.UsageError, match="neither a file nor a folder"):
        checked_assets([tmp_path / "pipe"])


def test_names_that_only_begin_alike_are_apart() -> None:
    check_apart(dict.fromkeys(["a", "a-b", "a.b", "ab/c", "b/a", "b/ab"]))


@pytest.mark.parametrize("mode", MODES)
def test_a_save_stores_its_own_assets_beside_those_of_the_manager(tmp_path: Path, mode: str) -> None:
    folder = tmp_path / "tokenizer" / "deep"
    folder.mkdir(parents=True)
    (folder / "vocab.txt").write_text("a b c")
    (tmp_path / "card.md").write_text("# A model")
    with opened(tmp_path / "run", mode, assets=[tmp_path / "card.md"]) as manager:
        first = manager.save(1, assets={"words": tmp_path / "tokenizer", "trainer/state.json": b'{"step": 1}'}).wait()
        second = manager.save(2, assets=[folder / "vocab.txt"]).wait()
        third = manager.save(3).wait()
    card = {"card.md": b"# A model"}
    assert contents(first) == {**card, "words/deep/vocab.txt": b"a b c", "trainer/state.json": b'{"step": 1}'}
    assert contents(second) == {**card, "vocab.txt": b"a b c"}
    assert contents(third) == card
    assert holdfast.verify(tmp_path / "run", 1).ok


def test_a_file_that_changes_after_the_call_is_stored_as_it_was(tmp_path: Path) -> None:
    """The training goes on while an asynchronous save is written, and writes the next state over the file."""
    file = tmp_path / "state.json"
    with opened(tmp_path / "run", "async") as manager:
        handles = []
        for step in (1, 2, 3):
            file.write_text(f"step {step} ".ljust(100_000))
            handles.append(manager.save(step, assets=[file]))
            file.unlink()
        stored = [handle.wait().assets["state.json"].read() for handle in handles]
    assert [text.split()[1] for text in stored] == [b"1", b"2", b"3"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"card.md": b""}, "the save gives the asset 'card.md'"),
        ({"card.md/x": b""}, "'card.md/x' lies inside of the asset 'card.md'"),
        ({"../x": b""}, "cannot name an asset"),
        (["/nowhere/at/all"], "is not there"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_save_with_assets_that_cannot_be_stored_writes_nothing(
    tmp_path: Path, mode: str, given: Any, words: str
) -> None:
    with opened(tmp_path / "run", mode, assets={"card.md": b"# A model"}) as manager:
        with pytest.raises(holdfast.UsageError, match=words):
            manager.save(1, assets=given)
        assert manager.checkpoints() == []
        assert manager.save(1).wait().step == 1


def test_a_save_of_a_committed_step_warns_that_its_assets_stay(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with opened(tmp_path) as manager, caplog.at_level(logging.WARNING, logger="holdfast"):
        manager.save(1, assets={"note": b"first"})
        assert not caplog.text
        found = manager.save(1, assets={"note": b"second"}).wait()
        assert "its assets stay as they are" in caplog.text
        again = manager.save(1, assets={"note": b"second"}, resave=True).wait()
    assert (contents(found), contents(again)) == ({"note": b"first"}, {"note": b"second"})


def test_a_device_or_a_pipe_behind_a_link_is_no_asset(tmp_path: Path) -> None:
    (tmp_path / "endless").symlink_to("/dev/zero")
    with opened(tmp_path / "run") as manager, pytest.raises(holdfast.UsageError, match="neither a file nor a folder"):
        manager.save(1, assets=[tmp_path / "endless"])


@pytest.mark.parametrize("kind", ["a link to another folder", "a link that leads nowhere", "a pipe"])
def test_what_is_no_file_in_a_folder_is_not_left_out_silently(kind: str, tmp_path: Path) -> None:
    folder = tmp_path / "tokenizer"
    folder.mkdir()
    (folder / "vocab.txt").write_text("a b c")
    if kind == "a pipe":
        os.mkfifo(folder / "odd")
    else:
        (folder / "odd").symlink_to(tmp_path if kind == "a link to another folder" else "nowhere")
    with opened(tmp_path / "run") as manager:
        with pytest.raises(holdfast.UsageError, match=f"the asset 'tokenizer/odd' is no file: .*{kind}"):
            manager.save(1, assets=[folder])
        (folder / "odd").unlink()
        assert contents(manager.save(1, assets=[folder]).wait()) == {"tokenizer/vocab.txt": b"a b c"}
