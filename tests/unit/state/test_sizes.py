"""How much a rank will store is known without asking the objects: models, optimizers, and a rank's share of each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import holdfast
from holdfast.state.sizes import StateSize, estimate_size
from tests.behaviour.test_subclasses import Pair

CPU = frozenset({torch.device("cpu")})


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """This process as rank 1 of four, of which the others answer everything at once."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def model_bytes(model: nn.Module) -> int:
    return sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))


class Silent(nn.Module):
    """A model whose state dict must not be asked for by another thread than the training's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def state_dict(self, *arguments: Any, **named: Any) -> Any:
        raise AssertionError("it is not asked")

    __getstate__ = parameters = named_parameters = buffers = named_buffers = state_dict
    modules = named_modules = children = named_children = state_dict


def test_a_model_counts_with_its_buffers_and_tied_parameters_count_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    found = estimate_size({"model": model}, 1)
    assert found == StateSize(model_bytes(model), 8, CPU, growing=False)
    assert found.size_bytes == (16 + 4 + 4) * 4 + (4 * 4) * 4 + 8


def test_no_code_of_a_component_is_called() -> None:
    assert estimate_size({"model": Silent()}, 1).size_bytes == 72 * 4


def test_an_optimizer_grows_until_its_first_step() -> None:
    model = nn.Linear(10, 10)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    assert estimate_size(state, 1) == StateSize(440, 2, CPU, growing=True)
    model(torch.ones(10)).sum().backward()
    optimizer.step()
    assert estimate_size(state, 1) == StateSize(440 + 2 * 440 + 2 * 4, 8, CPU, growing=False)


def test_only_what_is_trained_counts_of_a_trainable_model_with_its_buffers() -> None:
    model = nn.Sequential(nn.Linear(10, 10), nn.BatchNorm1d(10))
    model[0].requires_grad_(False)
    assert estimate_size({"model": holdfast.Trainable(model)}, 1).size_bytes == 20 * 4 + 20 * 4 + 8


def test_each_rank_writes_its_share_of_what_is_the_same_and_all_of_its_own() -> None:
    model = nn.Linear(100, 100)
    size_bytes = model_bytes(model)
    assert estimate_size({"model": model}, 4).size_bytes == size_bytes // 4
    assert estimate_size({"model": holdfast.PerRank(model)}, 4).size_bytes == size_bytes
    assert estimate_size({"a": model, "b": holdfast.PerRank(nn.Linear(100, 100))}, 4).size_bytes == size_bytes * 5 // 4


def test_a_tensor_of_a_subclass_counts_with_its_inner_tensors() -> None:
    model = nn.Module()
    model.register_buffer("pair", Pair(torch.ones(10), torch.ones(10)))
    assert estimate_size({"model": model}, 1) == StateSize(2 * 40, 2, CPU, growing=False)


def test_components_that_are_no_models_or_optimizers_count_nothing() -> None:
    assert estimate_size({"loader": {"position": 3}, "rng": object()}, 1) == StateSize(0, 0, frozenset(), False)


def test_a_device_is_named_once_and_a_model_without_memory_counts_as_it_will_be() -> None:
    model = nn.Linear(10, 10, device="meta")
    assert estimate_size({"model": model}, 1) == StateSize(440, 2, frozenset({torch.device("meta")}), False)


def test_a_lazy_model_counts_what_it_has_by_now() -> None:
    model = nn.LazyLinear(10)
    assert estimate_size({"model": model}, 1).size_bytes == 0
    model(torch.ones(10))
    assert estimate_size({"model": model}, 1).size_bytes == 440


@pytest.mark.parametrize(
    ("shape", "placements", "expected"),
    [
        ((4,), [Shard(0)], 1 / 4),
        ((4,), [Shard(1)], 1 / 4),
        ((4,), [Replicate()], 1 / 4),
        ((2, 2), [Replicate(), Shard(0)], 1 / 4),
        ((2, 2), [Shard(0), Replicate()], 1 / 4),
        ((2, 2), [Shard(0), Shard(1)], 1 / 4),
    ],
    ids=["FSDP2", "columns", "replicas", "HSDP", "HSDP the other way", "two dimensions"],
)
def test_a_rank_writes_its_shard_or_a_share_of_it_where_others_have_the_same(
    four_ranks: None, shape: tuple[int, ...], placements: list[Any], expected: float
) -> None:
    mesh = init_device_mesh("cpu", shape)
    model = nn.Linear(16, 16, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, placements))
    assert estimate_size({"model": model}, 4) == StateSize(int(1024 * expected), 1, CPU, growing=False)


def test_an_uneven_shard_counts_whole(four_ranks: None) -> None:
    """Rank 1 of four has two rows of five: no other rank has them, though they are nearly half of the tensor."""
    mesh = init_device_mesh("cpu", (4,))
    model = nn.Linear(16, 5, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    assert estimate_size({"model": model}, 4).size_bytes == 2 * 16 * 4


def test_a_mesh_of_some_of_the_ranks_is_as_large_as_it_is(four_ranks: None) -> None:
    """As in a pipeline, where the other ranks have other layers."""
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stages", "shards"))["shards"]
    model = nn.Linear(16, 16, bias=False)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), pair, [Shard(0)]))
    assert estimate_size({"model": model}, 4).size_bytes == 512
