"""The formats that can be read and written: Holdfast's own, and what packages register. Paths enter, sources leave."""

from __future__ import annotations

import importlib
import os
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from holdfast.errors import CheckpointNotFoundError, UnsupportedFormatError, UsageError
from holdfast.formats.base import Format
from holdfast.formats.source import Source
from holdfast.storage.base import Storage

__all__ = ["ENTRY_POINT_GROUP", "format_named", "format_names", "open_source"]

ENTRY_POINT_GROUP = "holdfast.formats"

# In the order in which they are asked. Imported when they are needed: most of them import torch.
_BUILT_IN = {
    "holdfast": "holdfast.formats.own:OwnFormat",
    "dcp": "holdfast.formats.dcp_folders.dcp_folder:DCPFormat",
    "peft": "holdfast.formats.hub.peft:PeftFormat",
    "hf": "holdfast.formats.hub.huggingface:HuggingFaceFormat",
    "safetensors": "holdfast.formats.hub.safetensors:SafetensorsFormat",
    "nemo": "holdfast.formats.nemo.nemo:NemoFormat",
    "torch": "holdfast.formats.torch_files.torch_file:TorchFormat",
}


def open_source(location: str | os.PathLike[str] | Storage) -> Source:
    """Open a checkpoint of any format that is known: a run or `RUN@SELECTOR`, a file, a folder."""
    from holdfast.formats.own import OwnSource, is_own_location

    if is_own_location(location):
        return OwnSource.resolve(location)
    path = Path(os.path.expanduser(os.fspath(location)))  # type: ignore[arg-type]
    if not path.exists():
        raise CheckpointNotFoundError("there is no such file or folder", file=str(path), advice="check the path")
    for name in format_names():
        form = format_named(name)
        if form.detects(path):
            return form.open(path)
    raise UnsupportedFormatError(
        "the content is of no format that is known",
        file=str(path),
        advice=f"known formats: {', '.join(format_names())}",
    )


def format_named(name: str) -> Format:
    """Return the format of this name."""
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        return _instance(name, getattr(importlib.import_module(module), attribute))
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.name == name:
            return _instance(name, entry.load())
    raise UsageError(f"there is no format '{name}'", advice=f"use one of {', '.join(format_names())}")


def format_names() -> list[str]:
    """Return the names of all formats, Holdfast's own first, in the order in which they are asked about a file."""
    return list(dict.fromkeys(_names()))


def _names() -> Iterator[str]:
    yield from _BUILT_IN
    yield from sorted(entry.name for entry in metadata.entry_points(group=ENTRY_POINT_GROUP))


def _instance(name: str, found: object) -> Format:
    made = found() if isinstance(found, type) else found
    if not isinstance(made, Format):
        raise UsageError(
            f"the entry point '{name}' of {ENTRY_POINT_GROUP!r} is no holdfast.formats.base.Format",
            advice="derive the class from it",
        )
    return made
