"""Open the files of a checkpoint and read its values. A checkpoint enters; open files, values or damage leave.

Knows the sizes and digests in the manifest; imports no torch.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from contextlib import ExitStack
from typing import Any, TypeVar

import msgspec
from blake3 import blake3

from holdfast.errors import CorruptCheckpointError, KeyDamagedError, KeyMissingError
from holdfast.loading.requests import Request, overlaps
from holdfast.ondisk.codec import Json
from holdfast.ondisk.decoding import from_json
from holdfast.ondisk.manifest import MAX_VALUES_BYTES, FileRecord, TreeRecord
from holdfast.runs.checkpoint import Checkpoint
from holdfast.runs.report import Problem
from holdfast.storage.base import Source
from holdfast.storage.documents import read_document

__all__ = [
    "DAMAGE",
    "Files",
    "ValueFiles",
    "check_files",
    "check_sizes",
    "open_file",
    "parse_texts",
    "parse_values",
    "read_values",
    "reference_of",
    "require_file",
]

_Trees = TypeVar("_Trees")

# Errors which mean that a file is not what was written. Any other error of the storage means that it cannot be read
# now.
DAMAGE = (KeyMissingError, KeyDamagedError)


def check_sizes(checkpoint: Checkpoint, requests: Sequence[Request]) -> list[Problem]:
    """Return the files of these requests that are missing or have another size than the manifest has. Reads none."""
    return check_files(
        checkpoint, {overlap.chunk.file for request in requests for overlap in overlaps(request, checkpoint)}
    )


def check_files(checkpoint: Checkpoint, names: Set[str]) -> list[Problem]:
    """Return which of these files are missing or have another size than the manifest has."""
    with ExitStack() as stack:
        found = [open_file(checkpoint, name, stack) for name in sorted(names)]
    return [problem for problem in found if isinstance(problem, Problem)]


def require_file(checkpoint: Checkpoint, name: str) -> None:
    """Raise unless a file is there and has the size that the manifest has. Memory is taken only after this check."""
    expected = _record(checkpoint, name).size_bytes
    with checkpoint.storage.open(checkpoint.key(name)) as source:
        if source.size_bytes != expected:
            raise CorruptCheckpointError(_other_size(source.size_bytes, expected), file=name)


def read_values(checkpoint: Checkpoint, name: str, *, checked: bool) -> bytearray:
    """Read a file of values whole. Another size than the manifest has or, with `checked`, another digest is an
    error."""
    record = _record(checkpoint, name)
    data = read_document(checkpoint.storage, checkpoint.key(name), min(record.size_bytes, MAX_VALUES_BYTES))
    if len(data) != record.size_bytes:
        raise CorruptCheckpointError(_other_size(len(data), record.size_bytes), file=name)
    if checked and blake3(data).hexdigest() != record.digest:
        raise CorruptCheckpointError("the bytes do not have their digest", file=name, byte_range=(0, len(data)))
    return data


def parse_values(data: bytes | bytearray, file: str) -> dict[str, Json]:
    """Return the values of each tree in a file of values, still encoded by the codec."""
    return _trees_in(data, file, dict[str, dict[str, Any]])


def parse_texts(data: bytes | bytearray, file: str) -> dict[str, msgspec.Raw]:
    """Return the values of each tree in a file of values as the text that was stored."""
    return _trees_in(data, file, dict[str, dict[str, msgspec.Raw]])


def _trees_in(data: bytes | bytearray, file: str, kind: type[dict[str, _Trees]]) -> _Trees:
    try:
        return from_json(data, kind)["trees"]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError, KeyError) as error:
        raise CorruptCheckpointError(f"not a file of values: {error}", file=file) from None


def reference_of(value: Json) -> str | None:
    """Return the path of the tensor that an encoded value refers to; None for any other value."""
    reference = value.get("$tensor") if isinstance(value, dict) else None
    return reference if isinstance(reference, str) else None


class ValueFiles:
    """What a match asks of a checkpoint's files, each of which is read, or looked at, once."""

    def __init__(self, checkpoint: Checkpoint, *, checked: bool) -> None:
        self._checkpoint = checkpoint
        self._checked = checked
        self._values: dict[str, dict[str, Json]] = {}
        self._present: set[str] = set()

    def values(self, tree: TreeRecord) -> Json:
        """Return the encoded values of a tree."""
        if tree.file not in self._values:
            data = read_values(self._checkpoint, tree.file, checked=self._checked)
            self._values[tree.file] = parse_values(data, tree.file)
        try:
            return self._values[tree.file][tree.name]
        except KeyError:
            raise CorruptCheckpointError(f"the file has no values of '{tree.name}'", file=tree.file) from None

    def require(self, name: str) -> None:
        """Raise unless a file has the size that the manifest has, before memory is taken for what it holds."""
        if name not in self._present:
            require_file(self._checkpoint, name)
            self._present.add(name)


class Files:
    """The files of a checkpoint, each opened at its first use. Notes for each leaf what is wrong with its file."""

    def __init__(self, checkpoint: Checkpoint, stack: ExitStack) -> None:
        self.problems: list[Problem] = []
        self._checkpoint = checkpoint
        self._stack = stack
        self._sources: dict[str, Source | Problem] = {}

    def source(self, file: str, leaf: str) -> Source | None:
        """Return the open file; None, with a problem noted for the leaf, where it is damaged."""
        source = self._sources.get(file) or self._open(file)
        if isinstance(source, Problem):
            problem = Problem(source.file, source.what, leaf)
            # Once, whatever number of pieces of the leaf are asked for, one after the other.
            if not self.problems or self.problems[-1] != problem:
                self.problems.append(problem)
            return None
        return source

    def sound(self, file: str) -> Source | None:
        """Return the open file; None, with nothing noted, where it is damaged."""
        source = self._sources.get(file) or self._open(file)
        return None if isinstance(source, Problem) else source

    @property
    def block_bytes(self) -> int:
        """Return the number of bytes that one digest is of."""
        return self._checkpoint.manifest.block_bytes

    def _open(self, file: str) -> Source | Problem:
        source = self._sources[file] = open_file(self._checkpoint, file, self._stack)
        return source


def open_file(checkpoint: Checkpoint, name: str, stack: ExitStack) -> Source | Problem:
    """Open a file until the stack is closed, or return why it is damaged."""
    try:
        source = stack.enter_context(checkpoint.storage.open(checkpoint.key(name)))
    except DAMAGE as error:
        return Problem(name, error.problem)
    expected = _record(checkpoint, name).size_bytes
    if source.size_bytes != expected:
        return Problem(name, _other_size(source.size_bytes, expected))
    return source


def _record(checkpoint: Checkpoint, name: str) -> FileRecord:
    return next(file for file in checkpoint.manifest.files if file.name == name)


def _other_size(found: int, expected: int) -> str:
    return f"has {found} bytes, the manifest says {expected}"
