"""Exports, by one process, of checkpoints of several ranks."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

import holdfast
from holdfast.errors import UsageError
from holdfast.formats.exporting.export import export
from holdfast.testing import values
from tests.distributed.training import build
from tests.ranks import run_ranks


def save_sharded(rank: int, run: Path, form: str, size: int) -> dict[str, torch.Tensor]:
    training = build(form, rank, size, seed=5)
    with holdfast.CheckpointManager(run, {"model": training.model}, rng=False, mode="sync") as manager:
        manager.save(1)
    return get_model_state_dict(training.model, options=StateDictOptions(full_state_dict=True))


@pytest.mark.parametrize(("form", "size"), [("plain", 1), ("fsdp", 2), ("fsdp", 4), ("mesh", 4)])
def test_a_model_of_any_layout_is_exported_whole(tmp_path: Path, form: str, size: int) -> None:
    whole = values(run_ranks(size, save_sharded, tmp_path / "run", form, size))[0]
    export(tmp_path / "run", tmp_path / "out.safetensors", format="safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == whole.keys()
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), name


def save_stages(rank: int, run: Path, names: list[str]) -> None:
    """Save a model of which each rank has its own layers, under the given names."""
    model = nn.ModuleDict({names[rank]: nn.Linear(2, 2, bias=False)})
    nn.init.constant_(model[names[rank]].weight, rank)
    with holdfast.CheckpointManager(run, {"model": holdfast.PerRank(model)}, rng=False, mode="sync") as manager:
        manager.save(1)


def test_parts_that_ranks_have_for_themselves_are_put_together(tmp_path: Path) -> None:
    values(run_ranks(2, save_stages, tmp_path / "run", ["first", "second"]))
    export(tmp_path / "run", tmp_path / "out.safetensors", format="safetensors")
    found = load_file(tmp_path / "out.safetensors")
    assert {name: float(tensor[0, 0]) for name, tensor in found.items()} == {"first.weight": 0, "second.weight": 1}


def test_a_name_that_two_ranks_have_for_themselves_is_an_error_that_names_both(tmp_path: Path) -> None:
    values(run_ranks(2, save_stages, tmp_path / "run", ["same", "same"]))
    with pytest.raises(UsageError, match=r"same\.weight.*model@rank-00000.*model@rank-00001"):
        export(tmp_path / "run", tmp_path / "out.safetensors", format="safetensors")
    assert os.listdir(tmp_path) == ["run"]
    export(tmp_path / "run", tmp_path / "out.safetensors", format="safetensors", only="model@rank-00001")
    assert float(load_file(tmp_path / "out.safetensors")["same.weight"][0, 0]) == 1
