"""`dcp.load` through `HoldfastReader` into every layout from every layout, saved by `dcp.save` and by a manager.

A checkpoint has the same tensors once for each layout. It is loaded as a whole into each of the layouts, so every pair
of them is met, and every depth of verification.
"""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import holdfast
from holdfast import HoldfastReader, HoldfastWriter
from holdfast.testing import values
from tests.ranks import run_ranks

WORLD = 4
# Divisible, not divisible, fewer rows than ranks, empty, a scalar, and more than two dimensions.
SHAPES: dict[str, tuple[int, ...]] = {
    "even": (8, 12),
    "uneven": (7, 5),
    "thin": (1, 6),
    "flat": (9,),
    "empty": (0, 3),
    "scalar": (),
    "cube": (3, 5, 4),
}
# The name of a layout, the ranks of its mesh, and how a tensor lies on them; None for a plain tensor.
LAYOUTS: dict[str, tuple[Any, Any]] = {
    "whole": (None, None),
    "alone": ([0], [Shard(0)]),
    "rows_of_2": ([0, 1], [Shard(0)]),
    "rows_of_3": ([1, 2, 3], [Shard(0)]),
    "rows_of_4": ([0, 1, 2, 3], [Shard(0)]),
    "columns_of_2": ([2, 3], [Shard(1)]),
    "columns_of_4": ([0, 1, 2, 3], [Shard(1)]),
    "last_of_4": ([0, 1, 2, 3], [Shard(-1)]),
    "copies": ([0, 1, 2, 3], [Replicate()]),
    "copies_of_rows": ([[0, 1], [2, 3]], [Replicate(), Shard(0)]),
    "rows_then_columns": ([[0, 1], [2, 3]], [Shard(0), Shard(1)]),
    "columns_then_rows": ([[0, 1], [2, 3]], [Shard(1), Shard(0)]),
    "rows_twice": ([[0, 1], [2, 3]], [Shard(0), Shard(0)]),
}


def tensor_of(name: str) -> torch.Tensor:
    shape = SHAPES[name]
    count = int(torch.Size(shape).numel())
    return (torch.arange(count, dtype=torch.float32) + 1 + len(name)).reshape(shape)


def meshes() -> dict[str, DeviceMesh | None]:
    return {name: None if ranks is None else DeviceMesh("cpu", ranks) for name, (ranks, _) in LAYOUTS.items()}


def placed(tensor: torch.Tensor, layout: str, mesh: DeviceMesh | None) -> torch.Tensor:
    """Lay a tensor out; a dimension that it does not have is not cut."""
    if mesh is None:
        return tensor.clone()
    cuts = [
        Replicate() if isinstance(cut, Shard) and cut.dim >= tensor.ndim else cut
        for cut in (LAYOUTS[layout][1] if tensor.ndim else [Replicate()] * mesh.ndim)
    ]
    return distribute_tensor(tensor, mesh, cuts, src_data_rank=None)


