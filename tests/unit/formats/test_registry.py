"""Formats by name and by content, Holdfast's own and those that packages register."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch

import holdfast
from holdfast.errors import CheckpointNotFoundError, UnsupportedFormatError, UsageError
from holdfast.formats.base import Format
from holdfast.formats.registry import format_named, format_names, open_source

PLUGIN = """
from pathlib import Path
import holdfast
from holdfast.formats.base import Format
from holdfast.formats.binary import BinaryFile
from holdfast.formats.source import Source, StoredChunk, TensorEntry
from holdfast.ondisk.regions import whole


class BytesSource(Source):
    format = "plain"

    def __init__(self, path):
        super().__init__(str(path))
        self.file = BinaryFile.open(path)
        count = (self.file.size_bytes - 5) // 4
        chunk = StoredChunk(self.file, 5, whole((count,)))
        self._tree = {"bias": TensorEntry("bias", "float32", (count,), (chunk,)).checked()}

    @property
    def tree(self):
        return self._tree


class Plain(Format):
    name = "plain"

    def detects(self, path):
        return path.is_file() and path.read_bytes()[:5] == b"PLAIN"

    def open(self, path):
        return BytesSource(path)

    def write(self, job, target):
        (item,) = [item for item in job.items if item.name == "bias"]
        with target.open("wb") as file:
            file.write(b"PLAIN")
            for piece in job.pieces(item):
                file.write(piece)
"""


def test_every_built_in_format_is_there() -> None:
    assert {"holdfast", "dcp", "hf", "peft", "safetensors", "torch", "nemo"} <= set(format_names())
    for name in format_names():
        assert isinstance(format_named(name), Format)
    with pytest.raises(UsageError, match=r"no format 'gguf'.*safetensors"):
        format_named("gguf")


def test_content_of_no_format_is_an_error_that_lists_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("hello, this is no weights file at all")
    with pytest.raises(UnsupportedFormatError, match="known formats: holdfast"):
        open_source(tmp_path / "model.safetensors")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UnsupportedFormatError):
        open_source(tmp_path / "empty")
    with pytest.raises(CheckpointNotFoundError):
        open_source(tmp_path / "nothing")


def test_a_format_says_what_it_cannot_do(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedFormatError, match="cannot be read"):
        Format().open(tmp_path)
    with pytest.raises(UnsupportedFormatError, match="cannot be written"):
        Format().write(None, tmp_path)  # type: ignore[arg-type]


def test_a_package_adds_a_format_by_an_entry_point(tmp_path: Path) -> None:
    package = tmp_path / "site"
    (package / "plain_format-1.0.dist-info").mkdir(parents=True)
    (package / "plain_format.py").write_text(PLUGIN)
    (package / "plain_format-1.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: plain-format\nVersion: 1.0\n"
    )
    (package / "plain_format-1.0.dist-info" / "entry_points.txt").write_text(
        "[holdfast.formats]\nplain = plain_format:Plain\nwrong = plain_format:Path\n"
    )
    model = torch.nn.Linear(3, 5)
    with holdfast.CheckpointManager(tmp_path / "run", {"model": model}, mode="sync") as manager:
        manager.save(0)
    torch.save(model.bias.detach(), tmp_path / "bias.pt")
    script = f"""
    import sys
    sys.path.insert(0, {str(package)!r})
    import holdfast, torch
    holdfast.export({str(tmp_path / "run")!r}, {str(tmp_path / "out.bin")!r}, format="plain")
    model = torch.nn.Linear(3, 5)
    report = holdfast.load_weights(model, {str(tmp_path / "out.bin")!r}, exclude=["weight"])
    assert report.format == "plain", report
    assert torch.equal(model.bias, torch.load({str(tmp_path / "bias.pt")!r}))
    try:
        holdfast.export({str(tmp_path / "run")!r}, {str(tmp_path / "other")!r}, format="wrong")
    except holdfast.UsageError as error:
        assert "is no holdfast.formats.base.Format" in str(error)
    else:
        raise AssertionError
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
