"""What a target is, and what is said when its disk fails."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from holdfast.errors import StorageError, UsageError
from holdfast.formats.exporting.export import export
from holdfast.formats.exporting.publishing import check_target, published
from tests.sizes import if_deep

# The system refuses to let any file grow beyond the limit, as a full disk does.
LIMITED = """
import resource, sys
from holdfast.errors import HoldfastError
from holdfast.formats.exporting.export import export
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
try:
    export(sys.argv[1], sys.argv[2], format=sys.argv[3])
except HoldfastError as error:
    print(type(error).__name__, error.errno)
"""


@pytest.mark.parametrize("form", ["dcp", *if_deep("torch")])
def test_a_disk_that_takes_no_more_bytes_is_a_storage_error_and_nothing_is_left(tmp_path: Path, form: str) -> None:
    source, folder = tmp_path / "source.pt", tmp_path / "out"
    torch.save({"weight": torch.ones(100_000)}, source)
    folder.mkdir()
    command = [sys.executable, "-c", LIMITED, str(source), str(folder / "target"), form]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["StorageError", str(errno.EFBIG)]
    assert os.listdir(folder) == []


def test_an_error_of_the_disk_names_the_target_and_what_to_do(tmp_path: Path) -> None:
    def write() -> None:
        with published(tmp_path / "target") as partial, open("/dev/full", "wb", buffering=0) as full:
            partial.write_bytes(b"some")
            full.write(b"more")

    with pytest.raises(StorageError, match="full") as caught:
        write()
    assert (caught.value.errno, caught.value.file) == (errno.ENOSPC, str(tmp_path / "target"))
    assert os.listdir(tmp_path) == []


def test_a_folder_that_goes_away_is_a_storage_error_without_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()

    def write() -> None:
        with published(folder / "target") as partial:
            shutil.rmtree(folder)
            partial.mkdir()

    with caplog.at_level(logging.WARNING, "holdfast"), pytest.raises(StorageError, match="removed"):
        write()
    assert caplog.records == []


def test_a_partial_that_was_never_made_is_not_warned_about(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    # A file lies in the place of the folder: to remove the partial fails as to make it did.
    with caplog.at_level(logging.WARNING, "holdfast"), pytest.raises(StorageError):
        with published(tmp_path / "file" / "target") as partial:
            partial.mkdir()
    assert caplog.records == []


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_values_of_a_foreign_model_are_kept_or_named_as_left_out(
    tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = {"weight": torch.ones(2), "num_updates": 5, "bias": torch.zeros(1), "note": "s"}
    torch.save({"model": model}, tmp_path / "source.pt")
    with caplog.at_level(logging.WARNING, "holdfast"):
        report = export(tmp_path / "source.pt", tmp_path / f"out.{form}", format=form)
    assert report.names == ("weight", "bias")
    if form == "torch":
        found = torch.load(tmp_path / "out.torch", weights_only=True)
        assert list(found) == list(model)
        assert (found["num_updates"], found["note"], report.left_out) == (5, "s", ())
    else:
        assert report.left_out == ("num_updates", "note")
        assert "num_updates, note" in caplog.text


@pytest.mark.parametrize("name", ["nul\0", "half\ud800"])
def test_a_target_that_no_file_can_be_called_is_a_usage_error(tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match="no path"):
        check_target(tmp_path / name)


def test_a_target_with_a_name_that_is_too_long_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="shorter"):
        check_target(tmp_path / ("n" * 300))
