"""Holdfast's strategies inside of megatron-core's own save and load: on other layouts, with damage, with refusals."""

from __future__ import annotations

import json
import pathlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("megatron.core", reason="megatron-core is not installed; `make frameworks` has it")

import megatron.core
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies.base import default_strategies
from megatron.core.dist_checkpointing.strategies.fully_parallel import (
    FullyParallelSaveStrategyWrapper,
)
from megatron.core.dist_checkpointing.validation import StrictHandling
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.transformer_config import TransformerConfig

import holdfast
from holdfast.integrations.megatron import (
    HoldfastCommonLoadStrategy,
    HoldfastLoadStrategy,
    HoldfastSaveStrategy,
    register,
)
from holdfast.testing import values
from tests.ranks import run_ranks

pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.slow,
]


@pytest.fixture
def alone() -> Iterator[None]:
    """A process group of this process alone: megatron-core asks for one everywhere."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "iter_0000500"
    made.mkdir()
    return made


def state_of(value: float = 1.0, **common: Any) -> dict[str, Any]:
    weight = torch.full((4, 2), value)
    return {"weight": ShardedTensor.from_rank_offsets("weight", weight), "iteration": 500, **common}


def save(folder: Path, state: dict[str, Any], run: Path | None = None) -> None:
    folder.mkdir(exist_ok=True)
    dist_checkpointing.save(state, str(folder), sharded_strategy=HoldfastSaveStrategy(run))


def load(folder: Path, state: dict[str, Any], run: Path | None = None, **options: Any) -> Any:
    strategy = HoldfastLoadStrategy(run, **options)
    return dist_checkpointing.load(state, str(folder), sharded_strategy=strategy)


def flip(file: Path, place: int = -1) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 1
    file.write_bytes(content)


# Layouts


def gpt(seed: int) -> GPTModel:
    """Megatron's own model, of which this rank has the shard of its tensor parallel rank. The MLP is gated: its two
    halves are cut apart, which no plain cut along one dimension gets right."""
    torch.manual_seed(seed)
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        gated_linear_unit=True,
        use_cpu_initialization=True,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=32, max_sequence_length=8)


def weights_of(model: GPTModel) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items() if value is not None}


def same(ours: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    return ours.keys() == others.keys() and all(torch.equal(ours[name], others[name]) for name in ours)


def make(rank: int, folder: Path) -> str:
    if rank == 0:
        folder.mkdir(parents=True)
    dist.barrier()
    return str(folder)


def save_gpt(rank: int, folder: Path) -> dict[str, torch.Tensor]:
    model = gpt(seed=0)
    own = ShardedObject("rng_state", {"rank": rank, "words": torch.arange(3)}, (dist.get_world_size(),), (rank,))
    state = {"model": model.sharded_state_dict(), "rng": own, "iteration": 500}
    dist_checkpointing.save(state, make(rank, folder), sharded_strategy=HoldfastSaveStrategy())
    return weights_of(model)


def load_gpt(rank: int, folder: Path, *, with_rng: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
    model = gpt(seed=1)
    state: dict[str, Any] = {"model": model.sharded_state_dict()}
    if with_rng:
        state["rng"] = ShardedObject("rng_state", None, (dist.get_world_size(),), (rank,))
    found = dist_checkpointing.load(state, str(folder), sharded_strategy=HoldfastLoadStrategy())
    model.load_state_dict(found["model"])
    return found.get("rng"), weights_of(model)


def save_and_load_shared_out(rank: int, folder: Path) -> list[float]:
    """Two data parallel ranks, whose replicas megatron-core's wrappers share out among them."""

    def state(value: float) -> dict[str, Any]:
        return {
            name: ShardedTensor.from_rank_offsets(name, torch.full((4,), value), replica_id=rank) for name in "abcd"
        }

    saving = FullyParallelSaveStrategyWrapper(HoldfastSaveStrategy(), dist.group.WORLD)
    dist_checkpointing.save(state(3.0), make(rank, folder), sharded_strategy=saving)
    found = dist_checkpointing.load(state(0.0), str(folder), sharded_strategy=HoldfastLoadStrategy())
    return [tensor.sum().item() for tensor in found.values()]


def half_of(rank: int, tensor: torch.Tensor) -> dict[str, Any]:
    return {"weight": ShardedTensor.from_rank_offsets("weight", tensor, (0, rank, 2))}


def two_ranks_first(rank: int, scratch: Path) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(2)
    dist_checkpointing.save(
        half_of(rank, torch.ones(2, 2)),
        make(rank, scratch / "damaged" / "iter_0000500"),
        sharded_strategy=HoldfastSaveStrategy(),
    )
    return {
        "saved": save_gpt(rank, scratch / "two" / "iter_0000500"),
        "loaded": load_gpt(rank, scratch / "two" / "iter_0000500", with_rng=True),
        "shared out": save_and_load_shared_out(rank, scratch / "shared" / "iter_0000001"),
    }


