"""Recognise what a part of a foreign checkpoint is, and which component it becomes. Trees and keys enter; kinds and
names leave."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.errors import CorruptCheckpointError
from holdfast.formats.source import TensorEntry
from holdfast.formats.weights.selection import MODEL_NAMES
from holdfast.ondisk.codec import MAX_DEPTH

__all__ = [
    "CONFIG_NAMES",
    "is_model_state",
    "is_optimizer_state",
    "is_plain",
    "own_values",
    "usual_component",
    "without_wrappers",
]

CONFIG_NAMES = ("config", "hyper_parameters", "hparams", "args", "cfg", "configuration")

# How trainings call a part in the dict that they save, by the component that it becomes.
_USUAL = {
    "model": MODEL_NAMES,
    "optimizer": ("optimizer", "optim", "opt", "optimizer_state_dict", "optim_state_dict", "optimizer_state"),
    "scheduler": (
        "scheduler",
        "lr_scheduler",
        "sched",
        "scheduler_state_dict",
        "lr_scheduler_state_dict",
        "lr_sched",
        "scheduler_state",
    ),
    "loader": ("loader", "dataloader", "data_loader", "train_loader", "train_dataloader", "dataloader_state_dict"),
    "rng": ("rng", "rng_state", "rng_states", "random_state"),
}
_COMPONENT_OF = {name: component for component, names in _USUAL.items() for name in names}
_WRAPPER_PARTS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")


def usual_component(key: str) -> str:
    """Return the component that a key of a saved dict means: that of a usual name, or the key without `_state_dict`."""
    return _COMPONENT_OF.get(key) or key.removesuffix("_state_dict") or key


def is_model_state(value: Any) -> bool:
    """Return whether a dict is what a module's `state_dict` gives: tensors by name, and extra states among them."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        return False
    extra = [name for name, inner in value.items() if not isinstance(inner, TensorEntry)]
    return len(extra) < len(value) and all(name.rpartition(".")[2] == "_extra_state" for name in extra)


def is_optimizer_state(value: Any) -> bool:
    """Return whether a dict is the state of an optimizer as PyTorch lays it out: by number, by name, or flattened to
    `state.NAME.KEY` and `param_groups.NAME.OPTION`."""
    if not isinstance(value, Mapping) or not value:
        return False
    if _are_groups(value.get("param_groups")):
        return isinstance(value.get("state", {}), Mapping)
    return any(str(key).startswith("param_groups.") for key in value) and all(
        str(key).startswith(("state.", "param_groups.")) for key in value
    )


def _are_groups(groups: Any) -> bool:
    listed = groups.values() if isinstance(groups, Mapping) else groups if isinstance(groups, list | tuple) else ()
    return bool(listed) and all(isinstance(group, Mapping) and "params" in group for group in listed)


def is_plain(value: Any) -> bool:
    """Return whether this is a value that a person counts or names by, such as a number of epochs."""
    return value is None or isinstance(value, bool | int | float | str)


def own_values(value: Any, depth: int = 0) -> Any:
    """Return the same values in dicts of the plain type: what a component's state has, whatever class carried it."""
    if depth > MAX_DEPTH:
        raise CorruptCheckpointError(
            f"values of the source nest more than {MAX_DEPTH} deep", advice="leave the part out with skip="
        )
    if isinstance(value, Mapping):
        return {key: own_values(inner, depth + 1) for key, inner in value.items()}
    return [own_values(inner, depth + 1) for inner in value] if type(value) is list else value


def without_wrappers(names: Mapping[str, Any]) -> dict[str, str]:
    """Return the name without what `torch.compile`, activation checkpointing and DDP add, by the name that has it.
    Where two names would become one, all stay as they are."""
    cut = {name: ".".join(part for part in name.split(".") if part not in _WRAPPER_PARTS) for name in names}
    if all(name.startswith("module.") for name in cut.values()):
        cut = {name: new.removeprefix("module.") for name, new in cut.items()}
    if len(set(cut.values())) < len(cut) or not all(cut.values()):
        return {name: name for name in names}
    return cut
