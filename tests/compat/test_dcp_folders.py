"""Folders of stock `dcp.save` are read without a process group, and stock `dcp.load` reads what is written."""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from holdfast.formats.dcp_folders.dcp_folder import DCPFormat
from holdfast.formats.exporting.export import ExportItem, ExportJob
from holdfast.formats.registry import open_source
from holdfast.formats.source import Fill, Source, TensorEntry, tensors_of
from holdfast.ondisk.regions import whole
from holdfast.testing import values
from tests.ranks import run_ranks

NOTE = {"text": "plain", "numbers": [1, 2.5, None], "seen": (1, 2), "history": [{"loss": 0.5}, {"loss": 0.25}]}


def trained() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a model with an odd number of rows, sharded where there are ranks, after two steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 7), torch.nn.LayerNorm(7), torch.nn.Linear(7, 1))
    if dist.is_initialized():
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        model(torch.ones(3, 6)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    return {
        "model": get_model_state_dict(model),
        "optimizer": get_optimizer_state_dict(model, optimizer),
        "step": 7,
        "note": {
            "text": "plain",
            "numbers": [1, 2.5, None],
            "seen": (1, 2),
            "history": [{"loss": 0.5}, {"loss": 0.25}],
        },
        "columns": torch.arange(6.0).reshape(2, 3).t(),
        "empty": torch.empty(0, 3),
    }


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def flat(value: Any, path: str = "") -> dict[str, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {path: full(value)}
    found: dict[str, torch.Tensor] = {}
    if isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, Mapping) else enumerate(value):
            found |= flat(inner, f"{path}.{key}" if path else str(key))
    return found


def save_stock(rank: int, folder: str) -> dict[str, torch.Tensor]:
    state = state_of(*trained())
    wanted = flat(state)
    dcp.save(state, checkpoint_id=folder)
    return wanted


def read_all(source: Source, tree: Any) -> dict[str, torch.Tensor]:
    read = {
        name: torch.empty(entry.shape, dtype=getattr(torch, entry.dtype)) for name, entry in tensors_of(tree).items()
    }
    source.read([Fill(entry, whole(entry.shape), read[name]) for name, entry in tensors_of(tree).items()])
    return read


def assert_same(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name in wanted:
        assert found[name].dtype == wanted[name].dtype, name
        assert torch.equal(found[name], wanted[name]), name


@pytest.mark.parametrize("world", [1, 2])
def test_a_folder_of_stock_dcp_is_read_bit_for_bit_and_nested_as_it_was_saved(
    tmp_path: pathlib.Path, world: int
) -> None:
    wanted = values(run_ranks(world, save_stock, str(tmp_path / "dcp")))[0]
    with open_source(tmp_path / "dcp") as source:
        assert source.format == "dcp"
        assert_same(read_all(source, source.tree), wanted)
        assert source.tree["step"] == 7
        assert source.tree["note"] == NOTE
        assert source.tree["optimizer"]["param_groups"][0]["params"] == list(source.tree["model"])
        for name, entry in tensors_of(source.tree).items():
            pieces = b"".join(bytes(piece) for piece in source.pieces(entry, limit_bytes=16))
            assert pieces == wanted[name].contiguous().flatten().view(torch.uint8).numpy().tobytes()


def job_of(source: Source) -> ExportJob:
    items: list[ExportItem] = []

    def with_items(value: Any, path: str) -> Any:
        if isinstance(value, TensorEntry):
            items.append(ExportItem(path, value, value.dtype))
            return items[-1]
        if isinstance(value, Mapping):
            return {key: with_items(inner, f"{path}.{key}" if path else str(key)) for key, inner in value.items()}
        return [with_items(inner, f"{path}.{n}") for n, inner in enumerate(value)] if type(value) is list else value

    tree = with_items(source.tree, "")
    return ExportJob(source, tuple(items), tree)


def load_stock(rank: int, folder: str, wanted: dict[str, torch.Tensor]) -> list[str]:
    """Load with stock dcp into a state of other values, and return the names that differ from the wanted ones."""
    state = state_of(*trained())
    with torch.no_grad():
        for tensor in [*flat_live(state).values()]:
            tensor.zero_()
    state |= {"step": 0, "note": {"text": "", "numbers": [], "seen": (), "history": [{"loss": 0.0}, {"loss": 0.0}]}}
    for group in state["optimizer"]["param_groups"]:
        group["lr"] = 0.0
    dcp.load(state, checkpoint_id=folder)
    found = flat(state)
    assert state["step"] == 7
    assert state["note"] == NOTE
    assert state["optimizer"]["param_groups"][0]["lr"] == 0.1
    return [name for name in wanted if not torch.equal(found[name], wanted[name])]


def flat_live(value: Any) -> dict[int, torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return {id(value): value}
    found: dict[int, torch.Tensor] = {}
    for inner in value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ():
        found |= flat_live(inner)
    return found


@pytest.mark.parametrize("shard_bytes", [None, 100])
def test_stock_dcp_reads_what_is_written_on_three_ranks(tmp_path: pathlib.Path, shard_bytes: int | None) -> None:
    wanted = values(run_ranks(2, save_stock, str(tmp_path / "dcp")))[0]
    with open_source(tmp_path / "dcp") as source:
        job = job_of(source)
        DCPFormat().write(ExportJob(job.source, job.items, job.tree, max_shard_bytes=shard_bytes), tmp_path / "written")
    assert values(run_ranks(3, load_stock, str(tmp_path / "written"), wanted)) == [[]] * 3
    with open_source(tmp_path / "written") as source:
        assert_same(read_all(source, source.tree), wanted)
