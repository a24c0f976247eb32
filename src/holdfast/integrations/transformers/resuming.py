"""Find the checkpoint to resume from, before the Trainer has built anything. A run and a selector enter on all ranks; a
checkpoint and the state of the Trainer in it leave."""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate import PartialState
from accelerate.utils import broadcast_object_list
from transformers.trainer_callback import TrainerState

import holdfast
from holdfast.integrations.transformers.files import ARGUMENTS_FILE, STATE_FILE

logger = logging.getLogger("holdfast")

__all__ = ["AnotherCheckpointError", "Selector", "Source", "find", "require_weights_alone", "warn_of_differences"]

Selector = str | int | os.PathLike[str]

_OWN_FOLDER = re.compile(r"checkpoint-([0-9]+)")
# Arguments that decide which samples a step sees.
_DATA_ARGUMENTS = (
    "seed",
    "data_seed",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "dataloader_drop_last",
    "train_sampling_strategy",
)


@dataclass(frozen=True, slots=True)
class Source:
    """A checkpoint to resume from, the selector that leads to it, and the state of the Trainer in it."""

    selector: Selector
    checkpoint: holdfast.Checkpoint
    trainer_state: dict[str, Any]

    def has(self, component: str) -> bool:
        return any(tree.component == component for tree in self.checkpoint.manifest.trees)


class AnotherCheckpointError(holdfast.HoldfastError):
    """The restore took another checkpoint than the one whose steps the Trainer has counted. `path`: where it is."""

    def __init__(self, path: str, expected: str) -> None:
        super().__init__(f"{path} was restored, and {expected} was to be")
        self.path = path


def find(run: str, resume: Selector | bool | None, timeout: float | None) -> Source | None:
    """Find the checkpoint on all ranks alike; None where the training starts fresh."""
    if resume is None or resume is False:
        return None
    if not isinstance(resume, bool | int | str | os.PathLike):
        raise holdfast.UsageError(
            f"resume_from_checkpoint={resume!r:.100}",
            advice="give True, a step, a selector or the path of a checkpoint",
        )
    automatic = resume == "auto"
    selector: Selector = "latest" if resume is True or automatic else resume
    _on_leader(lambda: _refuse_own_folder(run, selector))
    values: dict[str, Any] = {}
    options: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    with holdfast.CheckpointManager(run, {"trainer_state": values}, rng=False, **options) as manager:
        result = manager.restore(selector, strategy=holdfast.LoadStrategy(only=("trainer_state",)))
    checkpoint = result.checkpoint
    if checkpoint is not None:
        return Source(selector, checkpoint, _on_leader(lambda: _trainer_state(checkpoint, values)))
    if automatic:
        return None
    raise holdfast.CheckpointNotFoundError(
        "there is no checkpoint to resume from", run=run, advice='resume_from_checkpoint="auto" would start fresh'
    )


def _on_leader(work: Callable[[], Any]) -> Any:
    """Return on all ranks what a function returns on the first, or raise what it raises there."""
    outcome: list[Any] = [None, None]
    if PartialState().is_main_process:
        try:
            outcome[0] = work()
        except Exception as error:
            outcome[1] = error
    broadcast_object_list(outcome)
    if outcome[1] is not None:
        raise outcome[1]
    return outcome[0]


def _refuse_own_folder(run: str, selector: Selector) -> None:
    """Raise for a folder that the Trainer wrote by itself: one that is asked for, and one that is newer than the latest
    checkpoint of the run, which would be ignored silently."""
    if selector != "latest":
        folders = [] if isinstance(selector, int) else [Path(selector)]
        newest = -1
    else:
        folders = sorted(Path(run).glob("checkpoint-*"), key=_steps_of, reverse=True)
        found = holdfast.peek(run) if folders else None
        newest = -1 if found is None else found.step
    for folder in folders:
        steps = _steps_of(folder)
        if steps > newest and (folder / STATE_FILE).is_file():
            raise holdfast.UsageError(
                f"{folder} was written by the Trainer itself",
                run=run,
                advice=f"import it: holdfast.import_checkpoint({str(folder)!r}, {run!r}, step={steps}, "
                "parameters=trainer.model); then resume_from_checkpoint=True resumes from it",
            )


def _steps_of(folder: Path) -> int:
    """Return the steps that are done in a folder of the Trainer, by its name; -1 for any other folder."""
    match = _OWN_FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else -1


def _trainer_state(checkpoint: holdfast.Checkpoint, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the content of trainer_state.json; of a checkpoint that was imported, put together again."""
    if STATE_FILE in checkpoint.assets:
        state: dict[str, Any] = json.loads(checkpoint.assets[STATE_FILE].read())
    else:
        known = {field.name for field in dataclasses.fields(TrainerState)}
        state = {name: value for name, value in {**checkpoint.progress, **values}.items() if name in known}
    steps = state.get("global_step")
    if type(steps) is not int:
        raise holdfast.UsageError(
            "the checkpoint has no state of a Trainer",
            file=checkpoint.path,
            advice="resume from one that a HoldfastTrainer saved, or that was imported from a folder of the Trainer",
        )
    if steps != checkpoint.step:
        logger.warning(
            "the checkpoint of step %d has the state after %d steps of the Trainer, which goes on from there",
            checkpoint.step,
            steps,
        )
    return {**state, "best_model_checkpoint": _best_model(checkpoint, state)}


def _best_model(checkpoint: holdfast.Checkpoint, state: Mapping[str, Any]) -> str | None:
    """Return where the best model is: in this checkpoint, or in another one of its run, which may have been moved."""
    if state.get("best_global_step") == state["global_step"]:
        return checkpoint.path
    best: str | None = state.get("best_model_checkpoint")
    moved = os.path.join(os.path.dirname(checkpoint.path), os.path.basename(best or ""))
    return moved if best is not None and os.path.isdir(moved) else best


def require_weights_alone(checkpoint: holdfast.Checkpoint) -> None:
    """Raise for a checkpoint with more than `save_only_model` saves: it would be dropped."""
    more = sorted({tree.component for tree in checkpoint.manifest.trees} - {"model", "trainer_state"})
    if more:
        raise holdfast.UsageError(
            f"save_only_model=True, and the checkpoint has {', '.join(more)} as well",
            file=checkpoint.path,
            advice="resume without save_only_model, or start a new training from its weights (holdfast.load_weights)",
        )


def warn_of_differences(source: Source, arguments: Any) -> None:
    """Warn of arguments that change which samples come next, and of callbacks whose state is not restored."""
    lost = sorted(set(source.trainer_state.get("stateful_callbacks") or {}) - {"TrainerControl"})
    if lost and not arguments.restore_callback_states_from_checkpoint:
        logger.warning(
            "the state of %s is not restored; restore_callback_states_from_checkpoint=True restores it",
            ", ".join(lost),
        )
    if ARGUMENTS_FILE not in source.checkpoint.assets:
        return
    saved = json.loads(source.checkpoint.assets[ARGUMENTS_FILE].read())
    given = json.loads(json.dumps(arguments.to_dict(), default=str))
    changed = [name for name in _DATA_ARGUMENTS if name in saved and saved[name] != given.get(name)]
    if changed:
        logger.warning(
            "the training does not see the samples that it would have seen, because these arguments have changed: %s",
            ", ".join(f"{name} was {saved[name]!r} and is {given.get(name)!r}" for name in changed),
        )
