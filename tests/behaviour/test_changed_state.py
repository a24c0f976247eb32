"""What changes between two saves of one manager, or during one, is stored as a new manager would store it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

import holdfast
from holdfast.errors import UsageError

MODES = ["async", "sync"]


class Text(str):
    """A text that is no plain one."""


class Later:
    """A component that is captured after the others, and runs code of the user's then."""

    def __init__(self, act: Callable[[], None]) -> None:
        self.act = act

    def state_dict(self) -> dict[str, int]:
        self.act()
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None:
        pass


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def stored(checkpoint: holdfast.Checkpoint) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for file in Path(checkpoint.path).glob("*.safetensors"):
        found |= load_file(file)
    return found


def saved(manager: holdfast.CheckpointManager, step: int) -> holdfast.Checkpoint:
    return manager.save(step).wait()


def manager_of(run: Path, state: dict[str, Any], mode: Any) -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, state, mode=mode, rng=False)


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [1000, 4_000_000])
def test_memory_that_a_parameter_gets_while_the_rest_is_captured_is_not_stored(
    mode: str, size: int, tmp_path: Path
) -> None:
    model = nn.ParameterDict({"p": nn.Parameter(torch.ones(size))})
    spoils: list[torch.Tensor] = []

    def give_other_memory() -> None:
        model["p"].data = torch.full((size,), 2.0)
        spoils.extend(torch.full((size,), 99.0) for _ in range(4))

    with manager_of(tmp_path, {"a": model, "later": Later(give_other_memory)}, mode) as manager:
        for step in range(3):
            with torch.no_grad():
                model["p"].fill_(1)
            assert stored(saved(manager, step))["a.p"].unique().tolist() == [1.0]


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("size", [1000, 4_000_000])
def test_memory_that_a_tensor_of_a_dict_gets_while_the_rest_is_captured_is_not_stored(
    size: int, tmp_path: Path
) -> None:
    tensors = {"t": torch.ones(size)}
    spoils: list[torch.Tensor] = []

    def give_other_memory() -> None:
        tensors["t"].data = torch.full((size,), 2.0)
        spoils.extend(torch.full((size,), 99.0) for _ in range(4))

    with manager_of(tmp_path, {"a": tensors, "later": Later(give_other_memory)}, "async") as manager:
        for step in range(3):
            tensors["t"].fill_(1)
            assert stored(saved(manager, step))["a.t"].unique().tolist() == [1.0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("saves_before", [0, 1])
@pytest.mark.parametrize("left_bytes", [0, 40])
def test_a_tensor_whose_storage_is_too_small_is_refused(
    mode: str, saves_before: int, left_bytes: int, tmp_path: Path
) -> None:
    tensors = {"whole": torch.ones(1000), "cut": torch.ones(1000)[10:]}
    with manager_of(tmp_path, {"a": tensors}, mode) as manager:
        for step in range(saves_before):
            saved(manager, step)
        tensors["cut"].untyped_storage().resize_(left_bytes)
        with pytest.raises(UsageError, match=rf"needs 3960 bytes of a storage that has only {left_bytes}"):
            saved(manager, 9)


@pytest.mark.parametrize("mode", MODES)
def test_a_shard_that_becomes_a_tensor_of_a_subclass_is_stored_with_what_is_inside(
    mode: str, one_rank: None, tmp_path: Path
) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 4, bias=False)

    def distribute(local: torch.Tensor) -> None:
        model.weight = nn.Parameter(DTensor.from_local(local, mesh, [Replicate()]), requires_grad=False)

    distribute(torch.full((4, 4), 1.0))
    with manager_of(tmp_path, {"model": model}, mode) as manager:
        saved(manager, 0)
        distribute(TwoTensor(torch.full((4, 4), 5.0), torch.full((4, 4), 7.0)))
        found = stored(saved(manager, 1))
    assert {name: int(tensor[0, 0]) for name, tensor in found.items()} == {"model.weight.a": 5, "model.weight.b": 7}


@pytest.mark.parametrize("mode", MODES)
def test_the_model_of_an_optimizer_is_the_one_that_has_its_parameters_now(mode: str, tmp_path: Path) -> None:
    a, b = nn.ModuleDict({"back": nn.Linear(2, 2)}), nn.ModuleDict()
    b["back"] = a["back"]
    optimizer = torch.optim.SGD(a["back"].parameters(), lr=0.1, momentum=0.9)
    with manager_of(tmp_path, {"a": a, "b": b, "optimizer": optimizer}, mode) as manager:
        first = saved(manager, 0)
        a["back"] = nn.Linear(2, 2)
        second = saved(manager, 1)
    models = [{tree.name: tree.model for tree in one.manifest.trees}["optimizer"] for one in (first, second)]
    assert models == ["a", "b"]


@pytest.mark.parametrize("mode", MODES)
def test_an_optimizer_that_becomes_one_of_another_class_is_stored_as_that(mode: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    with manager_of(tmp_path, {"model": model, "optimizer": optimizer}, mode) as manager:
        saved(manager, 0)
        optimizer.__class__ = torch.optim.AdamW
        trees = {tree.name: tree.type for tree in saved(manager, 1).manifest.trees}
    assert trees["optimizer"].endswith("AdamW")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [torch.ones(2), 1])
def test_a_key_of_another_class_that_equals_the_text_before_is_refused(mode: str, value: Any, tmp_path: Path) -> None:
    state: dict[str, Any] = {"key": value, "other": torch.ones(3)}
    with manager_of(tmp_path, {"a": state}, mode) as manager:
        saved(manager, 0)
        state.clear()
        state.update({Text("key"): value, "other": torch.ones(3)})
        with pytest.raises(UsageError):
            saved(manager, 1)


@pytest.mark.parametrize("mode", MODES)
def test_zeros_without_memory_are_stored_as_zeros(mode: str, tmp_path: Path) -> None:
    state = {"zeros": torch._efficientzerotensor(4), "ones": torch.ones(4)}
    with manager_of(tmp_path, {"a": state}, mode) as manager:
        for step in range(2):
            assert stored(saved(manager, step))["a.zeros"].tolist() == [0.0] * 4


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("mode", MODES)
def test_a_subclass_that_shared_its_inner_tensors_with_other_leaves_is_stored_with_those_it_has_now(
    mode: str, tmp_path: Path
) -> None:
    shared = torch.zeros(3)
    tensors = {"a": shared, "q": TwoTensor(shared, shared)}
    with manager_of(tmp_path, {"a": tensors}, mode) as manager:
        assert stored(saved(manager, 0)).keys() == {"a.a"}
        assert stored(saved(manager, 1)).keys() == {"a.a"}
        tensors["q"] = TwoTensor(torch.ones(3), torch.full((3,), 2.0))
        found = stored(saved(manager, 2))
    assert {name: tensor.unique().tolist() for name, tensor in found.items()} == {
        "a.a": [0.0],
        "a.q.a": [1.0],
        "a.q.b": [2.0],
    }