def one_rank_between(rank: int, scratch: Path) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(1)
    return {
        "joined": load_gpt(rank, scratch / "two" / "iter_0000500")[1],
        "whole": save_gpt(rank, scratch / "one" / "iter_0000500"),
    }


def two_ranks_last(rank: int, scratch: Path) -> dict[str, Any]:
    parallel_state.initialize_model_parallel(2)
    half, problem = torch.zeros(2, 2), "none"
    try:
        load(scratch / "damaged" / "iter_0000500", half_of(rank, half))
    except holdfast.CorruptCheckpointError as error:
        problem = str(error)
    return {
        "cut": load_gpt(rank, scratch / "one" / "iter_0000500")[1],
        "problem": problem,
        "half": half.sum().item(),
    }


@dataclass(frozen=True)
class Played:
    """What the ranks returned. They save and load all there is in three starts: each takes seconds to import."""

    scratch: Path
    first: list[dict[str, Any]]
    between: dict[str, Any]
    last: list[dict[str, Any]]


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    scratch = tmp_path_factory.mktemp("layouts")
    first = values(run_ranks(2, two_ranks_first, scratch))
    [between] = values(run_ranks(1, one_rank_between, scratch))
    flip(scratch / "damaged" / "iter_0000500" / "holdfast" / "step-000000500" / "rank-00001.safetensors")
    return Played(scratch, first, between, values(run_ranks(2, two_ranks_last, scratch)))


def test_two_tensor_parallel_ranks_get_back_their_shards_and_their_own_objects(played: Played) -> None:
    for rank, found in enumerate(played.first):
        own, weights = found["loaded"]
        assert own["rank"] == rank
        assert own["words"].tolist() == [0, 1, 2]
        assert same(weights, found["saved"])
    run = played.scratch / "two" / "iter_0000500" / "holdfast"
    assert holdfast.resolve(run).step == 500
    assert holdfast.verify(run).ok


def test_a_model_of_two_tensor_parallel_ranks_is_loaded_by_one_and_back(played: Played) -> None:
    # Megatron makes the same whole weights of a seed on any number of ranks, and cuts them: so all four agree.
    assert same(played.between["joined"], played.between["whole"])
    for first, last in zip(played.first, played.last, strict=True):
        assert same(last["cut"], first["saved"])


def test_the_wrapper_that_shares_a_save_out_among_replicas_is_kept(played: Played) -> None:
    assert [found["shared out"] for found in played.first] == [[12.0] * 4] * 2
    manifest = holdfast.resolve(played.scratch / "shared" / "iter_0000001" / "holdfast").manifest
    writers = {chunk.file for leaf in manifest.tensors for chunk in leaf.chunks}
    assert writers == {"rank-00000.safetensors", "rank-00001.safetensors"}


def test_damage_in_one_ranks_shard_is_an_error_on_both_and_changes_no_tensor(played: Played) -> None:
    for found in played.last:
        assert "rank-00001.safetensors" in found["problem"]
        assert found["half"] == 0


# One process


@pytest.mark.usefixtures("alone")
def test_the_common_state_comes_back_and_a_changed_file_of_it_is_found(folder: Path) -> None:
    save(folder, state_of(args={"lr": 0.1}, betas=(0.9, 0.99)))
    found = load(folder, state_of(0.0))
    assert (found["iteration"], found["args"], found["betas"]) == (500, {"lr": 0.1}, (0.9, 0.99))
    torch.save({"iteration": 400}, folder / "common.pt")
    with pytest.raises(holdfast.CorruptCheckpointError, match="of another save"):
        load(folder, state_of(0.0))
    common = HoldfastCommonLoadStrategy()
    assert common.load_common(folder)["iteration"] == 500
    (folder / "common.pt").unlink()
    found = dist_checkpointing.load(
        state_of(0.0), str(folder), sharded_strategy=HoldfastLoadStrategy(), common_strategy=common
    )
    assert (found["iteration"], found["weight"].sum().item()) == (500, 8.0)


