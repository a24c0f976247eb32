"""The Trainer of transformers over Holdfast: killed and resumed exactly, with the arguments that its users know."""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

import transformers

import holdfast
from holdfast.integrations.transformers import HoldfastTrainer
from holdfast.integrations.transformers.support import check_version
from holdfast.testing import values
from tests.integrations.trainer_runs import (
    Stop,
    Stopped,
    arguments,
    gpt2,
    llama,
    make,
    result_of,
    resume_killed,
    train_until_killed,
)
from tests.ranks import run_ranks


def require_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["logs"] == expected["logs"]
    assert found["weights"].keys() == expected["weights"].keys()
    different = [name for name, one in found["weights"].items() if not torch.equal(one, expected["weights"][name])]
    assert different == []
    assert found["random"] == expected["random"]


def steps_in(folder: Path) -> list[int]:
    return sorted(found.step for found in holdfast.checkpoints(folder))


def trained(folder: Path, *callbacks: Any, resume: Any = None, **options: Any) -> Any:
    trainer = make(folder, *callbacks, **options)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def stopped(folder: Path, passes: int, **options: Any) -> None:
    with pytest.raises(Stopped):
        trained(folder, Stop(passes), **options)


# Exact resumes


def killed_and_resumed(folder: Path, ranks: int, kill_at: int, changes: dict[str, Any]) -> None:
    killed = run_ranks(ranks, train_until_killed, folder, kill_at, changes)
    assert all(one.exit_code == -signal.SIGKILL for one in killed), f"to be killed in pass {kill_at}: {killed}"
    for found, expected in values(run_ranks(ranks, resume_killed, folder, changes)):
        require_equal(found, expected)


def test_a_killed_training_is_resumed_exactly(tmp_path: Path) -> None:
    # Twice two passes to the first save.
    killed_and_resumed(tmp_path, 1, random.randrange(6, 15), {"gradient_accumulation_steps": 2, "max_steps": 8})


@pytest.mark.slow
@pytest.mark.parametrize("changes", [{}, {"fsdp": True}], ids=["DDP", "FSDP2"])
def test_a_killed_training_of_two_ranks_is_resumed_exactly(tmp_path: Path, changes: dict[str, Any]) -> None:
    killed_and_resumed(tmp_path, 2, random.randrange(4, 8), {**changes, "max_steps": 8})
    with pytest.raises(holdfast.StateMismatchError, match="the state of 2 ranks and there are 1 now"):
        trained(tmp_path / "run", resume=True, max_steps=10)
    adapt = {"strategy": holdfast.LoadStrategy(on_world_change="adapt")}
    assert trained(tmp_path / "run", resume=True, options=adapt, max_steps=10).state.global_step == 10


VARIANTS: dict[str, tuple[int, dict[str, Any]]] = {
    # Saved at step 8, between the logs of steps 6 and 9.
    "in the second epoch": (10, {}),
    "at the end of an epoch": (6, {"save_strategy": "epoch"}),
    "an order drawn from the global generator": (8, {"accelerator_config": {"use_seedable_sampler": False}}),
    "batches of equal lengths": (8, {"train_sampling_strategy": "group_by_length"}),
    "workers": (8, {"dataloader_num_workers": 1}),
}


@pytest.mark.slow
@pytest.mark.parametrize(("passes", "changes"), VARIANTS.values(), ids=VARIANTS)
def test_the_samples_and_losses_of_a_resumed_training_are_the_same(
    tmp_path: Path, passes: int, changes: dict[str, Any]
) -> None:
    expected = result_of(trained(tmp_path / "whole", **changes))
    stopped(tmp_path / "run", passes, **changes)
    require_equal(result_of(trained(tmp_path / "run", resume=True, options={}, **changes)), expected)


@pytest.mark.slow
def test_the_mean_loss_is_that_of_the_steps_of_this_call(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 8)
    trainer = make(tmp_path / "run")
    output = trainer.train(resume_from_checkpoint=4)
    assert trainer.state.global_step == 12
    whole = make(tmp_path / "whole", logging_steps=1)
    whole.train()
    losses = [entry["loss"] for entry in whole.state.log_history if "loss" in entry]
    assert output.training_loss == pytest.approx(sum(losses[4:]) / 8)


@pytest.mark.slow
def test_ignore_data_skip_starts_the_epoch_again(tmp_path: Path) -> None:
    stopped(tmp_path / "run", 8)
    trainer = trained(tmp_path / "run", resume=True, ignore_data_skip=True)
    assert trainer.state.global_step == 12


# What to resume from


