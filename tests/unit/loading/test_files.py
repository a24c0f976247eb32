"""Files of a checkpoint: opened once, of the size and the digest that the manifest has, or damage."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.errors import CorruptCheckpointError
from holdfast.loading.files import Files, ValueFiles, check_files, parse_values, read_values, reference_of, require_file
from holdfast.runs.checkpoint import Checkpoint


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    state = {"state": {"x": torch.zeros(4), "count": 3}}
    with holdfast.CheckpointManager(tmp_path, state, rng=False, mode="sync") as manager:
        manager.save(0)
    return holdfast.resolve(tmp_path)


def path_of(checkpoint: Checkpoint, name: str) -> Path:
    path = Path(checkpoint.path) / name
    path.chmod(0o644)
    return path


def test_values_are_read_and_parsed(checkpoint: Checkpoint) -> None:
    tree = checkpoint.manifest.trees[0]
    found: Any = parse_values(read_values(checkpoint, tree.file, checked=True), tree.file)
    assert found["state"]["count"] == 3
    assert reference_of(found["state"]["x"]) == "x"
    assert reference_of(found["state"]["count"]) is None


def test_values_with_a_changed_byte_are_found_by_their_digest_alone(checkpoint: Checkpoint) -> None:
    file = checkpoint.manifest.trees[0].file
    path = path_of(checkpoint, file)
    path.write_bytes(path.read_bytes().replace(b"3", b"4"))
    assert b"4" in read_values(checkpoint, file, checked=False)
    with pytest.raises(CorruptCheckpointError, match="digest"):
        read_values(checkpoint, file, checked=True)


def test_what_is_no_file_of_values_is_damage(checkpoint: Checkpoint) -> None:
    for data in (b"[]", b"{", b'{"other": {}}', b"[" * 100_000, b"\xff"):
        with pytest.raises(CorruptCheckpointError, match="not a file of values"):
            parse_values(data, "values.json")


def test_a_file_of_another_size_is_damage(checkpoint: Checkpoint) -> None:
    file = checkpoint.manifest.tensors[0].chunks[0].file
    require_file(checkpoint, file)
    assert check_files(checkpoint, {file}) == []
    path = path_of(checkpoint, file)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CorruptCheckpointError, match="the manifest says"):
        require_file(checkpoint, file)
    (problem,) = check_files(checkpoint, {file})
    assert problem.file == file


def test_a_missing_file_is_a_problem_of_each_leaf_in_it(checkpoint: Checkpoint) -> None:
    file = checkpoint.manifest.tensors[0].chunks[0].file
    path_of(checkpoint, file).unlink()
    with ExitStack() as stack:
        files = Files(checkpoint, stack)
        assert files.source(file, "state.x") is None
        assert files.source(file, "state.y") is None
    assert [problem.leaf for problem in files.problems] == ["state.x", "state.y"]


def test_a_file_of_values_is_read_once(checkpoint: Checkpoint) -> None:
    tree = checkpoint.manifest.trees[0]
    files = ValueFiles(checkpoint, checked=True)
    first = files.values(tree)
    path_of(checkpoint, tree.file).unlink()
    assert files.values(tree) is first
