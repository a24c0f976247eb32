"""What a manifest says besides its files, and which leaves and trees it lists. Values only, all of them encoded."""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.ondisk.manifest import MeshRecord, Ranking, TensorRecord, TreeRecord
from holdfast.runs.lineage import Lineage


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """What a manifest says besides its files. The sequence number is the commit's to give. `lease` is the number under
    which this process writes, and `lease_token` tells its claim from another's; nothing is committed under one that has
    been taken over. `links`: move `latest`."""

    step: int
    folder: str
    parent: str | None
    meshes: tuple[MeshRecord, ...]
    metrics: dict[str, Any]
    progress: dict[str, Any]
    extra: dict[str, Any]
    config: Any
    guards: dict[str, Any]
    tags: tuple[str, ...]
    versions: dict[str, str]
    lineage: Lineage = Lineage()
    segment: str = ""
    lease: int = 0
    lease_token: str = ""
    links: bool = True
    epoch: int | None = None
    ranking: Ranking = ()


class Listing(msgspec.Struct, frozen=True):
    """The leaves and trees that the plan promised; the leaves still without their chunks."""

    leaves: tuple[TensorRecord, ...]
    trees: tuple[TreeRecord, ...]
