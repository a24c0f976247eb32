"""The manager that Megatron-Bridge's config names, inside of a stand-in for Bridge's factory and training loop."""

from __future__ import annotations

import logging
import random
import resource
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import holdfast
from holdfast.integrations.megatron_bridge import MegatronBridgeManager
from holdfast.testing import values
from tests.integrations import bridge
from tests.leftovers import writers
from tests.ranks import run_ranks

TRACKER = "latest_checkpointed_iteration.txt"


def steps_of(run: Path | str) -> list[int]:
    return [found.step for found in holdfast.checkpoints(run)]


def same(ours: Any, others: Any) -> bool:
    if isinstance(ours, torch.Tensor):
        return torch.equal(ours, others)
    if isinstance(ours, dict):
        return ours.keys() == others.keys() and all(same(ours[name], others[name]) for name in ours)
    if isinstance(ours, list | tuple):
        return len(ours) == len(others) and all(map(same, ours, others))
    return bool(ours == others)


def everything(made: bridge.Setup) -> dict[str, Any]:
    return {
        "weights": made.weights(),
        "optimizer": made.optimizer.state_dict(),
        "scheduler": made.scheduler.state_dict(),
        "train state": asdict(made.state.train_state),
        "next numbers": torch.rand(3),
    }


# Resuming


def run_through(rank: int, folder: Path, kill: tuple[int, int] | None, is_async: bool) -> Any:
    """Train to the end; with `kill`, this rank dies at an iteration."""
    kill_at = kill[1] if kill is not None and kill[0] == rank else None
    cfg = bridge.config(folder, async_save=is_async)
    # Another seed at each start: what is not restored is not right by chance.
    made, losses = bridge.pretrain(cfg, seed=0 if not (folder / "run.json").exists() else 99, kill_at=kill_at)
    return {**everything(made), "losses": losses, "loaded": made.loaded}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_that_is_killed_at_any_iteration_goes_on_as_if_it_never_was(tmp_path: Path, ranks: int) -> None:
    draw = random.Random()
    killed, kill_at = draw.randrange(ranks), draw.randrange(2, 8)
    whole = values(run_ranks(ranks, run_through, tmp_path / "whole", None, True))
    folder = tmp_path / "killed"
    outcomes = run_ranks(ranks, run_through, folder, (killed, kill_at), True)
    assert outcomes[killed].exit_code == -9
    resumed = values(run_ranks(ranks, run_through, folder, None, True))
    for ours, others in zip(resumed, whole, strict=True):
        step, operations = ours["loaded"]
        assert (step, operations) == (kill_at - kill_at % 2, 10**18 * step), f"rank {killed} killed at {kill_at}"
        assert ours["losses"] == {one: loss for one, loss in others["losses"].items() if one > step}
        for name in ("weights", "optimizer", "scheduler", "train state", "next numbers"):
            assert same(ours[name], others[name]), f"{name} differs; rank {killed} was killed at {kill_at}"
    assert sorted(steps_of(folder)) == [2, 4, 6, 8]


@pytest.mark.parametrize("is_async", [False, True], ids=["sync", "async"])
def test_saves_come_by_interval_and_at_the_end_and_the_step_is_the_count_of_iterations(
    tmp_path: Path, is_async: bool
) -> None:
    made, _ = bridge.pretrain(bridge.config(tmp_path, train_iters=5, async_save=is_async))
    assert made.loaded is None
    assert steps_of(tmp_path) == [5, 4, 2]
    assert (tmp_path / TRACKER).read_text() == "5"
    newest = holdfast.resolve(tmp_path)
    assert newest.progress == asdict(made.state.train_state)
    assert newest.progress["floating_point_operations_so_far"] == 5 * 10**18
    assert newest.config["checkpoint"]["save_interval"] == 2
    assert Path(newest.path).name == "step-000000005"
    fired = [event for event, _ in made.callbacks.called]
    assert fired == ["on_checkpoint_save"] * 3


def test_a_save_of_the_same_iteration_at_the_exit_is_written_once(tmp_path: Path) -> None:
    bridge.pretrain(bridge.config(tmp_path, exit_interval=4))
    assert steps_of(tmp_path) == [4, 2]
    made, losses = bridge.pretrain(bridge.config(tmp_path, exit_interval=4))
    assert made.loaded is not None
    assert made.loaded[0] == 4
    assert list(losses) == [5, 6, 7, 8]


def test_most_recent_k_keeps_so_many(tmp_path: Path) -> None:
    bridge.pretrain(bridge.config(tmp_path, most_recent_k=2))
    assert steps_of(tmp_path) == [8, 6]


