"""Objects that are legal and odd, on several ranks: each comes back right on all of them, or is refused on all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import PostLocalSGDOptimizer, ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.state.names import unwrap
from tests.behaviour.test_odd_modules import Metric, renamed, tower
from tests.behaviour.test_odd_optimizers import Lookahead
from tests.behaviour.test_subclasses import Optimizer8, Registered, Scaled, model_with
from tests.distributed.scenes import Play, bits, caught, run_scenes, the_same_error, trees

TIMEOUT_SECONDS = 200.0


def manager_of(run: Path, state: dict[str, Any], mode: Any = "sync") -> holdfast.CheckpointManager:
    return holdfast.CheckpointManager(run, state, rng=False, timeout=TIMEOUT_SECONDS, mode=mode)


def stepped(model: nn.Module, optimizer: Any) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.5 + index)
    optimizer.step()


# Modules without persistent state


def _metrics(folder: Path, mode: Any) -> Any:
    state: dict[str, Any] = {"model": nn.Linear(2, 2), "metric": Metric(), "mine": holdfast.PerRank(Metric())}
    state["adapter"], state["loss"] = holdfast.Trainable(Metric()), holdfast.Shared(nn.MSELoss())
    with manager_of(folder, state, mode) as manager:
        manager.save(0)
        manager.save(1, wait=True)
        return manager.restore().restored


def metrics_beside_a_model(rank: int, folder: Path) -> Any:
    return _metrics(folder, "sync")


def metrics_beside_a_model_in_the_background(rank: int, folder: Path) -> Any:
    return _metrics(folder, "async")


# Keys that hooks rename


def _renamed(folder: Path, wrap: Any) -> Any:
    def model() -> nn.Module:
        torch.manual_seed(1)
        return wrap(renamed(nn.Sequential(renamed(tower()), nn.Linear(2, 2))))

    first, optimizer = (made := model()), torch.optim.AdamW(made.parameters())
    stepped(first, optimizer)
    with manager_of(folder, {"model": first, "optimizer": optimizer}, "async") as manager:
        manager.save(0)
        manager.save(1, wait=True)
        expected = bits([first.state_dict(), optimizer.state_dict()])
        stepped(first, optimizer)
        changed = bits([first.state_dict(), optimizer.state_dict()]) != expected
        manager.restore()
    again = bits([first.state_dict(), optimizer.state_dict()]) == expected
    second, its_optimizer = (made := model()), torch.optim.AdamW(made.parameters())
    with manager_of(folder, {"model": second, "optimizer": its_optimizer}) as manager:
        manager.restore()
    leaves = {leaf.name for leaf in holdfast.resolve(folder).manifest.tensors}
    named = "model.net.0.net.0.weight" in leaves and "optimizer.state.0.0.weight.exp_avg" in leaves
    return changed, again, bits([second.state_dict(), its_optimizer.state_dict()]) == expected, named


def renamed_under_ddp(rank: int, folder: Path) -> Any:
    return _renamed(folder, DistributedDataParallel)


def renamed_under_fsdp(rank: int, folder: Path) -> Any:
    return _renamed(folder, lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (2,))))


# Optimizers with a layout of their own


def _optimizer(folder: Path, make: Any, mode: Any = "async") -> Any:
    def parts() -> tuple[nn.Module, Any, dict[str, Any]]:
        torch.manual_seed(1)
        model = tower()
        optimizer = make(model)
        return model, optimizer, {"model": model, "optimizer": optimizer}

    model, optimizer, state = parts()
    stepped(model, unwrap(optimizer))
    with manager_of(folder, state, mode) as manager:
        manager.save(0)
        stepped(model, unwrap(optimizer))
        manager.save(1, wait=True)
    expected = bits([model.state_dict(), unwrap(optimizer).state_dict()])
    second, its_optimizer, state = parts()
    with manager_of(folder, state) as manager:
        manager.restore()
    return bits([second.state_dict(), unwrap(its_optimizer).state_dict()]) == expected


def a_wrapper_that_is_the_same_on_all_ranks(rank: int, folder: Path) -> Any:
    again = _optimizer(folder, lambda model: Lookahead(torch.optim.AdamW(model.parameters())))
    return again, [scope for name, scope in trees(folder) if name == "optimizer"]


def a_wrapper_that_differs_from_rank_to_rank(rank: int, folder: Path) -> Any:
    def make(model: nn.Module) -> Any:
        optimizer = Lookahead(torch.optim.AdamW(model.parameters()))
        optimizer.counts = (rank, 0.5)
        return optimizer

    return _optimizer(folder, make), [scope for name, scope in trees(folder) if name == "optimizer"]


def a_wrapper_over_sharded_parameters(rank: int, folder: Path) -> Any:
    """Restored before the first step, into the same shards and into a model that is not sharded."""

    def sharded(model: nn.Module) -> Any:
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        return Lookahead(torch.optim.AdamW(model.parameters()))

    again = _optimizer(folder, sharded)
    torch.manual_seed(1)
    model, whole = tower(), tower()
    of_shards, of_whole = sharded(model), Lookahead(torch.optim.AdamW(whole.parameters()))
    for one, optimizer in ((model, of_shards), (whole, of_whole)):
        with manager_of(folder, {"model": one, "optimizer": optimizer}) as manager:
            manager.restore()
    parameters = (list(one.parameters()) for one in (model, whole))
    same = [
        torch.equal(of_shards.state[cut][name].full_tensor(), of_whole.state[full][name])
        for cut, full in zip(*parameters, strict=True)
        for name in ("exp_avg", "exp_avg_sq")
    ]
    return again, all(same), len(same) > 0


def post_local_sgd(rank: int, folder: Path) -> Any:
    def make(model: nn.Module) -> Any:
        averager = PeriodicModelAverager(period=4, warmup_steps=1)
        return PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), averager)

    return _optimizer(folder, make)


def zero_redundancy(rank: int, folder: Path) -> Any:
    model = tower()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    return caught(lambda: manager_of(folder, {"model": model, "optimizer": optimizer}))


def zero_redundancy_part_by_part(rank: int, folder: Path) -> Any:
    def parts() -> tuple[nn.Module, Any, dict[str, Any]]:
        torch.manual_seed(1)
        model = tower()
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
        return model, optimizer, {"model": model, "optimizer": holdfast.PerRank(optimizer.optim)}

    model, optimizer, state = parts()
    stepped(model, optimizer)
    with manager_of(folder, state) as manager:
        manager.save(0)
    second, its_optimizer, state = parts()
    with manager_of(folder, state) as manager:
        manager.restore()
    stepped(model, optimizer)
    stepped(second, its_optimizer)
    return bits(model.state_dict()) == bits(second.state_dict())


# Tensors of wrapper subclasses


def a_quantized_weight_that_all_ranks_have(rank: int, folder: Path) -> Any:
    def model() -> Any:
        torch.manual_seed(3)
        return nn.Sequential(model_with(Scaled.random()), nn.Linear(4, 2))

    first, second = model(), model()
    with manager_of(folder, {"model": first}, "async") as manager:
        manager.save(0)
        manager.save(1, wait=True)
    second[0].weight.codes.zero_()
    with manager_of(folder, {"model": second}) as manager:
        manager.restore()
    leaves = [leaf.name for leaf in holdfast.resolve(folder).manifest.tensors]
    return second[0].weight.parts() == first[0].weight.parts(), leaves.count("model.0.weight.codes")


class ShardedOptimizer8(Optimizer8):
    """Moments of eight bits for parameters that are sharded."""

    kind = Registered

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                local, state = parameter.to_local(), self.state[parameter]
                if "moment" not in state:
                    moment = Registered.random(*local.shape, block=32)
                    mesh, placements = parameter.device_mesh, parameter.placements
                    state["moment"] = DTensor.from_local(
                        moment, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
                    )
                state["moment"]._local_tensor.codes.add_(1)


def _sharded(rows: int) -> tuple[nn.Module, Any, dict[str, Any]]:
    model = fully_shard(nn.Linear(3, rows, bias=False), mesh=init_device_mesh("cpu", (2,)))
    optimizer = ShardedOptimizer8(model.parameters())
    return model, optimizer, {"model": model, "optimizer": optimizer}


def sharded_moments_of_a_subclass(rank: int, folder: Path) -> Any:
    model, optimizer, state = _sharded(8)
    torch.manual_seed(rank)
    optimizer.step()
    with manager_of(folder, state, "async") as manager:
        manager.save(0)
        optimizer.step()
        manager.save(1, wait=True)
    expected = optimizer.state[model.weight]["moment"]._local_tensor.parts()
    results = []
    for stepped_before in (False, True):
        second, its_optimizer, state = _sharded(8)
        if stepped_before:
            its_optimizer.step()
        with manager_of(folder, state) as manager:
            manager.restore()
        moment = its_optimizer.state[second.weight]["moment"]
        results.append((tuple(moment.shape), moment._local_tensor.parts() == expected))
    return results


def sharded_moments_in_unequal_pieces(rank: int, folder: Path) -> Any:
    _, optimizer, state = _sharded(7)
    optimizer.step()
    return caught(lambda: manager_of(folder, state))


class ScaledAsAWhole(Scaled):
    """Codes with one scale for all of them, which is a scalar."""

    @classmethod
    def random(cls, rows: int = 4, columns: int = 3, block: Any = None) -> ScaledAsAWhole:
        whole = super().random(rows, columns, block)
        return cls(whole.codes, torch.tensor(2.0), whole.block)


def _model_with_sharded(local: Any, placement: Any, shape: tuple[int, int]) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    model = nn.Linear(1, 1)
    model.register_buffer(
        "mask", DTensor.from_local(local, mesh, [placement], run_check=False, shape=shape, stride=(shape[1], 1))
    )
    return {"model": model}


def a_weight_of_a_subclass_along_its_second_dimension(rank: int, folder: Path) -> Any:
    state = _model_with_sharded(Scaled.random(4, 3), Shard(1), (4, 6))
    return caught(lambda: manager_of(folder, state))


def a_weight_of_a_subclass_with_a_scalar(rank: int, folder: Path) -> Any:
    state = _model_with_sharded(ScaledAsAWhole.random(4, 3), Shard(0), (8, 3))
    return caught(lambda: manager_of(folder, state))


SCENES = [
    a_quantized_weight_that_all_ranks_have,
    sharded_moments_of_a_subclass,
    sharded_moments_in_unequal_pieces,
    a_weight_of_a_subclass_along_its_second_dimension,
    a_weight_of_a_subclass_with_a_scalar,
    a_wrapper_that_is_the_same_on_all_ranks,
    a_wrapper_that_differs_from_rank_to_rank,
    a_wrapper_over_sharded_parameters,
    post_local_sgd,
    zero_redundancy,
    zero_redundancy_part_by_part,
    metrics_beside_a_model,
    metrics_beside_a_model_in_the_background,
    renamed_under_ddp,
    renamed_under_fsdp,
]


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Play:
    return run_scenes(2, SCENES, tmp_path_factory.mktemp("odd"))


@pytest.mark.parametrize("scene", [metrics_beside_a_model, metrics_beside_a_model_in_the_background])
def test_modules_without_persistent_state_are_saved_by_all_ranks(play: Play, scene: Any) -> None:
    assert play(scene.__name__) == [("model", "metric", "mine", "adapter", "loss")] * 2


@pytest.mark.parametrize("scene", [renamed_under_ddp, renamed_under_fsdp])
def test_keys_that_hooks_rename_come_back_on_all_ranks(play: Play, scene: Any) -> None:
    assert play(scene.__name__) == [(True, True, True, True)] * 2


def test_an_optimizer_with_a_layout_of_its_own_is_stored_once_or_for_each_rank(play: Play) -> None:
    assert play("a_wrapper_that_is_the_same_on_all_ranks") == [(True, [""])] * 2
    assert play("a_wrapper_that_differs_from_rank_to_rank") == [(True, ["rank-00000", "rank-00001"])] * 2


@pytest.mark.guarantee("G8")
def test_an_optimizer_with_a_layout_of_its_own_over_shards_is_restored_before_its_first_step(play: Play) -> None:
    assert play("a_wrapper_over_sharded_parameters") == [(True, True, True)] * 2


def test_optimizers_of_torch_distributed_resume_exactly_or_are_refused_with_the_way_out(play: Play) -> None:
    assert play("post_local_sgd") == [True, True]
    assert "PerRank(optimizer.optim)" in str(the_same_error(play("zero_redundancy")))
    assert play("zero_redundancy_part_by_part") == [True, True]


@pytest.mark.guarantee("G2")
def test_a_tensor_of_a_subclass_is_stored_once_and_comes_back_on_all_ranks(play: Play) -> None:
    assert play("a_quantized_weight_that_all_ranks_have") == [(True, 1)] * 2


@pytest.mark.guarantee("G8")
def test_sharded_state_of_a_subclass_comes_back_into_new_and_into_live_memory(play: Play) -> None:
    assert play("sharded_moments_of_a_subclass") == [[((8, 3), True), ((8, 3), True)]] * 2


@pytest.mark.parametrize(
    ("scene", "leaf", "reason"),
    [
        (sharded_moments_in_unequal_pieces, "optimizer.state.weight.moment", "length 7 in 2 unequal shards"),
        (a_weight_of_a_subclass_along_its_second_dimension, "model.mask", "sharded as Shard(dim=1)"),
        (a_weight_of_a_subclass_with_a_scalar, "model.mask", "the inner tensor 'scale' is a scalar"),
    ],
)
def test_a_subclass_whose_shards_cannot_be_joined_is_refused_when_the_manager_is_built(
    play: Play, scene: Any, leaf: str, reason: str
) -> None:
    error = the_same_error(play(scene.__name__))
    assert isinstance(error, holdfast.UsageError)
    assert leaf in str(error)
    assert reason in str(error)
    assert "equal pieces" in str(error)