@pytest.mark.slow
def test_selectors_of_the_run_and_paths_are_resumed_from(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(holdfast.CheckpointNotFoundError, match="no checkpoint to resume from"):
        trained(tmp_path / "run", resume=True)
    trained(tmp_path / "run", resume="auto", max_steps=4)
    begun: list[int] = []

    class Note(transformers.TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            begun.append(state.global_step)

    folder = tmp_path / "run" / "step-000000002"
    for resume in (True, 2, "2", folder, str(folder), tmp_path / "run"):
        trained(tmp_path / "run", Note(), resume=resume, max_steps=4)
    trained(tmp_path / "other", Note(), resume=folder, max_steps=4)
    assert begun == [4, 2, 2, 2, 2, 4, 2]
    assert steps_in(tmp_path / "other") == [4]
    with pytest.raises(holdfast.CheckpointNotFoundError):
        trained(tmp_path / "run", resume=3, max_steps=4)
    with caplog.at_level(logging.WARNING, "holdfast"):
        trained(tmp_path / "run", max_steps=1)
    assert "starts at step 0 beside them" in caplog.text


def test_a_damaged_latest_checkpoint_is_passed_over_and_the_resume_is_exact(tmp_path: Path) -> None:
    expected = result_of(trained(tmp_path / "whole", max_steps=6))
    stopped(tmp_path / "run", 6, max_steps=6)
    assert steps_in(tmp_path / "run") == [2, 4]
    file = tmp_path / "run" / "step-000000004" / "rank-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    require_equal(result_of(trained(tmp_path / "run", resume=True, max_steps=6)), expected)


def test_a_checkpoint_without_a_trainers_state_is_refused(tmp_path: Path) -> None:
    with holdfast.CheckpointManager(tmp_path, {"model": gpt2(), "trainer_state": {"other": 1}}) as manager:
        manager.save(1)
    with pytest.raises(holdfast.UsageError, match="no state of a Trainer"):
        trained(tmp_path, resume=True)
    with pytest.raises(holdfast.UsageError, match=r"resume_from_checkpoint=4\.0"):
        trained(tmp_path, resume=4.0)


def test_folders_of_the_trainer_itself_are_imported_and_resumed_exactly(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = result_of(trained(tmp_path / "whole", model=llama()))
    run = tmp_path / "run"
    with pytest.raises(Stopped):
        make(run, Stop(8), model=llama(), kind=transformers.Trainer, save_steps=3).train()
    own = run / "checkpoint-6"
    for resume in (True, "auto", own, str(own)):
        with pytest.raises(holdfast.UsageError, match=r"import_checkpoint\(.*checkpoint-6.*step=6, parameters="):
            trained(run, resume=resume, model=llama())
    checkpoint = holdfast.import_checkpoint(own, run, step=6, parameters=llama())
    assert checkpoint.path == str(run / "step-000000006")
    require_equal(result_of(trained(run, resume=True, model=llama())), expected)
    assert own.is_dir()


# Arguments


@pytest.mark.slow
def test_the_checkpoints_of_a_limit_are_those_that_the_trainer_would_keep(tmp_path: Path) -> None:
    for limit in (1, 2, 3):
        changes = {
            "save_total_limit": limit,
            "max_steps": 8,
            "eval_strategy": "steps",
            "eval_steps": 2,
            "load_best_model_at_end": True,
            # A constant: the first evaluation stays the best.
            "metric_for_best_model": "constant",
            "greater_is_better": True,
        }
        more = {"compute_metrics": lambda _: {"constant": 0.5}}
        run, stock = tmp_path / f"run-{limit}", tmp_path / f"stock-{limit}"
        before = run / "checkpoint-1"
        before.mkdir(parents=True)
        trainer = trained(run, more=more, **changes)
        other = trained(stock, more=more, kind=transformers.Trainer, **changes)
        kept = sorted(int(folder.name.partition("-")[2]) for folder in stock.glob("checkpoint-*"))
        # With a limit of 1 the Trainer removes the latest at the very end, and then nothing can be resumed.
        assert steps_in(run) == (kept if limit > 1 else [2, 8])
        assert before.is_dir(), "a folder of an earlier training is not for this one to remove"
        assert trainer.state.best_model_checkpoint == str(run / "step-000000002")
        weights = other.model.state_dict()
        assert all(torch.equal(one, weights[name]) for name, one in trainer.model.state_dict().items())


@pytest.mark.slow
def test_the_best_model_is_known_after_a_resume_and_a_move(tmp_path: Path) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True, "save_total_limit": 2}
    changes |= {"metric_for_best_model": "constant", "greater_is_better": True}
    more = {"compute_metrics": lambda _: {"constant": 0.5}}
    stopped(tmp_path / "run", 9, more=more, **changes)
    (tmp_path / "run").rename(tmp_path / "moved")
    trainer = trained(tmp_path / "moved", resume=True, more=more, **changes)
    assert trainer.state.best_model_checkpoint == str(tmp_path / "moved" / "step-000000002")
    assert steps_in(tmp_path / "moved") == [2, 12]
    assert (tmp_path / "moved" / "best").resolve().is_dir()


@pytest.mark.slow
def test_only_better_models_are_saved(tmp_path: Path) -> None:
    changes = {"save_strategy": "best", "eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "loss"}
    trainer = trained(tmp_path / "run", **changes)
    stock = trained(tmp_path / "stock", kind=transformers.Trainer, **changes)
    kept = sorted(int(folder.name.partition("-")[2]) for folder in (tmp_path / "stock").glob("checkpoint-*"))
    assert steps_in(tmp_path / "run") == kept
    assert trainer.state.best_metric == stock.state.best_metric
    assert holdfast.resolve(tmp_path / "run", "best:eval_loss").path == trainer.state.best_model_checkpoint


def test_weights_alone_are_saved_and_resumed_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    stopped(tmp_path / "run", 5, save_only_model=True)
    found = holdfast.resolve(tmp_path / "run")
    assert {tree.component for tree in found.manifest.trees} == {"model", "trainer_state"}
    with caplog.at_level(logging.WARNING, "holdfast"):
        trained(tmp_path / "run", resume=True, save_only_model=True, max_steps=6)
    assert "start fresh at step 4" in caplog.text
    with pytest.raises(holdfast.StateMismatchError, match="optimizer"):
        trained(tmp_path / "run", resume=True)
    trained(tmp_path / "full", max_steps=2)
    with pytest.raises(holdfast.UsageError, match="has optimizer, rng, scheduler, trainer as well"):
        trained(tmp_path / "full", resume=True, save_only_model=True)


def test_a_checkpoint_has_the_files_that_the_trainer_writes_and_is_exported(tmp_path: Path) -> None:
    from tests.compat.test_transformers import make_tokenizer

    make_tokenizer(tmp_path / "tokenizer")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    trainer = trained(tmp_path / "run", model=llama(), more={"processing_class": tokenizer}, max_steps=2)
    found = holdfast.resolve(tmp_path / "run")
    assert {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"} <= set(found.assets)
    assert json.loads(found.assets["trainer_state.json"].read())["global_step"] == 2
    assert json.loads(found.assets["training_args.json"].read())["learning_rate"] == 0.01
    assert not any(name.endswith((".bin", ".pt", ".pth")) for name in found.assets)
    holdfast.export(tmp_path / "run", tmp_path / "out", format="hf")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    weights = trainer.model.state_dict()
    assert all(torch.equal(one, weights[name]) for name, one in loaded.state_dict().items())


def test_an_adapter_is_saved_without_its_base_and_resumed_exactly(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"], lora_dropout=0.1))

    expected = result_of(trained(tmp_path / "whole", model=adapted()))
    stopped(tmp_path / "run", 8, model=adapted())
    found = holdfast.resolve(tmp_path / "run")
    stored = {leaf.name for leaf in found.manifest.tensors if leaf.name.startswith("model.")}
    assert stored
    assert all("lora_" in name for name in stored)
    assert "adapter_config.json" in found.assets
    require_equal(result_of(trained(tmp_path / "run", resume=True, model=adapted())), expected)
    other = adapted()
    with torch.no_grad():
        other.base_model.model.lm_head.weight.add_(1)
    with pytest.raises(holdfast.GuardMismatchError):
        trained(tmp_path / "run", resume=True, model=other)
    holdfast.export(tmp_path / "run", tmp_path / "out", format="peft")
    assert peft.PeftModel.from_pretrained(llama(), tmp_path / "out")


def test_the_scaler_of_gradients_is_restored(tmp_path: Path) -> None:
    trainer = make(tmp_path, max_steps=2)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=512.0)
    trainer.train()
    resumed = make(tmp_path, max_steps=3)
    resumed.accelerator.scaler = torch.amp.GradScaler("cpu")
    resumed.train(resume_from_checkpoint=True)
    assert resumed.accelerator.scaler.get_scale() == 512.0


def test_callbacks_are_restored_where_the_arguments_ask_for_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    changes = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "constant", "max_steps": 6}
    changes |= {"greater_is_better": True}
    more = {"compute_metrics": lambda _: {"constant": 0.5}}
    early = [transformers.EarlyStoppingCallback(early_stopping_patience=9) for _ in range(2)]
    with pytest.raises(Stopped):
        trained(tmp_path / "run", early[0], Stop(6), more=more, **changes)
    with caplog.at_level(logging.WARNING, "holdfast"):
        trained(tmp_path / "run", early[1], resume=True, more=more, **changes)
    assert "the state of EarlyStoppingCallback is not restored" in caplog.text
    assert early[1].early_stopping_patience_counter == 1
    resumed = trained(
        tmp_path / "run",
        transformers.EarlyStoppingCallback(early_stopping_patience=9),
        resume=4,
        more=more,
        restore_callback_states_from_checkpoint=True,
        **changes,
    )
    (callback,) = [
        one for one in resumed.callback_handler.callbacks if isinstance(one, transformers.EarlyStoppingCallback)
    ]
    assert callback.early_stopping_patience_counter == 2


def test_arguments_that_change_the_samples_are_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trained(tmp_path, max_steps=2)
    with caplog.at_level(logging.WARNING, "holdfast"):
        trained(tmp_path, resume=True, max_steps=3, per_device_train_batch_size=1)
    assert "per_device_train_batch_size was 2 and is 1" in caplog.text
    assert "seed" not in caplog.text


# Signals, failures


class Signal(transformers.TrainerCallback):
    """Sends SIGTERM to this process in the middle of a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_substep_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize("own", [True, False], ids=["enable_jit_checkpoint", "a trigger"])
def test_a_signal_saves_at_the_end_of_its_step_and_the_resume_is_exact(tmp_path: Path, own: bool) -> None:
    before = signal.getsignal(signal.SIGTERM)
    # Three steps in an epoch, of which the last has one pass.
    changes = {"gradient_accumulation_steps": 2, "max_steps": 6, "save_steps": 100}
    options = {} if own else {"save": holdfast.OnSignal("SIGTERM")}
    expected = result_of(trained(tmp_path / "whole", **changes))
    asked = trained(tmp_path / "run", Signal(3), options=options, enable_jit_checkpoint=own, **changes)
    assert asked.state.global_step == 4
    assert steps_in(tmp_path / "run") == [4]
    assert not list((tmp_path / "run").glob("checkpoint-*"))
    assert signal.getsignal(signal.SIGTERM) == before
    require_equal(result_of(trained(tmp_path / "run", resume=True, **changes)), expected)


def test_a_save_that_fails_is_raised_by_train(tmp_path: Path) -> None:
    class Seize(transformers.TrainerCallback):
        """Takes the run from the training before its last save."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                # The save of step 2 may still be under way: it is to be committed.
                while not steps_in(tmp_path):
                    time.sleep(0.01)
                holdfast.unlock(tmp_path, force=True)

    with pytest.raises(holdfast.HoldfastError):
        trained(tmp_path, Seize(), options={}, max_steps=4)
    assert steps_in(tmp_path) == [2]


def test_every_checkpoint_is_committed_when_callbacks_see_the_end(tmp_path: Path) -> None:
    seen: list[list[int]] = []

    class Look(transformers.TrainerCallback):
        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            seen.append(steps_in(tmp_path))

    trainer = trained(tmp_path, Look(), options={}, max_steps=4)
    assert seen == [[2, 4]]
    assert trainer.checkpoint_manager is None


# What is refused


def test_what_is_not_supported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(holdfast.UsageError, match="save_on_each_node"):
        make(tmp_path, save_on_each_node=True)
    with pytest.raises(holdfast.UsageError, match="has no 'verfy'"):
        make(tmp_path, options={"verfy": "quick"})
    with pytest.raises(holdfast.UsageError, match="both save_total_limit and"):
        make(tmp_path, options={"keep": holdfast.KeepLast(1)}, save_total_limit=1)
    with pytest.raises(holdfast.UsageError, match="hyperparameter search"):
        make(tmp_path).train(trial={"learning_rate": 0.1})
    with pytest.raises(holdfast.UsageError, match="derives from Trainer first"):
        type("Wrong", (transformers.Trainer, HoldfastTrainer), {})
    with pytest.raises(holdfast.UsageError, match="is no Trainer"):
        HoldfastTrainer(model=gpt2(), args=arguments(tmp_path))
    with pytest.raises(holdfast.UsageError, match="while train"):
        make(tmp_path)._save_checkpoint(None, None)
    for version in ("4.57.1", "5.21.0", "5.23.0", "6.0.0.dev0"):
        with pytest.raises(ImportError, match=rf"5\.22 to before 5\.23, and this is {version}"):
            check_version(version)
