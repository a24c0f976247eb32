"""What a Lightning checkpoint holds beside weights, optimizers and schedulers, as one component: the progress of the
loops, callbacks, the precision plug-in, the data module, and what hooks of the user add.

The dict that hooks see has the keys of Lightning's own checkpoints. An imported Lightning checkpoint has this component
too, with progress as Lightning saves it.
"""

from __future__ import annotations

import enum
import logging
import os
from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import holdfast
from holdfast.integrations.lightning.loops import Boundary, Loops

logger = logging.getLogger("holdfast")

__all__ = ["TrainerState", "plain_hyper_parameters", "split_state"]

_STORED_APART = ("state_dict", "optimizer_states", "lr_schedulers")
_OWN = "holdfast"


class TrainerState:
    """The state of one trainer, as a component. `take` fills it before a save, `take_up` hands over what was loaded.

    callback: the callback that this is for; its own state is `own`, a dict of plain values.
    """

    def __init__(self, trainer: Any, loops: Loops, callback: Any, version: str) -> None:
        self._trainer = trainer
        self._loops = loops
        self._callback = callback
        self._version = version
        self._taken: dict[str, Any] = {}
        self._loaded: dict[str, Any] | None = None
        self._warned = False

    def take(self, boundary: Boundary, own: Mapping[str, Any]) -> None:
        """Collect the state, and call the hooks that add to it, on all ranks."""
        checkpoint = self._checkpoint(self._loops.state_dict(boundary))
        given = {key: _content(checkpoint[key]) for key in _STORED_APART}
        for callback in self._trainer.callbacks:
            if callback is not self._callback:
                callback.on_save_checkpoint(self._trainer, self._trainer.lightning_module, checkpoint)
        self._trainer.lightning_module.on_save_checkpoint(checkpoint)
        changed = {
            key: checkpoint[key] for key in given if key in checkpoint and _content(checkpoint[key]) != given[key]
        }
        if changed and not self._warned:
            self._warned = True
            logger.warning(
                "a hook on_save_checkpoint changed %s: the training resumes from what the module, the optimizers and "
                "the schedulers have themselves, and the changed values are stored beside them for on_load_checkpoint",
                ", ".join(changed),
            )
        self._taken = {key: value for key, value in checkpoint.items() if key not in _STORED_APART}
        self._taken[_OWN] = {**own, "changed": changed}

    def drop(self) -> None:
        """Let go of what was taken."""
        self._taken = {}

    def state_dict(self) -> dict[str, Any]:
        return self._taken

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._loaded = state

    def take_up(self) -> dict[str, Any]:
        """Hand the loaded state over, after models, optimizers and schedulers have theirs. Return the callback's own.

        Hooks get a dict with the keys of Lightning's own checkpoints; its `state_dict` and the others that are stored
        apart are those of the live objects, which are restored already.
        """
        loaded, self._loaded = self._loaded, None
        if loaded is None or "loops" not in loaded:
            raise holdfast.StateMismatchError(
                "the checkpoint has no progress of Lightning's loops",
                component="lightning",
                advice="it is not one of a Lightning training: start from its weights with holdfast.load_weights, and "
                "give this training a run of its own",
            )
        own, loaded = split_state(loaded)
        trainer, module = self._trainer, self._trainer.lightning_module
        checkpoint = {"epoch": trainer.current_epoch, "global_step": trainer.global_step, **loaded}
        checkpoint.setdefault("pytorch-lightning_version", self._version)
        checkpoint |= self._live() | own.get("changed", {})
        module.on_load_checkpoint(checkpoint)
        self._load_data_module(checkpoint)
        self._load_callbacks(checkpoint)
        self._load_precision(checkpoint)
        self._loops.load_state_dict(checkpoint["loops"])
        return own

    def _live(self) -> dict[str, Any]:
        """Return what is stored by components of its own; nothing is copied."""
        trainer = self._trainer
        return {
            "state_dict": trainer.lightning_module.state_dict(),
            "optimizer_states": [optimizer.state_dict() for optimizer in trainer.optimizers],
            "lr_schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        }

    def _checkpoint(self, loops: dict[str, Any]) -> dict[str, Any]:
        """Return a dict with the keys of Lightning's own checkpoints."""
        trainer, module, data = self._trainer, self._trainer.lightning_module, self._trainer.datamodule
        checkpoint: dict[str, Any] = {
            "epoch": trainer.current_epoch,
            "global_step": trainer.global_step,
            "pytorch-lightning_version": self._version,
            "loops": loops,
            "callbacks": self._callback_states(),
            **self._live(),
        }
        precision = trainer.precision_plugin
        if state := precision.state_dict():
            checkpoint[type(precision).__qualname__] = state
        precision.on_save_checkpoint(checkpoint)
        for owner in (module, data):
            if owner is not None and owner.hparams:
                checkpoint[owner.CHECKPOINT_HYPER_PARAMS_KEY] = plain_hyper_parameters(owner)[0]
        if data is not None and (state := data.state_dict()):
            checkpoint[type(data).__qualname__] = state
        return checkpoint

    def _callback_states(self) -> dict[str, Any]:
        states = {}
        for callback in self._trainer.callbacks:
            state = callback.state_dict() if callback is not self._callback else None
            if state:
                states[callback.state_key] = state
        return states

    def _load_data_module(self, checkpoint: Mapping[str, Any]) -> None:
        data = self._trainer.datamodule
        if data is not None and type(data).__qualname__ in checkpoint:
            data.load_state_dict(checkpoint[type(data).__qualname__])

    def _load_callbacks(self, checkpoint: Mapping[str, Any]) -> None:
        states = checkpoint.get("callbacks") or {}
        callbacks = [callback for callback in self._trainer.callbacks if callback is not self._callback]
        unknown = sorted(set(states) - {callback.state_key for callback in callbacks})
        # A training that was imported had Lightning's own checkpoint callback, whose place this one takes.
        unknown = [key for key in unknown if not key.startswith("ModelCheckpoint")]
        if unknown:
            logger.warning(
                "the checkpoint has the state of callbacks that this trainer does not have: %s", ", ".join(unknown)
            )
        for callback in callbacks:
            callback.on_load_checkpoint(self._trainer, self._trainer.lightning_module, checkpoint)
        for callback in callbacks:
            if state := states.get(callback.state_key):
                callback.load_state_dict(deepcopy(state))

    def _load_precision(self, checkpoint: Mapping[str, Any]) -> None:
        precision = self._trainer.precision_plugin
        precision.on_load_checkpoint(checkpoint)
        if type(precision).__qualname__ in checkpoint:
            precision.load_state_dict(checkpoint[type(precision).__qualname__])


def split_state(loaded: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what the callback added to a loaded state, and the rest, which has the keys of Lightning's checkpoints."""
    return dict(loaded.get(_OWN, {})), {key: value for key, value in loaded.items() if key != _OWN}


def plain_hyper_parameters(owner: Any) -> tuple[dict[str, Any], list[str]]:
    """Return the hyper-parameters of a module or a data module as plain values, and the names of those that are
    none: they become their text."""
    texts: list[str] = []
    hyper_parameters = dict(getattr(owner, "hparams", None) or {})
    return {str(name): _plain(value, str(name), texts) for name, value in hyper_parameters.items()}, texts


def _plain(value: Any, name: str, texts: list[str]) -> Any:
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, enum.Enum)):
        return value
    if isinstance(value, enum.Enum):
        return _plain(value.value, name, texts)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{name}.{key}", texts) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{name}.{number}", texts) for number, item in enumerate(value)]
    texts.append(name)
    return repr(value)


def _content(value: Any) -> Any:
    """Return which objects a dict, or a list of dicts, holds: two of them differ when a hook changed it in between."""
    if isinstance(value, Mapping):
        return tuple((key, id(item)) for key, item in value.items())
    return tuple(map(_content, value)) if isinstance(value, list) else id(value)
