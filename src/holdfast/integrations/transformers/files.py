"""The small files of a checkpoint: what the Trainer writes beside the tensors, without pickles. Live objects enter;
names and bytes leave."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from transformers.trainer_callback import ExportableState, TrainerState

__all__ = [
    "ARGUMENTS_FILE",
    "STATE_FILE",
    "is_adapter",
    "metric_name",
    "metrics_of",
    "model_files",
    "processing_files",
    "trainer_files",
]

STATE_FILE = "trainer_state.json"
ARGUMENTS_FILE = "training_args.json"


def trainer_files(trainer: Any, *, is_best: bool) -> dict[str, bytes]:
    """Return the state of the Trainer, with that of its callbacks, and its arguments."""
    callbacks = [*trainer.callback_handler.callbacks, trainer.control]
    exported = [callback for callback in callbacks if isinstance(callback, ExportableState)]
    trainer.state.stateful_callbacks = TrainerState(stateful_callbacks=exported).stateful_callbacks
    state = dataclasses.asdict(trainer.state)
    if is_best:
        # It is this checkpoint, whose folder gets its name when the ranks have agreed on the save.
        state["best_model_checkpoint"] = None
    return {
        STATE_FILE: _json(state),
        ARGUMENTS_FILE: _json(trainer.args.to_dict(), default=str),
    }


def _json(content: Any, default: Callable[[Any], Any] | None = None) -> bytes:
    return json.dumps(content, indent=2, sort_keys=True, default=default).encode() + b"\n"


def model_files(model: Any) -> dict[str, bytes]:
    """Return the configuration of a model as `save_pretrained` writes it: of an adapter, that of the adapter."""
    files: dict[str, bytes] = {}
    if is_adapter(model):
        for name, config in model.peft_config.items():
            folder = "" if name == "default" else f"{name}/"
            files |= {f"{folder}{file}": content for file, content in _written(config.save_pretrained).items()}
        return files
    for name in ("config", "generation_config"):
        config = getattr(model, name, None)
        if config is not None and hasattr(config, "save_pretrained"):
            files |= _written(config.save_pretrained)
    return files


def processing_files(trainer: Any) -> dict[str, bytes]:
    """Return the files of the tokenizer or another processing class."""
    processing = trainer.processing_class or getattr(trainer.data_collator, "tokenizer", None)
    return {} if processing is None else _written(processing.save_pretrained)


def _written(save: Callable[[str], object]) -> dict[str, bytes]:
    """Return the files that a function writes to a folder."""
    with tempfile.TemporaryDirectory(prefix="holdfast-") as folder:
        save(folder)
        files = [path for path in Path(folder).rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def is_adapter(model: Any) -> bool:
    """Return whether a model is one of peft, of which the adapter is saved and not the base."""
    try:
        import peft
    except ImportError:
        return False
    return isinstance(model, peft.PeftModel)


def metric_name(arguments: Any) -> str:
    """Return the name under which the metric of the best model is logged."""
    name: str = arguments.metric_for_best_model
    return name if name.startswith("eval_") else f"eval_{name}"


def metrics_of(state: Any) -> dict[str, float]:
    """Return what was logged for the last step: the loss, and the evaluation where there was one."""
    found: dict[str, Any] = {}
    for entry in state.log_history:
        if entry.get("step") == state.global_step:
            found |= entry
    return {
        name: value
        for name, value in found.items()
        if name not in ("step", "epoch") and isinstance(value, int | float) and not isinstance(value, bool)
    }
