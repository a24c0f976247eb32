"""Files that are stored beside the weights, such as a tokenizer. A file record enters; verified bytes leave."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import BinaryIO

from blake3 import blake3

from holdfast.errors import CorruptCheckpointError, KeyDamagedError, KeyMissingError, UsageError
from holdfast.ondisk import paths
from holdfast.ondisk.manifest import FileRecord
from holdfast.storage.base import Storage

__all__ = ["Asset", "Assets", "stored_assets"]

_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Asset:
    """A file that was stored with a checkpoint. `name` is its path below the folder of the assets."""

    name: str
    size_bytes: int
    _pieces: Callable[[], Iterator[bytes]] = field(repr=False)

    def pieces(self) -> Iterator[bytes]:
        """Yield the bytes, some at a time. Damage is raised at the end: what came before it must not be used then."""
        return self._pieces()

    def read(self) -> bytes:
        """Return all bytes, verified."""
        return b"".join(self._pieces())

    def open(self) -> BinaryIO:
        """Return the verified bytes as a file that is open for reading."""
        return io.BytesIO(self.read())


class Assets(Mapping[str, Asset]):
    """The assets of a checkpoint by name. A name that is not there is a UsageError that lists those that are."""

    def __init__(self, found: Mapping[str, Asset]) -> None:
        self._found = MappingProxyType(dict(found))

    def __getitem__(self, name: str) -> Asset:
        try:
            return self._found[name]
        except KeyError:
            known = ", ".join(sorted(self._found)[:20]) or "none"
            raise AssetMissing(f"there is no asset '{name}'", advice=f"there are: {known}") from None

    def __contains__(self, name: object) -> bool:
        return name in self._found

    def __iter__(self) -> Iterator[str]:
        return iter(self._found)

    def __len__(self) -> int:
        return len(self._found)

    def __repr__(self) -> str:
        return f"Assets({sorted(self._found)})"


class AssetMissing(UsageError, KeyError):
    """An asset that was asked for by name is not there. Also a KeyError, as any mapping raises."""


def stored_assets(storage: Storage, folder: str, files: tuple[FileRecord, ...]) -> Assets:
    """Return the assets among the files of a checkpoint."""
    prefix = f"{paths.ASSETS}/"
    return Assets(
        {
            file.name.removeprefix(prefix): Asset(
                file.name.removeprefix(prefix), file.size_bytes, partial(_verified, storage, folder, file)
            )
            for file in files
            if file.name.startswith(prefix)
        }
    )


def _verified(storage: Storage, folder: str, file: FileRecord) -> Iterator[bytes]:
    state = blake3()
    try:
        with storage.open(paths.key(folder, file.name)) as source:
            if source.size_bytes != file.size_bytes:
                raise CorruptCheckpointError(
                    f"the file has {source.size_bytes} bytes and {file.size_bytes} were written",
                    run=storage.url,
                    file=paths.key(folder, file.name),
                )
            for start in range(0, file.size_bytes, _PIECE_BYTES):
                piece = bytearray(min(_PIECE_BYTES, file.size_bytes - start))
                source.read_into(start, memoryview(piece))
                state.update(piece)
                yield bytes(piece)
    except (KeyMissingError, KeyDamagedError) as error:
        raise CorruptCheckpointError(error.problem, run=storage.url, file=paths.key(folder, file.name)) from None
    if state.hexdigest() != file.digest:
        raise CorruptCheckpointError(
            "the bytes do not have their digest", run=storage.url, file=paths.key(folder, file.name)
        )
