"""Replicas that are none: what ranks hold under one name and should be the same, and is not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import holdfast
from holdfast.errors import UsageError
from tests.distributed.scenes import Holder, Play, bits, caught, meet, run_scenes, the_same_error, trees

TIMEOUT_SECONDS = 200.0
SAMPLED_LEAVES = 64


def manager_of(run: Path, state: dict[str, Any], **options: Any) -> holdfast.CheckpointManager:
    options = {"mode": "sync", **options}
    return holdfast.CheckpointManager(run, state, rng=False, timeout=TIMEOUT_SECONDS, **options)


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 2))


def step_once(model: nn.Module, optimizer: torch.optim.Optimizer, scale: float = 1.0) -> None:
    for index, parameter in enumerate(model.parameters()):
        parameter.grad = torch.full_like(parameter, 0.1 * scale * (index + 1))
    optimizer.step()
    optimizer.zero_grad()


def add_one_bit(tensor: torch.Tensor) -> None:
    """Change the last element by the smallest step that there is."""
    with torch.no_grad():
        flat = tensor.view(-1)
        flat[-1] = torch.nextafter(flat[-1], torch.tensor(1e30))


# Two ranks


def a_drifted_replica(rank: int, folder: Path) -> Any:
    model = DistributedDataParallel(net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step_once(model, optimizer)
    if rank == 1:
        add_one_bit(model.module[2].weight)
        add_one_bit(model.module[2].bias)
    manager = manager_of(folder, {"model": model, "optimizer": optimizer})
    error = caught(lambda: manager.save(1))
    meet("looked")
    again = caught(lambda: manager.save(1))
    written = list(folder.glob("**/*.safetensors"))
    dist.broadcast(model.module[2].weight.data, 0)
    dist.broadcast(model.module[2].bias.data, 0)
    return error, again, written, manager.save(1).wait().step


def moments_that_differ(rank: int, folder: Path) -> Any:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    step_once(model, optimizer, scale=1.0 + rank)
    return caught(lambda: manager_of(folder, {"model": model, "optimizer": optimizer}).save(1))


def bits_count_and_not_values(rank: int, folder: Path) -> Any:
    same, zero = nn.Linear(2, 2), nn.Linear(2, 2)
    with torch.no_grad():
        for parameter in (*same.parameters(), *zero.parameters()):
            parameter.zero_()
        same.weight.fill_(float("nan"))
        if rank == 1:
            zero.weight.neg_()
    fine = manager_of(folder / "same", {"model": same}).save(1).wait().step
    return fine, caught(lambda: manager_of(folder / "zero", {"model": zero}).save(1))


def shards_that_nobody_declared(rank: int, folder: Path) -> Any:
    """Column and row parallel layers as plain local tensors, as Megatron has them."""
    torch.manual_seed(7 + rank)
    return caught(lambda: manager_of(folder, {"model": nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 4))}).save(1))


def replicas_that_are_trusted(rank: int, folder: Path) -> Any:
    manager = manager_of(folder, {"model": net(seed=rank)}, replicas="trust")
    return manager.save(1).wait().step


def ranks_that_disagree_about_trust(rank: int, folder: Path) -> Any:
    return caught(lambda: manager_of(folder, {"model": net()}, replicas=("compare", "trust")[rank]))


class Many(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(count))


def drift_that_begins_later(rank: int, folder: Path, mode: str = "sync") -> Any:
    """How many saves pass before it is noticed, for a drift in each of some leaves."""
    seen = []
    for leaf in (0, 70, 149):
        model = Many(150)
        manager = manager_of(folder / str(leaf), {"model": model}, mode=mode)
        for step in range(2):
            manager.save(step).wait()
        if rank == 1:
            add_one_bit(model.parts[leaf])
        errors = []
        for step in range(2, 12):
            error = caught(lambda step=step, manager=manager: manager.save(step).wait())
            errors.append(error)
            if error is not None:
                break
        errors.append(caught(lambda manager=manager: manager.save(12).wait()))
        manager.close()
        seen.append((leaf, errors[:-2], errors[-2], errors[-1]))
    return seen


def drift_that_begins_later_behind_the_training(rank: int, folder: Path) -> Any:
    return drift_that_begins_later(rank, folder, mode="async")


def drift_in_a_window_of_a_large_leaf(rank: int, folder: Path) -> Any:
    """A large leaf is looked at window by window: the last element is reached, too."""
    model = nn.Linear(1, 40_000, bias=False)
    nn.init.ones_(model.weight)
    manager = manager_of(folder, {"model": model})
    manager.save(0)
    if rank == 1:
        add_one_bit(model.weight)
    for step in range(1, 12):
        error = caught(lambda step=step: manager.save(step))
        if error is not None:
            return step, error
    return None, None


class Half(nn.Module):
    def __init__(self, rank: int) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.common = nn.Linear(3, 3)
        torch.manual_seed(rank)
        self.own = nn.ModuleDict({f"rank{rank}": nn.Linear(3, 3)})


def parts_that_only_one_rank_holds(rank: int, folder: Path) -> Any:
    """The plan is made anew at each save here, and what both hold is still compared, also later."""
    model = Half(rank)
    manager = manager_of(folder, {"model": model})
    fine = [manager.save(step).wait().step for step in range(3)]
    if rank == 1:
        add_one_bit(model.common.weight)
    return fine, caught(lambda: manager.save(3))


def a_model_per_rank_and_its_optimizer(rank: int, folder: Path) -> Any:
    def build(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        model = net(seed).to(torch.bfloat16)
        return model, torch.optim.AdamW(model.parameters(), lr=0.1)

    def state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        return {"model": holdfast.PerRank(model), "optimizer": optimizer}

    model, optimizer = build(10 + rank)
    step_once(model, optimizer, scale=1.0 + rank)
    for moments in optimizer.state.values():
        # Wider than the parameters, as mixed precision keeps them.
        moments["exp_avg"] = torch.randn(moments["exp_avg"].shape)
    manager_of(folder, state(model, optimizer)).save(1)
    other, second = build(50)
    restored = manager_of(folder, state(other, second)).restore().restored
    exact = bits([model.state_dict(), optimizer.state_dict()]) == bits([other.state_dict(), second.state_dict()])
    return exact, restored


def a_shared_model_and_its_optimizer(rank: int, folder: Path) -> Any:
    """On the user's word the leader's state counts: all of it, and the optimizer's as well."""
    model = net(rank)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step_once(model, optimizer, scale=1.0 + rank)
    state = {"model": holdfast.Shared(model), "optimizer": optimizer}
    before = bits([model.state_dict(), optimizer.state_dict()])
    manager_of(folder, state).save(1)
    manager_of(folder, state).restore()
    return before, bits([model.state_dict(), optimizer.state_dict()])