def strided(fill: torch.Tensor) -> torch.Tensor:
    """Return a weight whose rows are cut by tensor parallelism first and by FSDP after it."""
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    model = torch.nn.Linear(fill.shape[1], fill.shape[0], bias=False)
    with torch.no_grad():
        model.weight.copy_(fill)
    model = torch.nn.Sequential(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    weight = model.state_dict()["0.weight"]
    assert "Strided" in type(weight.placements[0]).__name__
    return weight


def state_in(layout: str, mesh: DeviceMesh | None, *, filled: bool) -> dict[str, torch.Tensor]:
    made = {name: tensor_of(name) if filled else torch.full(SHAPES[name], -1.0) for name in SHAPES}
    return {name: placed(tensor, layout, mesh) for name, tensor in made.items()}


def everything(by_layout: dict[str, DeviceMesh | None]) -> dict[str, torch.Tensor]:
    state = {
        f"{layout}.{name}": tensor
        for layout, mesh in by_layout.items()
        for name, tensor in state_in(layout, mesh, filled=True).items()
    }
    return {**state, "strided.even": strided(tensor_of("even"))}


class Holder:
    """A component with a state dict of `DTensor`s, as a manager takes it."""

    def __init__(self, state: dict[str, torch.Tensor]) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def save(rank: int, run: str, by: str) -> dict[str, DeviceMesh | None]:
    by_layout = meshes()
    state = everything(by_layout)
    if by == "dcp":
        dcp.save({"model": state}, storage_writer=HoldfastWriter(run))
    else:
        holdfast.CheckpointManager(run, {"model": Holder(state)}, rng=False, mode="sync").save(0)
    return by_layout


def wrong_after_load(layout: str, mesh: DeviceMesh | None, keys: list[str], run: str, verify: Any) -> list[str]:
    """Load every saved layout into one, and return the keys whose part on this rank is not what was saved."""
    target = {key: placed(torch.full(SHAPES[key.partition(".")[2]], -1.0), layout, mesh) for key in keys}
    dcp.load({"model": target}, storage_reader=HoldfastReader(run, verify=verify))
    return [
        key
        for key, found in target.items()
        if not torch.equal(local(found), local(placed(tensor_of(key.partition(".")[2]), layout, mesh)))
    ]


def wrong_after_strided_load(weight: torch.Tensor, run: str, verify: Any) -> list[str]:
    target = {f"{source}.even": torch.full_like(weight, -1.0) for source in (*LAYOUTS, "strided")}
    dcp.load({"model": target}, storage_reader=HoldfastReader(run, verify=verify))
    return [key for key, found in target.items() if not torch.equal(local(found), local(weight))]


def errors_of_damage(rank: int, run: str, mesh: DeviceMesh) -> tuple[list[str], bool]:
    """Damage a tensor that one rank wrote, and return what each rank meets that wants rows of it, and whether its part
    was left alone."""
    if rank == 0:
        checkpoint = holdfast.resolve(run)
        chunk = next(leaf for leaf in checkpoint.manifest.tensors if leaf.name == "model.whole.even").chunks[0]
        path = pathlib.Path(checkpoint.path) / chunk.file
        data = bytearray(path.read_bytes())
        data[chunk.start] ^= 1
        path.write_bytes(data)
    dist.barrier()
    target = placed(torch.full(SHAPES["even"], -1.0), "rows_of_4", mesh)
    try:
        dcp.load({"model": {"whole.even": target}}, storage_reader=HoldfastReader(run))
    except CheckpointException as failure:
        met = [type(error).__name__ for error, _ in failure.failures.values()]
        return met, bool((local(target) == -1).all())
    return [], False


def reshard(rank: int, run: str, by: str) -> dict[str, Any]:
    by_layout = save(rank, run, by)
    keys = [f"{layout}.{name}" for layout in LAYOUTS for name in SHAPES] + ["strided.even"]
    weight = strided(tensor_of("even"))
    wrong: dict[str, Any] = {}
    for verify in ("full", "quick", "off"):
        for layout, mesh in by_layout.items():
            wrong[f"{layout} {verify}"] = wrong_after_load(layout, mesh, keys, run, verify)
        wrong[f"strided {verify}"] = wrong_after_strided_load(weight, run, verify)
    rows = by_layout["rows_of_4"]
    assert rows is not None
    return {what: found for what, found in wrong.items() if found} | {"damage": errors_of_damage(rank, run, rows)}


def reshard_all(rank: int, folder: str) -> dict[str, Any]:
    """Go through all of it for both ways to save, in one start of the ranks, which takes longer than the rest."""
    return {by: reshard(rank, f"{folder}/{by}", by) for by in ("dcp", "manager")}


@pytest.mark.guarantee("G3")
def test_every_layout_is_loaded_into_every_other(tmp_path: pathlib.Path) -> None:
    # Every rank wants a part of the one block that is damaged, and no rank changes a tensor.
    met = {"damage": (["CorruptCheckpointError"] * WORLD, True)}
    assert values(run_ranks(WORLD, reshard_all, str(tmp_path))) == [{"dcp": met, "manager": met}] * WORLD
    names = [f"{layout}.{name}" for layout in LAYOUTS for name in SHAPES if (layout, name) != ("whole", "even")]
    for run in (tmp_path / "dcp", tmp_path / "manager"):
        one = {name: torch.full(SHAPES[name.partition(".")[2]], -1.0) for name in names}
        dcp.load({"model": one}, storage_reader=HoldfastReader(run), no_dist=True)
        assert [name for name, found in one.items() if not torch.equal(found, tensor_of(name.partition(".")[2]))] == []
