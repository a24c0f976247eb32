"""What to save, as the caller gives it: live objects, and the metadata of the checkpoint. Values only."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from blake3 import blake3

from holdfast.ondisk.manifest import UserMetadata
from holdfast.saving.training_lineage import Ancestry
from holdfast.state.trees import CarriedTree

__all__ = ["COMPARED_ARGUMENTS", "SaveRequest", "argument_digests"]

# They are arguments of the manager, not of a save.
_OF_THE_MANAGER = frozenset({"config", "ranking"})
_ARGUMENT_NAMES = {"tags": "tag"}

COMPARED_ARGUMENTS = {
    _ARGUMENT_NAMES.get(field, field): field for field in UserMetadata.__struct_fields__ if field not in _OF_THE_MANAGER
}
"""The arguments of a save of which rank 0's are stored, each with its field of the metadata."""


@dataclass(frozen=True, slots=True)
class SaveRequest:
    """What to save: the live objects, and the metadata of the checkpoint, encoded. The saver sets `ancestry`.

    assets: the files and folders beside the state, or their bytes, by the name that each has in the checkpoint; of
        rank 0 alone. asset_names: the names of those that the caller of this save gave, on whatever rank.
    only: the components that are stored anew, where the rest is taken over from the checkpoint before.
    """

    step: int
    components: Mapping[str, Any]
    metadata: UserMetadata = field(default_factory=UserMetadata)
    pipeline_stage: int | None = None
    assets: Mapping[str, Path | bytes] = field(default_factory=dict)
    asset_names: tuple[str, ...] = ()
    links: bool = True
    resave: bool = False
    carried: Sequence[CarriedTree] = ()
    ancestry: Ancestry = field(default_factory=Ancestry)
    only: tuple[str, ...] = ()


def argument_digests(metadata: UserMetadata) -> tuple[str, ...]:
    """Return a short digest of each argument that `COMPARED_ARGUMENTS` lists, empty where it was not given. Of metrics
    the names are compared, of the others the values."""
    return tuple(_digest(name, getattr(metadata, name)) for name in COMPARED_ARGUMENTS.values())


def _digest(name: str, value: Any) -> str:
    if name == "metrics":
        value = sorted(value)
    if value is None or value in ((), [], {}, ""):
        return ""
    return blake3(msgspec.json.encode(value, order="sorted")).hexdigest(length=8)
