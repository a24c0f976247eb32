"""Folders for stock `dcp.load`: names and values as `dcp.save` has them, the same bytes for the same content."""

from __future__ import annotations

import pathlib
import pickle
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import Metadata

from holdfast.errors import UsageError
from holdfast.formats.dcp_folders.dcp_folder import DCPFormat
from holdfast.formats.exporting.export import ExportItem, ExportJob
from holdfast.formats.source import Source, TensorEntry
from holdfast.formats.torch_files.torch_file import TorchFormat

STATE: dict[str, Any] = {
    "model": {"weight": torch.arange(12.0).reshape(4, 3), "scale": torch.tensor(2.5), "none": torch.empty(0, 2)},
    "optimizer": {
        "state": {"weight": {"step": torch.tensor(1.0)}},
        "param_groups": [{"lr": 0.1, "params": ["weight"]}],
    },
    "lists": [[1, 2], [torch.ones(2), "text"]],
    "pair": (1, torch.zeros(2)),
    "nothing": None,
}


def with_items(value: Any) -> Any:
    if isinstance(value, TensorEntry):
        return ExportItem(value.name, value, value.dtype)
    if isinstance(value, dict):
        return {key: with_items(inner) for key, inner in value.items()}
    return type(value)(map(with_items, value)) if type(value) in (list, tuple) else value


@pytest.fixture
def source(tmp_path: pathlib.Path) -> Source:
    torch.save(STATE, tmp_path / "state.pt")
    return TorchFormat().open(tmp_path / "state.pt")


def write(source: Source, folder: pathlib.Path, **options: Any) -> pathlib.Path:
    DCPFormat().write(ExportJob(source, (), with_items(source.tree), **options), folder)
    return folder


def metadata_of(folder: pathlib.Path) -> Metadata:
    found = pickle.loads((folder / ".metadata").read_bytes())
    assert type(found) is Metadata
    return found


def test_names_paths_and_metadata_are_those_of_stock_dcp(source: Source, tmp_path: pathlib.Path) -> None:
    dcp.save(dict(STATE), checkpoint_id=tmp_path / "stock", no_dist=True)
    stock, written = metadata_of(tmp_path / "stock"), metadata_of(write(source, tmp_path / "written"))
    assert written.state_dict_metadata == stock.state_dict_metadata
    assert written.planner_data == stock.planner_data
    assert set(written.storage_data) == set(stock.storage_data)
    assert written.version == stock.version


def test_a_stock_tool_makes_a_torch_file_of_it_with_every_value(source: Source, tmp_path: pathlib.Path) -> None:
    dcp_to_torch_save(write(source, tmp_path / "written"), tmp_path / "back.pt")
    found = torch.load(tmp_path / "back.pt", weights_only=False)
    assert str(found) == str(STATE)


def test_the_same_content_gives_the_same_bytes(source: Source, tmp_path: pathlib.Path) -> None:
    first, second = (write(source, tmp_path / name) for name in ("first", "second"))
    assert {path.name: path.read_bytes() for path in first.iterdir()} == {
        path.name: path.read_bytes() for path in second.iterdir()
    }


def test_files_have_no_more_than_the_bytes_that_are_asked_for(source: Source, tmp_path: pathlib.Path) -> None:
    folder = write(source, tmp_path / "written", max_shard_bytes=50)
    assert len(list(folder.glob("__0_*.distcp"))) == 2
    state = {"model": {"weight": torch.zeros(4, 3)}}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    assert torch.equal(state["model"]["weight"], STATE["model"]["weight"])


def test_two_paths_of_one_name_are_an_error(source: Source, tmp_path: pathlib.Path) -> None:
    tree = {"a.b": 1, "a": {"b": 2}}
    with pytest.raises(UsageError, match=r"'a\.b'"):
        DCPFormat().write(ExportJob(source, (), tree), tmp_path / "written")
    assert not (tmp_path / "written").exists()


def test_an_existing_folder_is_not_written_over(source: Source, tmp_path: pathlib.Path) -> None:
    (tmp_path / "written").mkdir()
    with pytest.raises(FileExistsError):
        write(source, tmp_path / "written")
