"""Open a Holdfast checkpoint as a source of weights. A run and a selector enter; every byte that leaves is verified."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Self

from holdfast.errors import UsageError
from holdfast.formats.base import Format
from holdfast.formats.source import PIECE_BYTES, Fill, Source, TensorEntry
from holdfast.loading.reader import CheckpointReader, Leaf
from holdfast.loading.resolve import Location, locate, resolve
from holdfast.loading.strategy import Verify
from holdfast.ondisk import paths
from holdfast.ondisk.codec import Subclass
from holdfast.runs.assets import Asset
from holdfast.runs.catalog import Catalog
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.readers import reading
from holdfast.runs.selector import Selector
from holdfast.saving.current import finish_saves
from holdfast.storage.base import Storage
from holdfast.storage.local.advice import explaining

__all__ = ["OwnFormat", "OwnSource", "is_own_location"]


class OwnSource(Source):
    """A committed checkpoint. It is claimed while it is open, so that retention does not delete it."""

    format: ClassVar[str] = "holdfast"

    def __init__(self, checkpoint: Checkpoint, *, verify: Verify = "full") -> None:
        super().__init__(checkpoint.path)
        self._closing = ExitStack()
        self._closing.enter_context(reading(checkpoint.storage, checkpoint.folder))
        # Again: from here on it is not removed, and a moment ago it may have been.
        found = Catalog(checkpoint.storage).find(Selector("folder", name=checkpoint.folder))
        self.checkpoint = found
        self.reader = CheckpointReader(found, verify=verify)

    @classmethod
    def resolve(cls, location: Location) -> Self:
        """Open the checkpoint that a location names: a run, `RUN@SELECTOR`, a folder, a link."""
        catalog, _ = locate(location)
        # Or an older checkpoint would be taken than the one that this process has just saved.
        finish_saves(catalog.storage)
        return cls(resolve(location))

    @cached_property
    def _entries(self) -> dict[str, TensorEntry]:
        return {leaf.name: TensorEntry(leaf.name, leaf.dtype, leaf.shape, handle=leaf) for leaf in self.reader.leaves}

    @cached_property
    def tree(self) -> Mapping[str, Any]:
        return _Trees([tree.name for tree in self.reader.trees], self._decoded)

    def _decoded(self, tree: str) -> Any:
        return self._with_entries(self.reader.values(tree))

    def _with_entries(self, value: Any) -> Any:
        if isinstance(value, Leaf):
            return self._entries[value.name]
        if isinstance(value, Subclass):
            return value
        if isinstance(value, Mapping):
            return {key: self._with_entries(inner) for key, inner in value.items()}
        if isinstance(value, list | tuple):
            return type(value)(map(self._with_entries, value)) if type(value) in (list, tuple) else value
        return value

    def weights_trees(self) -> Sequence[str]:
        return [tree.name for tree in self.reader.trees if tree.kind == "module"]

    @property
    def identity(self) -> str:
        return self.checkpoint.digest

    @property
    def config(self) -> Any:
        return self.checkpoint.config

    @property
    def assets(self) -> Mapping[str, Asset]:
        return self.checkpoint.assets

    def read(self, fills: Sequence[Fill], on_bytes: Callable[[int], None] = lambda count: None) -> None:
        reader = self.reader
        reader.fill([reader.request(fill.entry.handle, fill.box, fill.target) for fill in fills], on_bytes=on_bytes)

    def pieces(self, entry: TensorEntry, *, limit_bytes: int = PIECE_BYTES) -> Iterator[memoryview]:
        memory = bytearray(min(limit_bytes, entry.size_bytes))
        for box in entry.boxes(limit_bytes) if entry.size_bytes else ():
            size = box.volume * entry.item_bytes
            if size > len(memory):
                memory = bytearray(size)
            with memoryview(memory)[:size] as view:
                self.reader.read_into(entry.name, view, box)
                yield view

    def close(self) -> None:
        self._closing.close()


class _Trees(Mapping[str, Any]):
    """The trees of a checkpoint by name, each decoded when it is first asked for: what an unused component holds, such
    as a class that this program has not registered, must not matter."""

    def __init__(self, names: Sequence[str], decode: Callable[[str], Any]) -> None:
        self._names = dict.fromkeys(names)
        self._decode = decode
        self._decoded: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._names:
            raise KeyError(name)
        if name not in self._decoded:
            self._decoded[name] = self._decode(name)
        return self._decoded[name]

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def is_own_location(location: object) -> bool:
    """Return whether a location names a Holdfast run or checkpoint: a storage, a URL, `RUN@SELECTOR`, or a folder that
    has the records of one."""
    if isinstance(location, Storage):
        return True
    if not isinstance(location, str | os.PathLike):
        raise UsageError(
            f"a source is a path, a URL or a Storage, not a {type(location).__name__}",
            advice="give a run, RUN@SELECTOR, a file or a folder",
        )
    text = os.fspath(location)
    if "://" in text:
        return True
    try:
        with explaining("looking at it", text):
            return _is_own_path(text)
    except (ValueError, RuntimeError) as error:
        raise UsageError(f"{text!r:.200} is no path: {error}", advice="check the path") from None


def _is_own_path(text: str) -> bool:
    path = Path(os.path.expanduser(text))
    os.fsencode(path)
    if path.exists():
        return OwnFormat().detects(path)
    # A path that does not exist: `RUN@SELECTOR`, of which the part before the last `@` is a run.
    head = text.rpartition("@best:")[0] or text.rpartition("@")[0]
    return bool(head) and OwnFormat().detects(Path(os.path.expanduser(head)))


class OwnFormat(Format):
    """Holdfast's own checkpoints. To write one is `import_checkpoint`, or a save."""

    name: ClassVar[str] = "holdfast"
    is_folder: ClassVar[bool] = True

    def detects(self, path: Path) -> bool:
        if path.name == paths.MANIFEST:
            return path.is_file() and _is_manifest(path)
        folder = path.resolve()
        if (folder / paths.RUN_KEY).is_file():
            return True
        if (folder / paths.MANIFEST).is_file():
            return _is_manifest(folder / paths.MANIFEST)
        return paths.parse_folder(folder.name) is not None and (folder.parent / paths.RUN_KEY).is_file()

    def open(self, path: Path) -> Source:
        return OwnSource.resolve(path)


def _is_manifest(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(19).startswith(b'{"holdfast_format":')
    except OSError:
        return False
