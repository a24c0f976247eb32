"""Files that are stored beside the weights: listed, read and verified."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import CorruptCheckpointError, UsageError


@pytest.fixture
def checkpoint(tmp_path: Path) -> holdfast.Checkpoint:
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "vocab.txt").write_bytes(b"a\nb\n" * 500_000)
    (tmp_path / "config.yaml").write_text("width: 4\n")
    state = {"model": torch.nn.Linear(2, 2)}
    assets = [tmp_path / "tokenizer", tmp_path / "config.yaml"]
    with holdfast.CheckpointManager(tmp_path / "run", state, mode="sync", assets=assets) as manager:
        manager.save(0)
    return holdfast.resolve(tmp_path / "run")


def test_assets_are_listed_and_read_by_name(checkpoint: holdfast.Checkpoint) -> None:
    assert sorted(checkpoint.assets) == ["config.yaml", "tokenizer/vocab.txt"]
    assert checkpoint.assets["config.yaml"].read() == b"width: 4\n"
    large = checkpoint.assets["tokenizer/vocab.txt"]
    with large.open() as file:
        assert file.readline() == b"a\n"
    assert len(large.read()) == large.size_bytes == 2_000_000
    assert max(map(len, large.pieces())) <= 1 << 20


def test_an_asset_that_is_not_there_lists_those_that_are(checkpoint: holdfast.Checkpoint) -> None:
    with pytest.raises(UsageError, match=r"there are: config\.yaml, tokenizer/vocab\.txt"):
        checkpoint.assets["vocab.txt"]
    with pytest.raises(KeyError):
        checkpoint.assets["vocab.txt"]
    assert checkpoint.assets.get("vocab.txt") is None
    assert "vocab.txt" not in checkpoint.assets


@pytest.mark.parametrize("damage", ["flipped", "shorter", "gone"])
def test_a_damaged_asset_is_not_handed_out(checkpoint: holdfast.Checkpoint, damage: str) -> None:
    file = Path(checkpoint.path) / "assets" / "tokenizer" / "vocab.txt"
    data = bytearray(file.read_bytes())
    if damage == "flipped":
        data[-1] ^= 1
        file.write_bytes(data)
    elif damage == "shorter":
        file.write_bytes(data[:-1])
    else:
        file.unlink()
    with pytest.raises(CorruptCheckpointError, match=r"vocab\.txt"):
        checkpoint.assets["tokenizer/vocab.txt"].read()