@pytest.mark.usefixtures("alone")
def test_damage_in_the_copy_of_the_common_state_is_found_before_it_is_unpickled(folder: Path) -> None:
    save(folder, state_of())
    file = folder / "holdfast" / "step-000000500" / "shared.json"
    flip(file, len(file.read_bytes()) // 2)
    with pytest.raises(holdfast.CorruptCheckpointError, match=r"shared\.json"):
        HoldfastCommonLoadStrategy().load_common(folder)


@pytest.mark.usefixtures("alone")
def test_a_folder_that_is_saved_to_again_has_the_later_state(folder: Path) -> None:
    for value in (1.0, 2.0):
        save(folder, state_of(value))
    assert load(folder, state_of(0.0))["weight"].sum().item() == 16.0


@pytest.mark.usefixtures("alone")
def test_a_later_attempt_of_an_iteration_that_did_not_commit_is_not_taken_for_the_earlier_one(folder: Path) -> None:
    """Megatron has overwritten common.pt, and the process died before the checkpoint was committed."""
    save(folder, state_of(loss=1.0))
    torch.save({"iteration": 500, "loss": 2.0}, folder / "common.pt")
    with pytest.raises(holdfast.CorruptCheckpointError, match="of another save"):
        load(folder, state_of(0.0))


@pytest.mark.usefixtures("alone")
def test_one_run_has_the_checkpoints_of_all_folders(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for iteration in (100, 200):
        save(tmp_path / f"iter_{iteration:07d}", state_of(float(iteration)), run)
    assert [found.step for found in holdfast.checkpoints(run)] == [200, 100]
    found = load(tmp_path / "iter_0000100", state_of(0.0), run)
    assert found["weight"][0, 0].item() == 100.0
    holdfast.prune(run, holdfast.KeepLast(1))
    with pytest.raises(holdfast.CheckpointNotFoundError):
        load(tmp_path / "iter_0000100", state_of(0.0), run)
    with pytest.raises(holdfast.UsageError, match="'release' has no iteration in its name"):
        save(tmp_path / "release", state_of(), run)


@pytest.mark.usefixtures("alone")
def test_missing_and_unexpected_keys_are_returned_as_megatron_asks(folder: Path) -> None:
    objects = ShardedObject("objects", {"a": 1}, (1,), (0,))
    save(folder, {**state_of(), "objects": objects})
    wanted = state_of(0.0)
    wanted["new"] = ShardedTensor.from_rank_offsets("new", torch.zeros(2))
    _, missing, unexpected = dist_checkpointing.load(
        wanted, str(folder), sharded_strategy=HoldfastLoadStrategy(), strict=StrictHandling.RETURN_ALL
    )
    assert (missing, unexpected) == ({"objects"}, {"new"})


@pytest.mark.usefixtures("alone")
def test_a_tensor_that_is_missing_or_of_another_shape_is_an_error(folder: Path) -> None:
    save(folder, state_of())
    with pytest.raises(KeyError, match="new from model not in state dict"):
        load(folder, {"new": ShardedTensor.from_rank_offsets("new", torch.zeros(2))})
    with pytest.raises(CheckpointingException, match="Global shape mismatch"):
        load(folder, {"weight": ShardedTensor.from_rank_offsets("weight", torch.zeros(2, 2))})


@dataclass
class Secret:
    word: str


@pytest.mark.usefixtures("alone")
def test_a_class_inside_of_an_object_is_read_only_if_it_is_allowed(folder: Path) -> None:
    save(folder, {"own": ShardedObject("own", Secret("sesame"), (1,), (0,)), "weight": state_of()["weight"]})
    wanted = {"own": ShardedObject("own", None, (1,), (0,))}
    with pytest.raises(holdfast.UnsafeContentError, match=r"'own/shard_0_1'.*allowed_types="):
        load(folder, wanted)
    assert load(folder, wanted, allowed_types=(Secret,))["own"] == Secret("sesame")


@pytest.mark.usefixtures("alone")
def test_megatron_finds_the_strategies_by_the_name_of_the_backend(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for action in default_strategies:
        monkeypatch.setitem(default_strategies, action, dict(default_strategies[action]))
    register()
    dist_checkpointing.save(state_of(3.0), str(folder), sharded_strategy=("holdfast", 1))
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "holdfast"
    assert dist_checkpointing.load(state_of(0.0), str(folder))["weight"].sum().item() == 24.0


@pytest.mark.usefixtures("alone")
def test_what_another_backend_saved_and_what_cannot_be_done_is_refused(folder: Path) -> None:
    with pytest.raises(CheckpointingException, match="Cannot apply async_save"):
        dist_checkpointing.save(
            state_of(), str(folder), sharded_strategy=HoldfastSaveStrategy(), async_sharded_save=True
        )
    with pytest.raises(holdfast.UsageError, match=r"has no common\.pt"):
        HoldfastSaveStrategy().save({}, pathlib.Path(folder.parent))
    save(folder, state_of())
    with pytest.raises(holdfast.UsageError, match="never changes"):
        HoldfastLoadStrategy().remove_sharded_tensors(folder, "weight")
    metadata = json.loads((folder / "metadata.json").read_text())
    for field, value, problem in (
        ("sharded_backend_version", 2, "has version 2"),
        ("sharded_backend", "torch_dist", "saved by the backend 'torch_dist'"),
    ):
        (folder / "metadata.json").write_text(json.dumps({**metadata, field: value}))
        with pytest.raises(CheckpointingException, match=problem):
            load(folder, state_of())


def test_another_version_of_megatron_core_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(megatron.core, "__version__", "0.17.0")
    for kind in (HoldfastSaveStrategy, HoldfastLoadStrategy, HoldfastCommonLoadStrategy):
        with pytest.raises(holdfast.UsageError, match=r"megatron-core 0\.17\.0 is installed.*tested with 0\.16"):
            kind()