def test_a_subclass_has_settings_that_bridge_does_not_have(tmp_path: Path) -> None:
    class Manager(MegatronBridgeManager):
        options = {"keep": {"every_steps": 4}, "verify": "quick"}

    manager = Manager(bridge.config(tmp_path).checkpoint)
    made = bridge.build(bridge.config(tmp_path))
    made.manager = manager
    bridge.train(made)
    assert steps_of(tmp_path) == [8, 4]


# What to load


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    bridge.pretrain(bridge.config(tmp_path / "trained"))
    return tmp_path / "trained"


def test_ckpt_step_names_the_iteration(trained: Path) -> None:
    made = bridge.setup(bridge.config(trained, ckpt_step=4), seed=1)
    assert made.loaded == (4, 4 * 10**18)
    assert made.state.train_state.consumed_train_samples == 16
    with pytest.raises(holdfast.CheckpointNotFoundError):
        bridge.setup(bridge.config(trained, ckpt_step=5))


def test_a_resume_from_another_folder_starts_a_line_in_the_one_to_save_to(trained: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    cfg = bridge.config(there, load=str(trained), ckpt_step=6, train_iters=10)
    made, losses = bridge.pretrain(cfg, seed=1)
    assert made.loaded is not None
    assert made.loaded[0] == 6
    assert list(losses) == [7, 8, 9, 10]
    assert steps_of(there) == [10, 8]
    assert steps_of(trained) == [8, 6, 4, 2]


def test_a_finetuning_takes_weights_alone_and_starts_at_iteration_0(trained: Path, tmp_path: Path) -> None:
    source = bridge.setup(bridge.config(trained), seed=1)
    cfg = bridge.config(tmp_path / "tuned", pretrained_checkpoint=str(trained))
    made = bridge.setup(cfg, seed=2)
    assert made.loaded == (0, 0)
    assert cfg.checkpoint.finetune
    assert made.state.train_state == bridge.TrainState()
    assert same(made.weights(), source.weights())
    assert made.optimizer.state_dict()["state"] == {}
    assert made.scheduler.num_steps == 0
    bridge.train(made)
    assert steps_of(tmp_path / "tuned") == [8, 6, 4, 2]
    again = bridge.setup(bridge.config(tmp_path / "tuned", pretrained_checkpoint=str(trained)), seed=3)
    assert again.loaded == (8, 8 * 10**18)


def test_finetune_takes_the_weights_of_load(trained: Path, tmp_path: Path) -> None:
    made = bridge.setup(bridge.config(tmp_path / "tuned", load=str(trained), finetune=True), seed=2)
    assert made.loaded == (0, 0)
    assert same(made.weights(), bridge.setup(bridge.config(trained), seed=1).weights())


def test_where_nothing_is_the_training_starts_from_scratch_or_ends_as_asked(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / TRACKER).write_text("0")
    assert bridge.setup(bridge.config(tmp_path / "empty")).loaded == (0, 0)
    with pytest.raises(holdfast.CheckpointNotFoundError, match="exit_on_missing_checkpoint"):
        bridge.setup(bridge.config(tmp_path / "empty", exit_on_missing_checkpoint=True))


def test_a_run_without_bridges_file_is_found_all_the_same(trained: Path) -> None:
    (trained / TRACKER).unlink()
    made = bridge.setup(bridge.config(trained))
    assert made.loaded is not None
    assert made.loaded[0] == 8
    assert (trained / TRACKER).read_text() == "8"


def test_a_damaged_newest_checkpoint_is_rejected_for_the_one_before(trained: Path) -> None:
    file = trained / "step-000000008" / "rank-00000.safetensors"
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    made = bridge.setup(bridge.config(trained))
    assert made.loaded == (6, 6 * 10**18)


def test_the_folder_of_one_checkpoint_and_a_url_are_refused(trained: Path) -> None:
    with pytest.raises(holdfast.UsageError, match="ckpt_step chooses the checkpoint"):
        bridge.setup(bridge.config(trained, load=str(trained / "step-000000004")))
    with pytest.raises(holdfast.UsageError, match="start from scratch"):
        bridge.setup(bridge.config(trained, load="s3://bucket/run"))


# Parts of the state


def test_load_optim_and_load_rng_leave_these_as_they_are(trained: Path) -> None:
    made = bridge.build(bridge.config(trained, load_optim=False, load_rng=False), seed=5)
    before = torch.get_rng_state()
    assert made.manager.load(made.load_context())[0] == 8
    assert torch.equal(torch.get_rng_state(), before)
    assert made.optimizer.state_dict()["state"] == {}
    assert made.scheduler.num_steps == 0
    assert same(made.weights(), bridge.setup(bridge.config(trained)).weights())


def test_what_is_not_saved_is_neither_stored_nor_carried_on_and_still_loaded(trained: Path) -> None:
    cfg = bridge.config(trained, save_optim=False, save_rng=False, train_iters=10)
    made = bridge.setup(cfg, seed=5)
    assert made.loaded is not None
    assert made.loaded[0] == 8
    assert made.scheduler.num_steps == 8 * bridge.BATCH
    assert len(made.optimizer.state_dict()["state"]) == 6
    bridge.train(made)
    newest = holdfast.resolve(trained)
    assert (newest.step, [tree.name for tree in newest.manifest.trees]) == (10, ["model"])


def test_a_checkpoint_without_an_optimizer_resumes_with_a_new_one_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bridge.pretrain(bridge.config(tmp_path, save_optim=False))
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        made = bridge.setup(bridge.config(tmp_path), seed=5)
    assert made.loaded is not None
    assert made.loaded[0] == 8
    assert "optimizer" in caplog.text
    assert made.optimizer.state_dict()["state"] == {}


class MasterWeights:
    """An optimizer of Megatron's kind: no torch.optim.Optimizer, with a copy of the weights in another precision."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner = inner
        self.reload_model_params()

    def reload_model_params(self) -> None:
        parameters = [one for group in self.inner.param_groups for one in group["params"]]
        self.master = [one.detach().double().clone() for one in parameters]

    def state_dict(self) -> dict[str, Any]:
        return {"inner": self.inner.state_dict(), "master": self.master}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state["inner"])
        for ours, saved in zip(self.master, state["master"], strict=True):
            ours.copy_(saved)


def test_an_optimizers_own_copy_of_the_weights_follows_the_weights_that_were_loaded(tmp_path: Path) -> None:
    def build(**checkpoint: Any) -> bridge.Setup:
        made = bridge.build(bridge.config(tmp_path, **checkpoint))
        made.optimizer = MasterWeights(made.optimizer)
        return made

    made = build()
    bridge.train_step(
        bridge.Setup(made.state, made.model, made.optimizer.inner, made.scheduler, made.manager, made.loaded)
    )
    made.optimizer.master[0].fill_(7.0)
    made.manager.save(made.save_context(), None)
    made.manager.finalize_async_saves(made.state, blocking=True, terminate=True)
    for options, master in (({}, 7.0), ({"load_optim": False}, None), ({"finetune": True}, None)):
        found = build(**options)
        found.manager.load(found.load_context())
        first = next(iter(found.weights().values())).double()
        expected = first if master is None else torch.full_like(first, master)
        assert torch.equal(found.optimizer.master[0], expected), options


def test_a_model_of_another_shape_is_an_error_and_strict_lets_other_leaves_pass(trained: Path) -> None:
    def with_a_head(**options: Any) -> bridge.Setup:
        made = bridge.build(bridge.config(trained, load_optim=False), seed=4)
        made.model[0].head = torch.nn.Linear(1, 1)
        made.manager.load(made.load_context(**options))
        return made

    with pytest.raises(holdfast.StateMismatchError, match="head"):
        with_a_head()
    assert with_a_head(strict=False).state.train_state.step == 8


def test_several_chunks_are_components_of_their_own(tmp_path: Path) -> None:
    made = bridge.build(bridge.config(tmp_path), chunks=2)
    made.state.train_state.step = 3
    made.manager.save(made.save_context())
    made.manager.finalize_async_saves(made.state, blocking=True, terminate=True)
    again = bridge.build(bridge.config(tmp_path), seed=1, chunks=2)
    assert again.manager.load(again.load_context()) == (3, 0)
    assert same([one.state_dict() for one in again.model], [one.state_dict() for one in made.model])
    for chunks, problem in ((1, "nothing of model would be restored"), (3, "has no model2")):
        other = bridge.build(bridge.config(tmp_path, load_optim=False, load_rng=False), chunks=chunks)
        with pytest.raises(holdfast.StateMismatchError, match=problem):
            other.manager.load(other.load_context())


def test_skip_load_to_model_and_opt_takes_the_counters_alone_but_not_with_fsdp2(trained: Path) -> None:
    for uses_fsdp2 in (False, True):
        cfg = bridge.config(trained)
        cfg.dist.use_torch_fsdp2 = uses_fsdp2
        made = bridge.build(cfg, seed=3)
        before = made.weights()
        made.manager.load(made.load_context(skip_load_to_model_and_opt=True))
        assert made.state.train_state.step == 8
        # Bridge sets it for FSDP2 because its own load fills the tensors in place, which this one does not.
        assert same(made.weights(), before) is not uses_fsdp2
        assert bool(made.optimizer.state_dict()["state"]) is uses_fsdp2


# What is refused


@pytest.mark.parametrize(
    ("setting", "value"),
    [("non_persistent_save_interval", 2), ("also_save_hf_checkpoint", True), ("load_main_params_from_ckpt", True)],
)
def test_a_setting_that_nothing_would_follow_is_refused_before_the_training(
    tmp_path: Path, setting: str, value: Any
) -> None:
    with pytest.raises(holdfast.UsageError, match=f"{setting} is set"):
        bridge.setup(bridge.config(tmp_path, **{setting: value}))


def test_a_non_persistent_save_is_refused(tmp_path: Path) -> None:
    made = bridge.build(bridge.config(tmp_path))
    with pytest.raises(holdfast.UsageError, match="non-persistent"):
        made.manager.save(made.save_context(non_persistent_ckpt=True), None)


@pytest.mark.parametrize(
    ("part", "setting", "value"),
    [
        ("model", "tensor_model_parallel_size", 2),
        ("model", "pipeline_model_parallel_size", 4),
        ("optimizer", "use_distributed_optimizer", True),
    ],
)
def test_cut_state_of_objects_that_do_not_know_how_they_are_cut_is_refused_before_anything_is_stored(
    tmp_path: Path, part: str, setting: str, value: Any
) -> None:
    cfg = bridge.config(tmp_path / "run")
    setattr(getattr(cfg, part), setting, value)
    made = bridge.build(cfg)
    with pytest.raises(holdfast.UsageError, match=f"{setting}.*Net has no sharded_state_dict"):
        made.manager.save(made.save_context(), None)
    assert not (tmp_path / "run").exists()


def test_other_objects_and_calls_after_the_end_are_refused(tmp_path: Path) -> None:
    made = bridge.build(bridge.config(tmp_path))
    made.manager.finalize_async_saves(made.state, blocking=True)
    made.manager.save(made.save_context(), None)
    other = bridge.build(bridge.config(tmp_path))
    made.optimizer = other.optimizer
    with pytest.raises(holdfast.UsageError, match="another optimizer"):
        made.manager.save(made.save_context(), None)
    with pytest.raises(holdfast.UsageError, match="one part of a model"):
        made.manager.save(made.save_context(module_name="vision"), None)
    for _ in range(3):
        made.manager.finalize_async_saves(made.state, blocking=True, terminate=True)
    with pytest.raises(holdfast.ClosedError):
        made.manager.save(made.save_context(), None)
    unset = bridge.build(bridge.config(None, load=str(tmp_path)))
    with pytest.raises(holdfast.UsageError, match="set save"):
        unset.manager.save(unset.save_context(), None)
    with pytest.raises(holdfast.UsageError, match="neither save nor load"):
        bridge.build(bridge.config(None))
    with pytest.raises(holdfast.UsageError, match="has no 'save'"):
        MegatronBridgeManager({"save": "here"})


def test_a_data_iterator_whose_position_is_lost_is_named_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Iterator:
        class iterable:
            @staticmethod
            def save_state() -> None: ...

    made = bridge.build(bridge.config(tmp_path))
    with caplog.at_level(logging.WARNING, logger="holdfast"):
        for step in (1, 2):
            made.state.train_state.step = step
            made.manager.save(made.save_context(train_data_iterator=Iterator()), None)
    assert caplog.text.count("position of its own") == 1


@pytest.mark.skipif(sys.platform != "linux", reason="limits of another process are Linux's")
def test_a_save_that_fails_is_raised_once_and_no_file_and_no_callback_takes_it_for_committed(tmp_path: Path) -> None:
    made = bridge.build(bridge.config(tmp_path, async_save=True))

    def save(step: int) -> None:
        made.state.train_state.step = step
        made.manager.save(made.save_context(), made.callbacks)

    save(1)
    made.manager.finalize_async_saves(made.state, blocking=True)
    assert writers()
    for process in writers():
        resource.prlimit(process, resource.RLIMIT_FSIZE, (0, 0))
    save(2)
    with pytest.raises(holdfast.HoldfastError):
        made.manager.finalize_async_saves(made.state, blocking=True)
    for blocking in (False, True):
        made.manager.finalize_async_saves(made.state, blocking=blocking)
    assert (tmp_path / TRACKER).read_text() == "1"
    assert len(made.callbacks.called) == 1
