"""Read the files of a folder that may come from a stranger. A folder enters; open files, JSON values and assets leave.

Only regular files that lie in the folder are read. A link that leads elsewhere could put a private file of the reader
among the assets, and an export would pass it on. The snapshots of a Hugging Face cache, which are made of links into
the cache, are followed there.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from holdfast.errors import CorruptCheckpointError, HoldfastError, StorageError, UnsafeContentError
from holdfast.formats.binary import BinaryFile
from holdfast.formats.plain_text import require_plain_text
from holdfast.ondisk.paths import safe_relative
from holdfast.runs.assets import Asset

__all__ = ["Folder", "parse_json"]

_MAX_JSON_BYTES = 256 << 20
_MAX_FILES = 100_000
_PIECE_BYTES = 1 << 20
_CACHE_SNAPSHOTS, _CACHE_BLOBS = "snapshots", "blobs"


class Folder:
    """A folder of files, which are named by their relative paths."""

    def __init__(self, path: Path) -> None:
        self.path = path
        real = os.path.realpath(path)
        self._roots = [real]
        if os.path.basename(os.path.dirname(real)) == _CACHE_SNAPSHOTS:
            self._roots.append(os.path.join(os.path.dirname(os.path.dirname(real)), _CACHE_BLOBS))

    def has(self, name: str) -> bool:
        """Return whether there is a regular file, or a link to one, of this name."""
        try:
            return stat.S_ISREG(os.stat(self.path / name).st_mode)
        except (OSError, ValueError):
            return False

    def names(self) -> list[str]:
        """Return the names of all regular files, also those in folders below, sorted."""
        found: list[str] = []
        for folder, _, files in os.walk(self.path):
            for file in files:
                name = os.path.relpath(os.path.join(folder, file), self.path)
                if self.has(name):
                    found.append(name)
            if len(found) > _MAX_FILES:
                raise UnsafeContentError(f"the folder has more than {_MAX_FILES:,} files", file=str(self.path))
        return sorted(found)

    def open(self, name: str) -> BinaryFile:
        """Open a file for reading. One that lies elsewhere is an UnsafeContentError."""
        path = self.path / safe_relative(name)
        real = os.path.realpath(path)
        if not any(real.startswith(root + os.sep) for root in self._roots):
            raise UnsafeContentError(
                f"this is a link to {real}, outside of the folder",
                file=str(path),
                advice="put a copy of the file in its place",
            )
        return BinaryFile.open(path)

    def json(self, name: str) -> Any:
        """Return the values of a JSON file."""
        with self.open(name) as file:
            if file.size_bytes > _MAX_JSON_BYTES:
                raise CorruptCheckpointError(
                    f"the file has {file.size_bytes:,} bytes; at most {_MAX_JSON_BYTES:,} are accepted", file=file.name
                )
            return parse_json(file.read(0, file.size_bytes), file.name)

    def assets(self, without: Collection[str]) -> dict[str, Asset]:
        """Return the files by name, but for some."""
        return {name: self._asset(name) for name in self.names() if name not in without}

    def _asset(self, name: str) -> Asset:
        try:
            size_bytes = os.stat(self.path / name).st_size
        except OSError as error:
            raise StorageError.of(error, "looking at it", file=str(self.path / name)) from error
        return Asset(name, size_bytes, partial(_pieces, partial(self.open, name)))


def _pieces(opening: Callable[[], BinaryFile]) -> Iterator[bytes]:
    with opening() as file:
        for start in range(0, file.size_bytes, _PIECE_BYTES):
            yield file.read(start, min(_PIECE_BYTES, file.size_bytes - start))


def parse_json(data: bytes, name: str) -> Any:
    """Return the values of JSON text. A name twice in an object is damage: readers differ in which they take."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) != len(pairs):
            raise ValueError("an object has a name twice")
        return made

    try:
        values = json.loads(data.decode(), object_pairs_hook=unique)
        require_plain_text(values)
        return values
    except HoldfastError as error:
        raise error.at(file=name) from None
    except (ValueError, RecursionError) as error:
        raise CorruptCheckpointError(f"the file is no JSON: {error}", file=name) from None
