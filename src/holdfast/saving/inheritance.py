"""What a save of some components takes over from the checkpoint before it, its parent. The parent's manifest and the
names of the components enter; files, leaves, trees and metadata leave. Opens nothing, knows no torch.

A file is taken over as it is when all that it holds is still needed, or when it holds values: a reader looks up the
trees that the manifest lists and ignores others. Of a tensor file a manifest must list every byte, so one that also
holds leaves of the components that are stored anew is *mixed*: what is still needed of it is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from holdfast.ondisk import paths
from holdfast.ondisk.manifest import (
    IMPORTED_FROM,
    ChunkRecord,
    FileRecord,
    Manifest,
    TensorRecord,
    TreeRecord,
    UserMetadata,
)
from holdfast.runs.checkpoint import Checkpoint, encoded_metrics

__all__ = ["Inheritance", "inherit", "inherited_metadata", "inherited_versions"]


@dataclass(frozen=True, slots=True)
class Inheritance:
    """What is taken over: `files` as they are, and of the `mixed` ones the chunks of `tensors` that lie in them."""

    files: tuple[FileRecord, ...]
    mixed: tuple[FileRecord, ...]
    tensors: tuple[TensorRecord, ...]
    trees: tuple[TreeRecord, ...]

    @property
    def size_bytes(self) -> int:
        return sum(file.size_bytes for file in self.files)

    @property
    def mixed_bytes(self) -> int:
        return sum(file.size_bytes for file in self.mixed)

    def share(self, rank: int, size: int) -> Inheritance:
        """Return the files that one of `size` ranks takes over, and the leaves with their chunks in them."""
        files, mixed = self.files[rank::size], self.mixed[rank::size]
        names = {file.name for file in (*files, *mixed)}
        tensors = tuple(tensor for tensor in self.tensors if any(chunk.file in names for chunk in tensor.chunks))
        return Inheritance(files, mixed, tensors, self.trees)

    def chunks_in(self, files: Iterable[FileRecord]) -> list[tuple[TensorRecord, ChunkRecord]]:
        """Return the chunks that lie in these files, each with its leaf."""
        names = {file.name for file in files}
        return [(tensor, chunk) for tensor in self.tensors for chunk in tensor.chunks if chunk.file in names]


def inherit(parent: Manifest, components: Collection[str], assets: Collection[str]) -> Inheritance:
    """Return what a save of these components takes over. `assets` are the names of files and folders that it stores
    itself, each in the place of what the parent has under that name."""
    tensors = tuple(tensor for tensor in parent.tensors if _component_of(tensor.name) not in components)
    trees = tuple(tree for tree in parent.trees if tree.component not in components)
    wanted = {chunk.file for tensor in tensors for chunk in tensor.chunks} | {tree.file for tree in trees}
    stale = {
        chunk.file for tensor in parent.tensors if _component_of(tensor.name) in components for chunk in tensor.chunks
    }
    new = {f"{paths.ASSETS}/{name}" for name in assets}
    kept = [file for file in parent.files if file.name in wanted or _is_old_asset(file.name, new)]
    kept.sort(key=lambda file: file.name)
    return Inheritance(
        tuple(file for file in kept if file.name not in stale),
        tuple(file for file in kept if file.name in stale),
        tensors,
        trees,
    )


def inherited_metadata(given: UserMetadata, parent: Checkpoint, guards: dict[str, str]) -> UserMetadata:
    """Return the metadata of a save of some components. Entries of metrics, progress, extra and guards that were not
    given are the parent's, and so are the epoch and the configuration. A tag belongs to the one checkpoint that has it.
    `guards` are those of the components that are stored anew."""
    head = parent.head
    return UserMetadata(
        metrics={**encoded_metrics(parent), **given.metrics},
        progress={**head.progress, **given.progress},
        extra={**head.extra, **given.extra},
        config=given.config if given.config is not None else head.config,
        guards={**head.guards, **given.guards, **guards},
        tags=given.tags,
        epoch=given.epoch if given.epoch is not None else head.epoch,
        ranking=given.ranking or head.ranking,
    )


def inherited_versions(versions: dict[str, str], parent: Checkpoint) -> dict[str, str]:
    """Return the versions that a manifest states: where the parent's state was imported, a reader must know it."""
    imported = parent.head.versions.get(IMPORTED_FROM)
    return versions if imported is None else {**versions, IMPORTED_FROM: imported}


def _is_old_asset(file: str, new: Collection[str]) -> bool:
    """Return whether a file is an asset that no new one replaces, by its own name or by that of a folder above it."""
    parts = file.split("/")
    return parts[0] == paths.ASSETS and not any("/".join(parts[:end]) in new for end in range(2, len(parts) + 1))


def _component_of(leaf: str) -> str:
    """Return the component of a leaf. A component's name has neither a dot nor an `@`."""
    return leaf.partition(".")[0].partition("@")[0]
