"""Write weights of any source in another format. A source, a target and a format enter; the finished target leaves.

Tensors are streamed: no more than a few pieces of one are in memory at a time. The target is written beside its name,
made durable, and moved there when it is complete.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.errors import UsageError
from holdfast.formats.base import Format
from holdfast.formats.exporting.components import (
    component_names,
    component_of,
    frozen_bases,
    models_among,
    refuse_subclasses,
    values_of,
)
from holdfast.formats.exporting.publishing import check_target, published, require_room
from holdfast.formats.exporting.read_ahead import ReadAhead, pieces_in_place
from holdfast.formats.own import OwnSource
from holdfast.formats.registry import format_named, open_source
from holdfast.formats.source import Source, TensorEntry, tensors_of
from holdfast.formats.weights.renaming import Rename, renamed
from holdfast.ondisk.dtypes import ELEMENT_TYPES, element_type
from holdfast.runs.assets import Asset
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.progress import Progress
from holdfast.storage.base import Storage

if TYPE_CHECKING:
    import torch

__all__ = ["ExportItem", "ExportJob", "ExportReport", "Pieces", "export"]

logger = logging.getLogger("holdfast")

# What a format writes around the tensors: headers, an index, a configuration.
_ROOM_FOR_THE_REST_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class ExportItem:
    """One tensor to write: its name and element type in the target, and where it comes from."""

    name: str
    entry: TensorEntry
    dtype: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.entry.shape

    @property
    def size_bytes(self) -> int:
        size = element_type(self.dtype).item_bytes
        return self.entry.size_bytes // self.entry.item_bytes * size


Pieces = Callable[[ExportItem], Iterator[memoryview]]
"""Yields the bytes of a tensor. Each piece is valid until the next one is asked for."""


@dataclass(frozen=True, slots=True)
class ExportJob:
    """What a format writes.

    items: the tensors, in the order in which they should be written. tree: the same tensors, and values that are no
    tensors, nested as the source has them, with an `ExportItem` in the place of each tensor; flat names of the model
    when one component is exported. config, assets: what the source has beside the weights. max_shard_bytes: the most
    bytes of tensors in one file; None for the format's own rule. name: the name that the target will have. dtype: the
    element type that the user asked for, if any. read: how items are read; by the calling thread where it is None.
    """

    source: Source
    items: tuple[ExportItem, ...]
    tree: Mapping[str, Any]
    config: Any = None
    assets: Mapping[str, Asset] = field(default_factory=dict)
    max_shard_bytes: int | None = None
    on_bytes: Callable[[int], None] = lambda count: None
    name: str = ""
    dtype: str | None = None
    read: Pieces | None = None

    def pieces(self, item: ExportItem) -> Iterator[memoryview]:
        """Yield the bytes of a tensor as the target wants them, verified where the source can be. Each piece is valid
        until the next one is asked for. Items that are asked for in the order of `items` are read ahead."""
        return self._counted(pieces_in_place(self.source, item) if self.read is None else self.read(item))

    @contextmanager
    def reading_ahead(self, items: Sequence[ExportItem]) -> Iterator[Pieces]:
        """Give a function like `pieces` for items that are asked for in another order, which is this one."""
        with ReadAhead(self.source, items) as ahead:
            yield lambda item: self._counted(ahead.pieces(item))

    def _counted(self, pieces: Iterator[memoryview]) -> Iterator[memoryview]:
        for piece in pieces:
            yield piece
            self.on_bytes(len(piece))


@dataclass(frozen=True, slots=True)
class ExportReport:
    """What an export wrote. `names`: the tensors. `left_out`: values of the source that the format has no place for."""

    path: Path
    format: str
    names: tuple[str, ...]
    bytes_written: int
    seconds: float
    left_out: tuple[str, ...] = ()


def export(
    source: str | os.PathLike[str] | Storage | Checkpoint | Source,
    target: str | os.PathLike[str],
    *,
    format: str | Format,
    only: str | Sequence[str] = "model",
    dtype: str | torch.dtype | None = None,
    rename: Rename | None = None,
    max_shard_bytes: int | None = None,
) -> ExportReport:
    """Write weights of a checkpoint to a new file or folder of another format.

    source: a run or `RUN@SELECTOR`, a `Checkpoint`, or a file or folder of any format that can be read. only: the
    component to write, with the names that it has itself; several for a format that can hold more than weights.
    dtype: convert floating-point tensors of models to this type; an optimizer keeps its types. rename: a mapping of
    names, in which `*` stands for anything, pairs of a regular expression and its replacement, or a function; None
    drops a tensor. max_shard_bytes: the most bytes of tensors in one file, for a format of several.

    The source is verified on the way. The target is complete or not there, and one that exists is never overwritten.
    """
    started = time.monotonic()
    path = check_target(target)
    form = format if isinstance(format, Format) else format_named(format)
    names = component_names(only)
    _check_request(form, names, rename, max_shard_bytes)
    wanted = None if dtype is None else _floating(dtype)
    with _opened(source) as opened:
        found, left_out = _job(opened, form, names, wanted, rename)
        job = form.prepare(replace(found, name=path.name, max_shard_bytes=max_shard_bytes))
        total_bytes = sum(item.size_bytes for item in job.items)
        require_room(path, total_bytes + _ROOM_FOR_THE_REST_BYTES)
        with Progress(f"exporting to {path.name}", total_bytes) as bar, published(path) as partial:
            with ReadAhead(opened, job.items) as ahead:
                form.write(replace(job, on_bytes=bar.add, read=ahead.pieces), partial)
            written = _size_of(partial)
    if left_out:
        shown = ", ".join(left_out[:8]) + (", ..." if len(left_out) > 8 else "")
        logger.warning("%s: values that are no tensors are left out: %s", path, shown)
    return ExportReport(
        path, form.name, tuple(item.name for item in job.items), written, time.monotonic() - started, tuple(left_out)
    )


def _check_request(form: Format, names: Sequence[str], rename: Rename | None, max_shard_bytes: int | None) -> None:
    if type(form).write is Format.write:
        raise UsageError(f"the format '{form.name}' cannot be written", advice="choose another format")
    if len(names) > 1 and form.weights_only:
        raise UsageError(
            f"the format '{form.name}' holds one component, not {len(names)}",
            advice="export one, as only='model', or use a format such as 'dcp' or 'torch'",
        )
    if len(names) > 1 and rename is not None:
        raise UsageError("rename= goes with one component", advice="export one component, or leave rename= out")
    is_count = isinstance(max_shard_bytes, int) and not isinstance(max_shard_bytes, bool) and max_shard_bytes > 0
    if max_shard_bytes is not None and not is_count:
        raise UsageError(f"max_shard_bytes={max_shard_bytes!r:.100}", advice="give a number of bytes above 0")


def _floating(dtype: str | torch.dtype) -> str:
    """Return the name of an element type to convert to."""
    name = str(dtype).removeprefix("torch.")
    if name not in ELEMENT_TYPES or not _is_floating(name):
        known = ", ".join(filter(_is_floating, ELEMENT_TYPES))
        raise UsageError(f"dtype={dtype!r:.100} is no floating-point type", advice=f"give one of {known}")
    return name


def _is_floating(name: str) -> bool:
    return name.startswith(("float", "bfloat"))


def _opened(
    source: str | os.PathLike[str] | Storage | Checkpoint | Source,
) -> AbstractContextManager[Source]:
    """Open what is no open source yet. A source that the caller opened stays open."""
    if isinstance(source, Source):
        return nullcontext(source)
    return OwnSource(source) if isinstance(source, Checkpoint) else open_source(source)


def _job(
    source: Source, form: Format, names: Sequence[str], dtype: str | None, rename: Rename | None
) -> tuple[ExportJob, list[str]]:
    """Return what is to be written, and the values that the format has no place for."""
    parts = {name: component_of(source, name) for name in names}
    for name, part in parts.items():
        refuse_subclasses(part, name)
        if name.partition("@")[0] in frozen_bases(source) and not form.takes_adapters:
            raise UsageError(
                "the checkpoint has only what was trained of this model (Trainable), not its frozen base",
                component=name,
                file=source.location,
                advice="export it with format='peft', or save the whole model",
            )
    tree: Any = parts if len(parts) > 1 else parts[names[0]]
    left_out = values_of(tree) if form.weights_only else []
    models = frozenset() if dtype is None else models_among(source, parts)
    if rename is not None:
        job = _renamed_job(source, tree, dtype, rename)
    else:
        job = _whole_job(source, tree, dtype, _names_in(parts, models))
    if not job.items:
        raise UsageError(f"there is no tensor to write in {', '.join(names)}", file=source.location)
    return job, left_out


def _names_in(parts: Mapping[str, Any], models: Set[str]) -> frozenset[str]:
    """Return the names of the models' tensors in the tree of all parts."""
    return frozenset(
        f"{model}.{name}" if len(parts) > 1 else name for model in models for name in tensors_of(parts[model])
    )