def an_optimizer_over_models_of_different_scopes(rank: int, folder: Path) -> Any:
    one, other = net(1), net(2)
    both = torch.optim.SGD([*one.parameters(), *other.parameters()], lr=0.1)
    mixed = {"one": holdfast.PerRank(one), "other": other, "optimizer": both}
    shared = {"one": holdfast.PerRank(one), "optimizer": holdfast.Shared(torch.optim.SGD(one.parameters(), lr=0.1))}
    return caught(lambda: manager_of(folder, mixed)), caught(lambda: manager_of(folder, shared))


def moments_that_one_rank_lacks(rank: int, folder: Path) -> Any:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0)
    for index, parameter in enumerate(model.parameters()):
        if rank == 0 or index < 2:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    state = {"model": model, "optimizer": optimizer}
    error = caught(lambda: manager_of(folder / "compared", state).save(1))
    trusted = manager_of(folder / "trusted", state, replicas="trust").save(1).wait().step
    return error, trusted, list(folder.glob("compared/**/*.safetensors"))


def one_moment_that_one_rank_lacks(rank: int, folder: Path) -> Any:
    model = nn.Linear(2, 2, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    step_once(model, optimizer)
    if rank == 1:
        del optimizer.state[model.weight]["exp_avg"]
    return caught(lambda: manager_of(folder, {"model": model, "optimizer": optimizer}).save(1))


def moments_of_other_parameters(rank: int, folder: Path) -> Any:
    """Ranks of a pipeline: each has parameters of its own, with state, and one of both that nobody has stepped."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"shared": nn.Linear(2, 2), f"own_{rank}": nn.Linear(2, 2)})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for parameter in model[f"own_{rank}"].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    return manager_of(folder, {"model": model, "optimizer": optimizer}).save(1).wait().step


class Extra(nn.Module):
    """A module whose extra state is a tensor."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.extra = torch.full((2,), value)

    def get_extra_state(self) -> torch.Tensor:
        return self.extra

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.extra = state


def half_of(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    state[f"{prefix}half"] = state.pop(f"{prefix}weight").clone().half()


def tensors_that_are_no_buffers(rank: int, folder: Path) -> Any:
    renamed = nn.Linear(1, 1, bias=False)
    nn.init.constant_(renamed.weight, rank + 1.0)
    renamed.register_state_dict_post_hook(half_of)
    buffered = nn.BatchNorm1d(2)
    buffered.running_mean.fill_(rank + 1.0)  # type: ignore[union-attr]
    return (
        caught(lambda: manager_of(folder / "extra", {"model": Extra(rank + 1.0)}).save(1)),
        caught(lambda: manager_of(folder / "renamed", {"model": renamed}).save(1)),
        manager_of(folder / "buffered", {"model": DistributedDataParallel(buffered)}).save(1).wait().step,
    )


TWO_RANKS = [
    moments_that_one_rank_lacks,
    one_moment_that_one_rank_lacks,
    moments_of_other_parameters,
    tensors_that_are_no_buffers,
    a_drifted_replica,
    moments_that_differ,
    bits_count_and_not_values,
    shards_that_nobody_declared,
    replicas_that_are_trusted,
    ranks_that_disagree_about_trust,
    drift_that_begins_later,
    drift_that_begins_later_behind_the_training,
    drift_in_a_window_of_a_large_leaf,
    parts_that_only_one_rank_holds,
    a_model_per_rank_and_its_optimizer,
    a_shared_model_and_its_optimizer,
    an_optimizer_over_models_of_different_scopes,
]


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> tuple[Play, Path]:
    folder = tmp_path_factory.mktemp("two")
    return run_scenes(2, TWO_RANKS, folder), folder


def check_difference(errors: list[Any], leaf: str, count: str) -> UsageError:
    error = the_same_error(errors)
    assert isinstance(error, UsageError)
    assert error.leaf == leaf
    assert count in str(error)
    for way_out in ("PerRank", "pipeline_stage", "Sharded", "replicas='trust'"):
        assert way_out in error.advice
    return error


@pytest.mark.guarantee("G2")
def test_a_drifted_replica_is_an_error_that_names_leaf_and_ranks_until_it_is_mended(
    two: tuple[Play, Path],
) -> None:
    seen = two[0]("a_drifted_replica")
    error = check_difference([first for first, *_ in seen], "model.2.weight", "2 of 24 replicated leaves differ")
    assert "rank 0" in error.problem
    assert "rank 1" in error.problem
    check_difference([again for _, again, *_ in seen], "model.2.weight", "2 of 24")
    assert [written for _, _, written, _ in seen] == [[], []], "nothing is written before the replicas are compared"
    assert [step for *_, step in seen] == [1, 1]


@pytest.mark.guarantee("G2")
def test_moments_that_differ_are_an_error_also_where_the_weights_are_the_same(two: tuple[Play, Path]) -> None:
    check_difference(two[0]("moments_that_differ"), "optimizer.state.0.weight.exp_avg", "12 of 24")


@pytest.mark.guarantee("G2")
def test_optimizer_state_that_one_replica_lacks_is_an_error_unless_replicas_are_trusted(two: tuple[Play, Path]) -> None:
    seen = two[0]("moments_that_one_rank_lacks")
    error = the_same_error([first for first, *_ in seen])
    assert isinstance(error, UsageError)
    assert error.leaf == "optimizer.state.1.weight"
    assert "rank 0" in error.problem
    assert "rank 1" in error.problem
    assert "replicas='trust'" in error.advice
    assert [trusted for _, trusted, _ in seen] == [1, 1]
    assert [written for *_, written in seen] == [[], []]


@pytest.mark.guarantee("G2")
def test_a_single_entry_of_optimizer_state_that_one_replica_lacks_is_an_error(two: tuple[Play, Path]) -> None:
    error = the_same_error(two[0]("one_moment_that_one_rank_lacks"))
    assert isinstance(error, UsageError)
    assert error.leaf == "optimizer.state.weight.exp_avg"


def test_optimizer_state_of_parameters_that_another_rank_does_not_have_is_no_difference(two: tuple[Play, Path]) -> None:
    assert two[0]("moments_of_other_parameters") == [1, 1]


@pytest.mark.guarantee("G2")
def test_extra_states_and_tensors_that_a_hook_made_are_compared_and_buffers_are_not(two: tuple[Play, Path]) -> None:
    seen = two[0]("tensors_that_are_no_buffers")
    check_difference([extra for extra, *_ in seen], "model._extra_state", "1 of 2 replicated leaves differ")
    check_difference([renamed for _, renamed, _ in seen], "model.half", "1 of 1 replicated leaves differ")
    assert [step for *_, step in seen] == [1, 1]


def test_replicas_are_compared_by_their_bits(two: tuple[Play, Path]) -> None:
    seen = two[0]("bits_count_and_not_values")
    assert [fine for fine, _ in seen] == [1, 1], "NaN is the same as NaN with the same bits"
    check_difference([error for _, error in seen], "model.weight", "1 of 2")


@pytest.mark.guarantee("G2")
def test_local_shards_that_nobody_declared_are_an_error(two: tuple[Play, Path]) -> None:
    check_difference(two[0]("shards_that_nobody_declared"), "model.0.weight", "4 of 4")


def test_trusted_replicas_are_not_compared(two: tuple[Play, Path]) -> None:
    assert two[0]("replicas_that_are_trusted") == [1, 1]


def test_all_ranks_compare_or_none(two: tuple[Play, Path]) -> None:
    error = the_same_error(two[0]("ranks_that_disagree_about_trust"))
    assert "replicas" in str(error)


@pytest.mark.guarantee("G2")
@pytest.mark.parametrize("scene", ["drift_that_begins_later", "drift_that_begins_later_behind_the_training"])
def test_a_drift_that_begins_later_is_found_when_its_leaf_comes_round(two: tuple[Play, Path], scene: str) -> None:
    first, second = two[0](scene)
    rounds = -(-150 // SAMPLED_LEAVES)
    for (leaf, before, error, after), (_, _, other, other_after) in zip(first, second, strict=True):
        assert before == [None] * len(before)
        assert len(before) < rounds, f"leaf {leaf} was not looked at within {rounds} saves"
        check_difference([error, other], f"model.parts.{leaf}", "1 of 150")
        # Once a difference is known, no save goes through before it is gone.
        check_difference([after, other_after], f"model.parts.{leaf}", "1 of 150")


def test_every_window_of_a_large_leaf_comes_round(two: tuple[Play, Path]) -> None:
    seen = two[0]("drift_in_a_window_of_a_large_leaf")
    check_difference([error for _, error in seen], "model.weight", "1 of 1")
    assert seen[0][0] > 1, "the drift is in the last window, not in the first"


def test_what_several_ranks_hold_is_compared_also_where_others_hold_parts_of_their_own(two: tuple[Play, Path]) -> None:
    seen = two[0]("parts_that_only_one_rank_holds")
    assert [fine for fine, _ in seen] == [[0, 1, 2]] * 2
    check_difference([error for _, error in seen], "model.common.weight", "1 of 2")


@pytest.mark.guarantee("G8")
def test_the_optimizer_of_a_model_per_rank_is_stored_per_rank_bit_for_bit(two: tuple[Play, Path]) -> None:
    play, folder = two
    seen = play("a_model_per_rank_and_its_optimizer")
    assert [exact for exact, _ in seen] == [True, True]
    assert seen[0][1] == ("model", "optimizer")
    scopes = ("rank-00000", "rank-00001")
    stored = trees(folder / "a_model_per_rank_and_its_optimizer")
    assert stored == [(name, scope) for name in ("model", "optimizer") for scope in scopes]


def test_of_a_shared_model_and_its_optimizer_the_leaders_state_is_stored(two: tuple[Play, Path]) -> None:
    (leaders, first), (others, second) = two[0]("a_shared_model_and_its_optimizer")
    assert leaders != others
    assert first == leaders
    assert second == leaders


def test_an_optimizer_whose_models_have_different_scopes_is_refused_when_the_manager_is_built(
    two: tuple[Play, Path],
) -> None:
    seen = two[0]("an_optimizer_over_models_of_different_scopes")
    for errors in zip(*seen, strict=True):
        error = the_same_error(errors)
        assert isinstance(error, UsageError)
        assert error.component == "optimizer"
        assert "'one'" in str(error)


# Four ranks


def a_forgotten_pipeline_stage(rank: int, folder: Path) -> Any:
    """Two stages with the same names and, so far, the same content, each sharded over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    model = net()
    fully_shard(model, mesh=mesh["dp"])
    error = caught(lambda: manager_of(folder, {"model": model}).save(1))
    meet("looked")
    stage = mesh["pp"].get_local_rank()
    return error, folder.exists(), manager_of(folder, {"model": model}, pipeline_stage=stage).save(1).wait().step


def one_drifted_replica_of_a_hybrid_mesh(rank: int, folder: Path) -> Any:
    """Rows over two ranks, and two replicas of each."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = net()
    fully_shard(model, mesh=mesh)
    fine = manager_of(folder / "fine", {"model": model}).save(1).wait().step
    if rank == 3:
        add_one_bit(model[0].weight.to_local())
    return fine, caught(lambda: manager_of(folder / "drifted", {"model": model}).save(1))


def a_loader_per_group_is_on_the_users_word(rank: int, folder: Path) -> Any:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    loader = Holder(order=torch.arange(4) + rank)
    return manager_of(folder, {"loader": holdfast.PerRank(loader, group=mesh["dp"])}).save(1).wait().step


FOUR_RANKS = [
    a_forgotten_pipeline_stage,
    one_drifted_replica_of_a_hybrid_mesh,
    a_loader_per_group_is_on_the_users_word,
]


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Play:
    return run_scenes(4, FOUR_RANKS, tmp_path_factory.mktemp("four"))


@pytest.mark.guarantee("G2")
def test_one_name_on_two_meshes_is_an_error_before_anything_is_compared(four: Play) -> None:
    seen = four("a_forgotten_pipeline_stage")
    error = the_same_error([error for error, *_ in seen])
    assert isinstance(error, UsageError)
    assert error.leaf == "model.0.weight"
    assert "ranks 0, 1" in error.problem
    assert "ranks 2, 3" in error.problem
    assert "pipeline_stage" in error.advice
    assert "PerRank" in error.advice
    assert not any(exists for _, exists, _ in seen)
    assert [step for *_, step in seen] == [1] * 4


@pytest.mark.guarantee("G2")
def test_a_drifted_replica_of_a_sharded_leaf_is_found(four: Play) -> None:
    seen = four("one_drifted_replica_of_a_hybrid_mesh")
    assert [fine for fine, _ in seen] == [1] * 4
    error = check_difference([error for _, error in seen], "model.0.weight", "1 of")
    assert "rank 1" in error.problem
    assert "rank 3" in error.problem


def test_state_that_a_user_declared_the_same_is_not_compared(four: Play) -> None:
    assert four("a_loader_per_group_is_on_the_users_word") == [1] * 4
