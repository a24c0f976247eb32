"""Turn what a user calls the place of a run into a `Storage`. Knows the local one; finds the others by their scheme."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from holdfast.errors import UsageError
from holdfast.storage.base import Storage, features_of
from holdfast.storage.local.local import LocalStorage

if TYPE_CHECKING:
    from importlib.metadata import EntryPoints

__all__ = ["ENTRY_POINT_GROUP", "open_storage", "path_of_file_url", "same_place", "storage_for"]

ENTRY_POINT_GROUP = "holdfast.storages"
# Two letters at least: `C:\runs` is a path and no scheme.
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+)://")


def open_storage(location: str | os.PathLike[str] | Storage) -> Storage:
    """Return the storage at a path, a `file://` URL or a URL of a registered scheme; a storage is returned as it is.

    A package registers a scheme with an entry point of the group `holdfast.storages`: its name is the scheme, its
    value a callable that takes the URL and returns a `Storage`.
    """
    if isinstance(location, Storage):
        return location
    if not isinstance(location, str | os.PathLike):
        raise UsageError(f"a run is a path, a URL or a Storage, not a {type(location).__name__}")
    text = os.fspath(location)
    scheme = _SCHEME.match(text)
    if isinstance(location, os.PathLike) or scheme is None:
        return LocalStorage(os.path.expanduser(text))
    name = scheme.group(1).lower()
    return LocalStorage(path_of_file_url(text)) if name == "file" else _opener(name, text)(text)


def storage_for(run: str | os.PathLike[str] | Storage, storage: object) -> Storage:
    """Return the storage that was given for a run, or the run's own."""
    if storage is None:
        return open_storage(run)
    if not isinstance(storage, Storage):
        missing = [name for name in dir(Storage) if not name.startswith("_") and not hasattr(storage, name)]
        raise UsageError(
            f"storage= is a {type(storage).__name__}, which has no {', '.join(missing)}",
            advice="give an object of the protocol holdfast.storage.base.Storage; a path or a URL is the run itself",
        )
    return storage


def same_place(one: Storage, other: Storage) -> bool:
    """Return whether two storages are the same one: by their URLs, or by the identity that both declare, because links,
    relative paths and bind mounts give a folder many names."""
    if one.url == other.url:
        return True
    first, second = (_identity(storage) for storage in (one, other))
    return first is not None and first == second


def _identity(storage: Storage) -> Hashable | None:
    identity = features_of(storage).identity
    return identity() if identity is not None else None


def path_of_file_url(url: str) -> str:
    """Return the path that a `file://` URL means."""
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(f"{url!r} is on another host", advice="write file:///path for a path of this machine")
    if parts.query or parts.fragment or not parts.path:
        raise UsageError(f"{url!r} is no path", advice="write file:///path, with %3F for '?' and %23 for '#'")
    return unquote(parts.path)


def _opener(scheme: str, url: str) -> Callable[[str], Storage]:
    # Here, because a run in a folder needs none, and the import takes as long as all of Holdfast's storage.
    from importlib import metadata

    registered: EntryPoints = metadata.entry_points(group=ENTRY_POINT_GROUP)
    for entry in registered:
        if entry.name.lower() == scheme:
            opener: Callable[[str], Storage] = entry.load()
            return opener
    known = ", ".join(sorted({"file", *(entry.name for entry in registered)}))
    raise UsageError(
        f"no storage is known for the scheme {scheme!r} of {url!r}",
        advice=f"known are {known}; install the package that registers {scheme!r} in {ENTRY_POINT_GROUP!r}",
    )