def _whole_job(source: Source, tree: Any, dtype: str | None, converted: Set[str]) -> ExportJob:
    items = {name: _item(name, entry, dtype if name in converted else None) for name, entry in tensors_of(tree).items()}
    return _of_source(source, items, _with_items(tree, "", items), dtype)


def _renamed_job(source: Source, tree: Any, dtype: str | None, rename: Rename) -> ExportJob:
    found = tensors_of(tree)
    items = {new: _item(new, found[old], dtype) for new, old in renamed(found, rename).names.items()}
    values = {key: value for key, value in tree.items() if not isinstance(value, TensorEntry)}
    if any(tensors_of(value) for value in values.values()):
        raise UsageError("rename= goes with a component of flat names, such as a model", file=source.location)
    taken = sorted(values.keys() & items.keys())
    if taken:
        raise UsageError(f"rename makes '{taken[0]}', which is a value that is no tensor", file=source.location)
    return _of_source(source, items, {**items, **values}, dtype)


def _of_source(source: Source, items: Mapping[str, ExportItem], tree: Any, dtype: str | None) -> ExportJob:
    return ExportJob(source, tuple(items.values()), tree, source.config, source.assets, dtype=dtype)


def _item(name: str, entry: TensorEntry, dtype: str | None) -> ExportItem:
    return ExportItem(name, entry, dtype if dtype is not None and _is_floating(entry.dtype) else entry.dtype)


def _with_items(value: Any, path: str, items: Mapping[str, ExportItem]) -> Any:
    """Return a tree with the item of each tensor in its place."""
    if isinstance(value, TensorEntry):
        return items[path]
    if isinstance(value, Mapping):
        return {key: _with_items(inner, f"{path}.{key}" if path else str(key), items) for key, inner in value.items()}
    if type(value) in (list, tuple):
        inner = (_with_items(one, f"{path}.{key}" if path else str(key), items) for key, one in enumerate(value))
        return type(value)(inner)
    return value


def _size_of(path: Path) -> int:
    """Return the number of bytes of a file, or of all files in a folder."""
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
