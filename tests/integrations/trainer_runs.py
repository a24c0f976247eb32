"""A small training with the Trainer of transformers, the same in every process, and stopped where a test says."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from holdfast.integrations.transformers import HoldfastTrainer

__all__ = [
    "Holdfast",
    "Stop",
    "Stopped",
    "arguments",
    "gpt2",
    "llama",
    "make",
    "result_of",
    "resume_killed",
    "train_until_killed",
]

VOCABULARY = 64
Result = dict[str, Any]


class Holdfast(HoldfastTrainer, Trainer):
    """The Trainer under test."""


class Stopped(Exception):
    """The training was stopped by the test, as by an error of its own."""


class Stop(TrainerCallback):
    """Ends the training in the n-th forward pass of its training: by an exception, or by SIGKILL."""

    def __init__(self, passes: int, *, kill: bool = False) -> None:
        self.passes, self.kill = passes, kill

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        model.register_forward_hook(self._count)

    def _count(self, model: Any, *_: Any) -> None:
        self.passes -= model.training
        if self.passes == 0 and model.training:
            if self.kill:
                os.kill(os.getpid(), signal.SIGKILL)
            raise Stopped


def gpt2() -> Any:
    """Return a model with dropout: it draws random numbers in every step."""
    torch.manual_seed(1)
    sizes = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, bos_token_id=1, eos_token_id=2, **sizes))


def llama() -> Any:
    torch.manual_seed(1)
    sizes = {"hidden_size": 16, "intermediate_size": 20, "num_hidden_layers": 1, "num_attention_heads": 2}
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            bos_token_id=1,
            eos_token_id=2,
            tie_word_embeddings=False,
            **sizes,  # type: ignore[arg-type]
        )
    )


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    """Return arguments with a save at every second step, five steps in an epoch, and logs that fall between saves."""
    given: dict[str, Any] = {
        "output_dir": str(folder),
        "max_steps": 12,
        "save_steps": 2,
        "logging_steps": 3,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "weight_decay": 0.1,
        "warmup_steps": 3,
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**given, **changes})


def make(
    folder: Path,
    *callbacks: Any,
    model: Any = None,
    kind: type[Any] = Holdfast,
    options: dict[str, Any] | None = None,
    more: dict[str, Any] | None = None,
    ranks: int = 1,
    **changes: Any,
) -> Any:
    """Return a Trainer over ten batches a rank. `options`: of checkpoints. `more`: arguments of the Trainer itself."""
    rows = torch.randint(0, VOCABULARY, (10 * ranks, 8), generator=torch.Generator().manual_seed(2))
    data = [{"input_ids": row[: 4 + index % 5], "labels": row[: 4 + index % 5]} for index, row in enumerate(rows)]
    if changes.get("train_sampling_strategy") is None:
        data = [{"input_ids": row, "labels": row} for row in rows]
    if issubclass(kind, HoldfastTrainer):
        # In the call, which takes less time than a process that writes.
        more = {**(more or {}), "checkpoint_options": {"mode": "sync"} if options is None else options}
    return kind(
        model=gpt2() if model is None else model,
        args=arguments(folder, **changes),
        train_dataset=data,
        eval_dataset=data[:4],
        data_collator=padded,
        callbacks=list(callbacks),
        **(more or {}),
    )


def padded(samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch of samples of different lengths."""
    rows = torch.nn.utils.rnn.pad_sequence([one["input_ids"] for one in samples], batch_first=True)
    return {"input_ids": rows, "labels": rows.clone()}


def result_of(trainer: Any) -> Result:
    """Return what must be equal after a resume: the logged losses, the weights and the learning rates."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    weights = {name: getattr(one, "full_tensor", lambda one=one: one)() for name, one in model.state_dict().items()}
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    return {
        "logs": [{name: entry[name] for name in ("step", "loss", "grad_norm", "learning_rate")} for entry in logs],
        "weights": {name: tensor.detach().clone() for name, tensor in weights.items()},
        "random": torch.rand(3).tolist(),
    }


def train_until_killed(rank: int, folder: Path, kill_at: int, changes: dict[str, Any]) -> None:
    """Train without a break and keep the result; then train again, and be killed in a forward pass, on every rank: one
    that is left may wait in a collective of gloo for as long as the process group waits."""
    ranks = int(os.environ["WORLD_SIZE"])
    trainer = make(folder / "whole", ranks=ranks, options={}, **changes)
    trainer.train()
    torch.save(result_of(trainer), folder / f"expected-{rank}.pt")
    make(folder / "run", Stop(kill_at, kill=True), ranks=ranks, options={}, **changes).train()


def resume_killed(rank: int, folder: Path, changes: dict[str, Any]) -> tuple[Result, Result]:
    """Resume the training that was killed; return its result, and the one that is expected."""
    trainer = make(folder / "run", ranks=int(os.environ["WORLD_SIZE"]), options={}, **changes)
    trainer.train(resume_from_checkpoint=True)
    return result_of(trainer), torch.load(folder / f"expected-{rank}.pt")
