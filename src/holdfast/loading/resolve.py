"""Find the checkpoint that a user named: a run, a folder, a manifest, a link, `RUN@SELECTOR`. One way for all."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.errors import CheckpointNotFoundError, HoldfastError, UsageError
from holdfast.ondisk import paths
from holdfast.runs.catalog import Catalog, settled
from holdfast.runs.checkpoint import Checkpoint, Scan, Skipped
from holdfast.runs.selection import known_damaged, not_found
from holdfast.runs.selector import Selector, parse_selector
from holdfast.storage.base import Storage
from holdfast.storage.registry import open_storage, path_of_file_url

Location = str | os.PathLike[str] | Storage
NEVER_COMMITTED = "was never committed"


def resolve(location: Location, selector: str | int = "latest") -> Checkpoint:
    """Return the one checkpoint that is meant, or raise: nothing else is taken in its place."""
    catalog, chosen = locate(location, selector)
    return catalog.find(chosen)


def candidates(catalog: Catalog, selector: Selector) -> tuple[list[Checkpoint], list[Skipped]]:
    """Return the checkpoints to try, in order, and what was rejected already.

    Only `latest` gives more than one: it asks for the newest sound checkpoint. An explicit request that finds nothing
    is an error; `latest` in a run without a checkpoint gives none. A manifest that cannot be read now is an error, too:
    it may be the newest.
    """
    if not selector.may_fall_back:
        return [catalog.find(selector)], []
    scan = settled(catalog, catalog.scan_cached)
    found_damaged = known_damaged(scan)
    sound = [found for found in scan.checkpoints if not found.damage]
    if not sound and (scan.damaged or found_damaged):
        raise not_found(catalog.storage, selector, scan)
    return sound, [*scan.damaged, *found_damaged, *_newer_attempts(scan)]


def locate(location: Location, selector: str | int = "latest") -> tuple[Catalog, Selector]:
    """Return which run is meant, and which of its checkpoints."""
    if not isinstance(location, str | os.PathLike):
        return Catalog(open_storage(location)), parse_selector(selector)
    text = _require_path(os.fspath(location))
    if "://" in text and not text.startswith("file://"):
        head, selector = _split(text, selector)
        return Catalog(open_storage(head)), parse_selector(selector)
    text = _require_path(path_of_file_url(text)) if text.startswith("file://") else os.path.expanduser(text)
    path, selector = _existing(text, selector)
    try:
        return _at_path(path, selector)
    except (OSError, RuntimeError) as error:
        if isinstance(error, HoldfastError):
            raise
        raise UsageError(f"{path} is no path that can be followed: {error}") from None


def _require_path(text: object) -> str:
    """Return what may be the path or the URL of a run, and refuse what no file system takes."""
    if not isinstance(text, str):
        raise UsageError(f"the path of the run is of type {type(text).__name__}", advice="give a str or a Path of one")
    if not text:
        raise UsageError("the path of the run is empty")
    if "\0" in text:
        raise UsageError(f"the path of the run has a NUL character: {text!r}", advice="check how the path was made")
    return text


def _existing(text: str, selector: str | int) -> tuple[Path, str | int]:
    """Return the path and the selector. A path that exists is taken whole, also with an `@` in it."""
    if not os.path.lexists(text) and "@" in text:
        text, selector = _split(text, selector)
    return Path(text), selector


def _split(text: str, selector: str | int) -> tuple[str, str | int]:
    # Metrics are often called val/loss or acc@1; any other slash behind an `@` belongs to a path.
    head, best, metric = text.rpartition("@best:")
    head, separator, tail = (head, "@", f"best:{metric}") if best else text.rpartition("@")
    if not separator or ("/" in tail and not best):
        return text, selector
    if selector != "latest":
        raise UsageError(
            f"{text!r} names a checkpoint, and so does the selector {selector!r}", advice="give one of them"
        )
    return head, tail


def _at_path(path: Path, selector: str | int) -> tuple[Catalog, Selector]:
    # Links such as `latest` are followed here, where a user named them; nothing inside of a run is ever followed.
    real = path.resolve()
    if real.name == paths.MANIFEST and not real.is_dir():
        real = real.parent
    if real.is_file():
        raise UsageError(f"{path} is a file, not a run", advice="give the run's folder")
    if paths.parse_folder(real.name) is not None and (real / paths.MANIFEST).exists():
        if selector != "latest":
            raise UsageError(f"{path} is one checkpoint; the selector {selector!r} would name another")
        return Catalog(open_storage(real.parent)), Selector("folder", name=real.name)
    for above in (path, *path.parents):
        if above.is_symlink() and not above.exists():
            raise CheckpointNotFoundError(f"{above} points to {os.readlink(above)}, which is not there")
    if paths.parse_folder(real.name) is not None and real.is_dir():
        return Catalog(open_storage(real.parent)), Selector("folder", name=real.name)
    catalog = Catalog(open_storage(real))
    if (real / paths.MANIFEST).is_file() and (name := catalog.name_as_checkpoint()):
        raise UsageError(
            f"{path} is a checkpoint under another name: its manifest belongs to {name}",
            advice=f"give the folder the name {name}; a copy can be in any folder, under that name",
        )
    return catalog, parse_selector(selector)


def _newer_attempts(scan: Scan) -> list[Skipped]:
    """Return the attempts at steps after the newest checkpoint, which a user may look for."""
    newest = max((checkpoint.step for checkpoint in scan.checkpoints), default=-1)
    return [
        Skipped(name, NEVER_COMMITTED)
        for name in scan.attempts
        if (parsed := paths.parse_folder(name)) and parsed.step > newest
    ]


__all__ = ["NEVER_COMMITTED", "Location", "candidates", "locate", "resolve"]
